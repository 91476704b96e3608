"""Answers of /v1/completions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from faser.api.answers.framing import LOWEST_LOGPROB, Choice, ChoiceState, TokenFormatter, prompt_logprobs
from faser.api.answers.usage import trace_json
from faser.optional import given, maybe
from faser.types.answer import OutputDelta, PositionLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionFormatter:
    """The fields: what the request asked for in addition to text. echo: the text begins with the prompt."""

    id_prefix: ClassVar[str] = "cmpl-"
    object_name: ClassVar[str] = "text_completion"
    chunk_object_name: ClassVar[str] = "text_completion"
    prompt_field: ClassVar[str] = "prompt"

    token_formatter: TokenFormatter
    echo: bool = False
    logprobs: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    asks_prompt_logprobs: bool = False

    def choice(self, state: ChoiceState, delta: OutputDelta) -> Choice:
        choice = self._choice(state, delta)
        if self.asks_prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs(state.prompt_logprobs or (), self.token_formatter)
        return choice

    def chunks(self, state: ChoiceState, delta: OutputDelta) -> list[Choice]:
        return [self._choice(state, delta)]

    def first_chunk_fields(self) -> dict[str, Any]:
        return {}

    def top_level_fields(self, states: Sequence[ChoiceState]) -> dict[str, Any]:
        del states  # each choice has the fields of its own prompt
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
        return choice | given({"trace": maybe(trace_json, delta.trace)})

    def _prompt_text(self, state: ChoiceState) -> str:
        if state.prompt.text is not None:
            return state.prompt.text
        return self.token_formatter.tokenizer.decode(state.prompt.token_ids, skip_special_tokens=False)

    def _logprobs(self, state: ChoiceState, delta: OutputDelta, first: bool) -> dict[str, Any]:
        """text_offset counts from the start of the choice's text, which includes an echoed prompt."""
        logprobs = CompletionLogprobs(
            self.token_formatter, offset=state.text_offset, skip_special_tokens=self.skip_special_tokens
        )
        if first and self.echo:
            echoed = self._prompt_text(state)
            positions = state.prompt_logprobs or (None,) * len(state.prompt.token_ids)
            for token_id, position in zip(state.prompt.token_ids, positions, strict=True):
                logprobs.add(token_id, position, echoed=echoed)
        for position in delta.logprobs or ():
            logprobs.add(position.token_id, position)
        state.text_offset = logprobs.offset
        return logprobs.as_json()


class CompletionLogprobs:
    """OpenAI's format for completions, built token by token. offset: where the next token's text begins."""

    def __init__(self, formatter: TokenFormatter, *, offset: int, skip_special_tokens: bool) -> None:
        self._formatter = formatter
        self._skip_special_tokens = skip_special_tokens
        self.offset = offset
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add(self, token_id: int, position: PositionLogprobs | None, *, echoed: str | None = None) -> None:
        """position: None for the first token of a prompt, which has no probability.

        echoed: the text of the prompt that the token is part of; None: the token is generated.
        """
        self._tokens.append(self._formatter.completion(token_id))
        self._offsets.append(self.offset)
        self.offset += self._num_chars(token_id, echoed)
        if position is None:
            self._logprobs.append(None)
            self._top.append(None)
            return
        self._logprobs.append(max(position.logprob, LOWEST_LOGPROB))
        top: dict[str, float] = {}
        for each_id, logprob in ((position.token_id, position.logprob), *position.top):
            top.setdefault(self._formatter.completion(each_id), max(logprob, LOWEST_LOGPROB))
        self._top.append(top)

    def as_json(self) -> dict[str, Any]:
        return {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._top,
            "text_offset": self._offsets,
        }

    def _num_chars(self, token_id: int, echoed: str | None) -> int:
        """Number of characters that begin in this token: its bytes that do not continue a code point.

        A special token of the prompt counts where the echoed text has it: not one that tokenising added.
        """
        tokenizer = self._formatter.tokenizer
        if tokenizer.is_special(token_id):
            if echoed is None and self._skip_special_tokens:
                return 0
            if echoed is not None and not echoed.startswith(tokenizer.token_text(token_id), self.offset):
                return 0
        return sum(byte & 0xC0 != 0x80 for byte in tokenizer.token_bytes(token_id))
