"""Answers of /v1/chat/completions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from faser.api.serving.answers.formatter import Choice, ChoiceState
from faser.api.serving.answers.logprobs import TokenFormatter, chat_logprobs, prompt_logprobs
from faser.types import OutputDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormatter:
    """return_token_ids, asks_prompt_logprobs: what the request asked for in addition to text."""

    id_prefix: ClassVar[str] = "chatcmpl-"
    object_name: ClassVar[str] = "chat.completion"
    chunk_object_name: ClassVar[str] = "chat.completion.chunk"
    prompt_field: ClassVar[str] = "messages"

    token_formatter: TokenFormatter
    return_token_ids: bool = False
    asks_prompt_logprobs: bool = False

    def choice(self, state: ChoiceState, delta: OutputDelta) -> Choice:
        choice = {
            "index": state.index,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def chunks(self, state: ChoiceState, delta: OutputDelta) -> list[Choice]:
        """The role comes with the first token, not earlier: clients measure the time to first token by it."""
        chunks = []
        if not state.started:
            state.started = True
            role = _chunk(state, {"role": "assistant", "content": ""})
            if self.return_token_ids:
                role["prompt_token_ids"] = state.prompt.token_ids
            chunks.append(role)
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

    def top_level_fields(self, states: Sequence[ChoiceState]) -> dict[str, Any]:
        """A chat has one prompt, so the fields about the prompt belong to the whole answer."""
        fields: dict[str, Any] = {}
        first = states[0]
        if self.asks_prompt_logprobs:
            fields["prompt_logprobs"] = prompt_logprobs(first.prompt_logprobs or (), self.token_formatter)
        if self.return_token_ids:
            fields["prompt_token_ids"] = first.prompt.token_ids
        return fields

    def _logprobs(self, delta: OutputDelta) -> dict[str, Any] | None:
        return None if delta.logprobs is None else chat_logprobs(delta.logprobs, self.token_formatter)


def _chunk(state: ChoiceState, delta: dict[str, Any]) -> Choice:
    return {"index": state.index, "delta": delta, "logprobs": None, "finish_reason": None}
