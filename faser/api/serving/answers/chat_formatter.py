"""Answers of /v1/chat/completions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from faser.api.serving.answers.formatter import Choice, ChoiceState
from faser.api.serving.answers.logprobs import TokenFormatter, chat_logprobs, prompt_logprobs
from faser.api.serving.requests.prompts import TokenizedPrompt
from faser.types import OutputDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormatter:
    """return_…, asks_prompt_logprobs: what the request asked for in addition to text.

    echo: text of the conversation that the answer begins with.
    """

    id_prefix: ClassVar[str] = "chatcmpl-"
    object_name: ClassVar[str] = "chat.completion"
    chunk_object_name: ClassVar[str] = "chat.completion.chunk"
    prompt_field: ClassVar[str] = "messages"

    token_formatter: TokenFormatter
    prompt: TokenizedPrompt
    echo: str = ""
    return_token_ids: bool = False
    return_prompt_text: bool = False
    asks_prompt_logprobs: bool = False

    def choice(self, state: ChoiceState, delta: OutputDelta) -> Choice:
        choice = {
            "index": state.index,
            "message": {"role": "assistant", "content": self.echo + delta.text, "refusal": None},
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        choice["token_ids"] = delta.token_ids if self.return_token_ids else None
        return choice

    def chunks(self, state: ChoiceState, delta: OutputDelta) -> list[Choice]:
        """The role comes with the first token, not earlier: clients measure the time to first token by it."""
        chunks = []
        if not state.started:
            state.started = True
            chunks.append(_chunk(state, {"role": "assistant", "content": ""}))
            if self.echo:
                chunks.append(_chunk(state, {"content": self.echo}))
        reported = delta.logprobs is not None or self.return_token_ids or delta.finish_reason is None
        if delta.text or (delta.token_ids and reported):
            content = _chunk(state, {"content": delta.text})
            content["logprobs"] = self._logprobs(delta)
            if self.return_token_ids:
                content["token_ids"] = delta.token_ids
            chunks.append(content)
        if delta.finish_reason is not None:
            last = _chunk(state, {})
            last["finish_reason"] = delta.finish_reason
            last["stop_reason"] = delta.stop_reason
            chunks.append(last)
        return chunks

    def first_chunk_fields(self) -> dict[str, Any]:
        return {name: value for name, value in self._prompt_fields().items() if value is not None}

    def top_level_fields(self, states: Sequence[ChoiceState]) -> dict[str, Any]:
        """A chat has one prompt, so the fields about the prompt belong to the whole answer."""
        first = states[0]
        scores = first.prompt_logprobs or () if self.asks_prompt_logprobs else None
        scored = None if scores is None else prompt_logprobs(scores, self.token_formatter)
        return {"prompt_logprobs": scored, **self._prompt_fields()}

    def _prompt_fields(self) -> dict[str, Any]:
        return {
            "prompt_token_ids": self.prompt.token_ids if self.return_token_ids else None,
            "prompt_text": self.prompt.text if self.return_prompt_text else None,
        }

    def _logprobs(self, delta: OutputDelta) -> dict[str, Any] | None:
        return None if delta.logprobs is None else chat_logprobs(delta.logprobs, self.token_formatter)


def _chunk(state: ChoiceState, delta: dict[str, Any]) -> Choice:
    return {"index": state.index, "delta": delta, "logprobs": None, "finish_reason": None}
