"""Answers of /v1/completions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from faser.api.serving.formatter import Choice, ChoiceState
from faser.api.serving.logprobs import TextLogprobs, TokenNames, prompt_logprobs
from faser.types import OutputDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionFormatter:
    """What the request asked for beside text. echo: the prompt, and its logprobs, come first."""

    id_prefix: ClassVar[str] = "cmpl-"
    object_name: ClassVar[str] = "text_completion"
    chunk_object_name: ClassVar[str] = "text_completion"
    prompt_field: ClassVar[str] = "prompt"

    names: TokenNames
    echo: bool = False
    logprobs: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    asks_prompt_logprobs: bool = False

    def whole(self, state: ChoiceState, delta: OutputDelta) -> Choice:
        choice = self._choice(state, delta)
        positions = state.prompt_logprobs
        asked = self.asks_prompt_logprobs and positions is not None
        choice["prompt_logprobs"] = prompt_logprobs(positions or (), self.names) if asked else None
        return choice

    def pieces(self, state: ChoiceState, delta: OutputDelta) -> list[Choice]:
        return [self._choice(state, delta)]

    def beside_choices(self, states: Sequence[ChoiceState]) -> dict[str, Any]:
        del states  # every choice brings its own prompt
        return {}

    def _choice(self, state: ChoiceState, delta: OutputDelta) -> Choice:
        first = not state.started
        state.started = True
        choice = {
            "index": state.index,
            "text": self._prompt_text(state) + delta.text if first and self.echo else delta.text,
            "logprobs": self._logprobs(state, delta, first) if self.logprobs else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if first:
                choice["prompt_token_ids"] = state.prompt.token_ids
        return choice

    def _prompt_text(self, state: ChoiceState) -> str:
        if state.prompt.text is not None:
            return state.prompt.text
        return self.names.tokenizer.decode(state.prompt.token_ids, self.skip_special_tokens)

    def _logprobs(self, state: ChoiceState, delta: OutputDelta, first: bool) -> dict[str, Any]:
        """text_offset counts from the beginning of the choice's text, the echoed prompt included."""
        table = TextLogprobs(self.names, offset=state.text_offset, skip_special_tokens=self.skip_special_tokens)
        if first and self.echo:
            positions = state.prompt_logprobs or (None,) * len(state.prompt.token_ids)
            for token_id, position in zip(state.prompt.token_ids, positions, strict=True):
                table.add(token_id, position)
        for position in delta.logprobs or ():
            table.add(position.token_id, position)
        state.text_offset = table.offset
        return table.as_json()
