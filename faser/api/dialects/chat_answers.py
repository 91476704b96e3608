"""Answers of /v1/chat/completions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from faser.api.answers.framing import LOWEST_LOGPROB, Choice, ChoiceState, TokenFormatter, prompt_logprobs
from faser.api.answers.usage import trace_json
from faser.api.parsing.answer_parser import AnswerParsing
from faser.api.parsing.events import (
    AnswerEvent,
    ContentText,
    Message,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
    collect,
)
from faser.api.requests.prompts import TokenizedPrompt
from faser.optional import given, maybe
from faser.types.answer import FinishReason, OutputDelta, PositionLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormatter:
    """return_…, asks_prompt_logprobs: what the request asked for in addition to text.

    echo: text of the conversation that the answer begins with.
    calls_by_name: the request names the function to call.
    """

    id_prefix: ClassVar[str] = "chatcmpl-"
    object_name: ClassVar[str] = "chat.completion"
    chunk_object_name: ClassVar[str] = "chat.completion.chunk"
    prompt_field: ClassVar[str] = "messages"

    token_formatter: TokenFormatter
    prompt: TokenizedPrompt
    parsing: AnswerParsing
    calls_by_name: bool = False
    echo: str = ""
    return_token_ids: bool = False
    return_prompt_text: bool = False
    asks_prompt_logprobs: bool = False

    def choice(self, state: ChoiceState, delta: OutputDelta) -> Choice:
        message = collect(self._events(state, delta, complete=True))
        choice = {
            "index": state.index,
            "message": _message(message, self.echo),
            "logprobs": self._logprobs(delta),
            "finish_reason": self._finish_reason(state, delta),
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
            chunks.append(_chunk(state, {"role": "assistant", "content": ""}))
            if self.echo:
                chunks.append(_chunk(state, {"content": self.echo}))
        reported = (
            delta.logprobs is not None or self.return_token_ids or not delta.is_last or delta.trace is not None
        )
        fields = _delta_fields(self._events(state, delta, complete=delta.is_last))
        if not fields and delta.token_ids and reported:
            fields = [{"content": ""}]
        if fields:
            contents = [_chunk(state, each) for each in fields]
            contents[0]["logprobs"] = self._logprobs(delta)
            if self.return_token_ids:
                contents[0]["token_ids"] = delta.token_ids
            contents[0] |= given({"trace": maybe(trace_json, delta.trace)})
            chunks += contents
        if delta.is_last:
            # A token that ends an answer has no text. As with vLLM its chunk has content all the same, or clients
            # that take times from chunks with content would miss the last step.
            silent = not fields and delta.token_ids and not (state.parser and state.parser.num_calls)
            last = _chunk(state, {"content": ""} if silent else {})
            last["finish_reason"] = self._finish_reason(state, delta)
            last["stop_reason"] = delta.stop_reason
            chunks.append(last)
        return chunks

    def first_chunk_fields(self) -> dict[str, Any]:
        """The fields about the prompt that the request asks for."""
        fields: dict[str, Any] = {}
        if self.return_token_ids:
            fields["prompt_token_ids"] = self.prompt.token_ids
        if self.return_prompt_text:
            fields["prompt_text"] = self.prompt.text
        return fields

    def top_level_fields(self, states: Sequence[ChoiceState]) -> dict[str, Any]:
        """A chat has one prompt, so the fields about the prompt belong to the whole answer."""
        fields = self.first_chunk_fields()
        if self.asks_prompt_logprobs:
            fields["prompt_logprobs"] = prompt_logprobs(states[0].prompt_logprobs or (), self.token_formatter)
        return fields

    def _events(self, state: ChoiceState, delta: OutputDelta, *, complete: bool) -> list[AnswerEvent]:
        if state.parser is None:
            state.parser = self.parsing.start(self.prompt.text or "")
        cut = delta.finish_reason is FinishReason.LENGTH
        return state.parser.push(delta.text, delta.token_ids, complete=complete, cut=cut)

    def _finish_reason(self, state: ChoiceState, delta: OutputDelta) -> str | None:
        """An answer that calls functions because it chooses to ends with tool_calls, as OpenAI's do."""
        called = state.parser is not None and state.parser.num_calls > 0
        if delta.finish_reason is FinishReason.STOP and called and not self.calls_by_name:
            return "tool_calls"
        return delta.finish_reason

    def _logprobs(self, delta: OutputDelta) -> dict[str, Any] | None:
        return None if delta.logprobs is None else chat_logprobs(delta.logprobs, self.token_formatter)


def _chunk(state: ChoiceState, delta: dict[str, Any]) -> Choice:
    return {"index": state.index, "delta": delta, "logprobs": None, "finish_reason": None}


def _message(message: Message, echo: str) -> dict[str, Any]:
    """Content is null where there is something else instead.

    Reasoning has two names: some clients read one of them, some the other.
    """
    content = echo + message.content
    empty = not content and bool(message.tool_calls or message.reasoning)
    fields: dict[str, Any] = {
        "role": "assistant",
        "content": None if empty else content,
        "refusal": None,
    }
    if message.reasoning:
        fields |= {"reasoning_content": message.reasoning, "reasoning": message.reasoning}
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return fields


def _delta_fields(events: Sequence[AnswerEvent]) -> list[dict[str, Any]]:
    """The deltas of chunks: one, but where text follows a call."""
    deltas: list[dict[str, Any]] = []
    for event in events:
        match event:
            case ReasoningText(text=text):
                deltas.append({"reasoning_content": text, "reasoning": text})
            case ContentText(text=text) if (
                deltas and "content" not in deltas[-1] and "tool_calls" not in deltas[-1]
            ):
                deltas[-1]["content"] = text
            case ContentText(text=text):
                deltas.append({"content": text})
            case ToolCallStart():
                function = {"name": event.name, "arguments": ""}
                call = {"index": event.index, "id": event.call_id, "type": "function", "function": function}
                _calls(deltas).append(call)
            case ToolCallArguments():
                calls = _calls(deltas)
                if not calls or calls[-1]["index"] != event.index:
                    calls.append({"index": event.index, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += event.text
    return deltas


def _calls(deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls of the last delta."""
    if not deltas:
        deltas.append({})
    calls: list[dict[str, Any]] = deltas[-1].setdefault("tool_calls", [])
    return calls


def chat_logprobs(positions: Sequence[PositionLogprobs], formatter: TokenFormatter) -> dict[str, Any]:
    """OpenAI's format for chats."""
    return {"content": [_chat_position(position, formatter) for position in positions], "refusal": None}


def _chat_position(position: PositionLogprobs, formatter: TokenFormatter) -> dict[str, Any]:
    top = [_chat_token(token_id, logprob, formatter) for token_id, logprob in position.top]
    return {**_chat_token(position.token_id, position.logprob, formatter), "top_logprobs": top}


def _chat_token(token_id: int, logprob: float, formatter: TokenFormatter) -> dict[str, Any]:
    return {
        "token": formatter.chat(token_id),
        "logprob": max(logprob, LOWEST_LOGPROB),
        "bytes": list(formatter.tokenizer.token_bytes(token_id)),
    }
