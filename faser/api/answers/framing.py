"""The form of an answer: an AnswerFormatter writes its choices, an AnswerFraming writes the document around them.

A choice is a dict that is about to be written as JSON. The formatter holds every difference between chats and
completions. A framing makes one document of the choices, or the events of a stream (WHATWG HTML, section 9.2); it
belongs to one answer and may have state. ChoicesFraming is that of chats and completions, whose streams end with
[DONE]; other dialects have their own, for a chat's choices.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import msgspec

from faser.api.answers.usage import Usage
from faser.api.bodies.errors import HttpError, error_body
from faser.api.parsing.answer_parser import AnswerParser
from faser.api.requests.prompts import TokenizedPrompt
from faser.engine.text.tokenizer import Tokenizer
from faser.types.answer import OutputDelta, PositionLogprobs
from faser.types.sampling import SamplingParams

Choice = dict[str, Any]
_DONE = b"data: [DONE]\n\n"
_CHUNK_END = b"}\n\n"
_PADDED_BYTES = 64
_encode = msgspec.json.Encoder().encode

# JSON has no -inf; clients read this number as "impossible".
LOWEST_LOGPROB = -9999.0


@dataclass(slots=True, kw_only=True)
class ChoiceState:
    """One choice while its answer arrives. The formatter sets what the handler does not.

    index: in the answer. started: something of the choice has been sent. text_offset: number of characters
    whose tokens the logprobs of a text completion have covered. parser: of a chat's answer, once it has begun.
    The handler sets prompt_logprobs, and finish_reason as the answer has it.
    """

    index: int
    prompt: TokenizedPrompt
    prompt_logprobs: Sequence[PositionLogprobs | None] | None = None
    started: bool = False
    text_offset: int = 0
    parser: AnswerParser | None = None
    finish_reason: str | None = None

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self.parser is None else self.parser.num_reasoning_tokens


class AnswerFormatter(Protocol):
    """The answers of one route."""

    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    chunk_object_name: ClassVar[str]
    prompt_field: ClassVar[str]

    def choice(self, state: ChoiceState, delta: OutputDelta) -> Choice:
        """A complete choice. delta: all of its output."""
        ...

    def chunks(self, state: ChoiceState, delta: OutputDelta) -> list[Choice]:
        """The chunks that one engine step adds to a choice, in sending order; may be empty."""
        ...

    def first_chunk_fields(self) -> dict[str, Any]:
        """Further fields of a stream's first chunk, at the level of `choices`."""
        ...

    def top_level_fields(self, states: Sequence[ChoiceState]) -> dict[str, Any]:
        """Further fields of a complete answer, at the level of `choices`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """Facts that an answer states about itself. created_s: Unix seconds. model: the name that the request uses.

    sampling: the values in effect.
    """

    request_id: str
    created_s: int
    model: str
    system_fingerprint: str
    sampling: SamplingParams


class AnswerFraming(Protocol):
    """The frame of one answer."""

    @property
    def answer_id(self) -> str: ...

    def document(self, choices: Sequence[Choice], states: Sequence[ChoiceState], usage: Usage) -> dict[str, Any]:
        """The whole answer. choices: complete, as AnswerFormatter.choice makes them."""
        ...

    def events(self, chunks: Sequence[Choice], usage: Usage) -> bytes:
        """Events for what one step adds to a choice. chunks: as AnswerFormatter.chunks makes them."""
        ...

    def failure(self, error: HttpError) -> bytes:
        """Events that end a stream after a failure."""
        ...

    def end(self, usage: Usage) -> bytes:
        """Events that end a complete stream."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming:
    """Options of a stream: how it reports usage, and whether it hides the size of its texts.

    ends_with_usage: in a last chunk without choices. continuous_usage: in every chunk, counted so far.
    obfuscates: every chunk has random padding, so that its size says less about its text.
    """

    ends_with_usage: bool = False
    continuous_usage: bool = False
    obfuscates: bool = False


class ChoicesFraming:
    """The frame of one answer. streaming: None: it is one document."""

    def __init__(self, envelope: Envelope, formatter: AnswerFormatter, streaming: Streaming | None) -> None:
        self._formatter = formatter
        self._streaming = streaming or Streaming()
        self.answer_id = f"{formatter.id_prefix}{envelope.request_id}"
        self._fields = {
            "id": self.answer_id,
            "created": envelope.created_s,
            "model": envelope.model,
            "system_fingerprint": envelope.system_fingerprint,
        }
        self._first_fields = formatter.first_chunk_fields()
        self._num_reported = 0  # completion tokens in the usage of the chunk before
        self._writer = ChunkWriter(
            {**self._fields, "object": formatter.chunk_object_name},
            with_usage=self._streaming.ends_with_usage,
            obfuscates=self._streaming.obfuscates,
        )

    def document(self, choices: Sequence[Choice], states: Sequence[ChoiceState], usage: Usage) -> dict[str, Any]:
        return {
            **self._fields,
            "object": self._formatter.object_name,
            "choices": choices,
            "usage": usage.as_json(),
            **usage.metrics(),
            **self._formatter.top_level_fields(states),
        }

    def events(self, chunks: Sequence[Choice], usage: Usage) -> bytes:
        running = usage.as_json() if self._streaming.continuous_usage else None
        return b"".join([self._event(chunk, running) for chunk in chunks])

    def _event(self, chunk: Choice, usage: dict[str, Any] | None) -> bytes:
        """One chunk. The one that opens a chat has no token yet, so its usage counts none of the step's."""
        fields, self._first_fields = self._first_fields, {}
        if usage is not None:
            if "role" in chunk.get("delta", ()):
                total = usage["prompt_tokens"] + self._num_reported
                usage = {**usage, "completion_tokens": self._num_reported, "total_tokens": total}
            self._num_reported = usage["completion_tokens"]
        return self._writer.chunk([chunk], usage, fields)

    def failure(self, error: HttpError) -> bytes:
        return b"data: " + _encode(error_body(error.status, error.message, error.param)) + b"\n\n" + _DONE

    def end(self, usage: Usage) -> bytes:
        if not self._streaming.ends_with_usage:
            return _DONE
        return self._writer.last({"usage": usage.as_json(), **usage.metrics()}) + _DONE


class ChunkWriter:
    """Writes the chunks of one answer. Encodes the fields that all chunks share only once.

    envelope: the fields around `choices`. with_usage: every chunk has a usage field. obfuscates: every chunk is
    padded with random letters to a multiple of 64 bytes, so that an eavesdropper learns little of its text.
    """

    def __init__(self, envelope: dict[str, Any], *, with_usage: bool, obfuscates: bool = False) -> None:
        self._obfuscates = obfuscates
        self._head = b"data: " + _encode(envelope)[:-1] + b',"choices":'
        self._no_usage = b',"usage":null}\n\n' if with_usage else b"}\n\n"

    def chunk(
        self,
        choices: list[dict[str, Any]],
        usage: dict[str, Any] | None = None,
        fields: dict[str, Any] | None = None,
    ) -> bytes:
        """usage: None writes null, or no field if the stream has no usage. fields: further ones of this chunk."""
        tail = self._no_usage if usage is None else b',"usage":' + _encode(usage) + b"}\n\n"
        own = b"," + _encode(fields)[1:-1] if fields else b""
        return self._padded(self._head + _encode(choices) + own + tail)

    def last(self, fields: dict[str, Any]) -> bytes:
        """The chunk without choices that ends an answer. fields: its own fields, usage first."""
        return self._padded(self._head + b"[]," + _encode(fields)[1:] + b"\n\n")

    def _padded(self, chunk: bytes) -> bytes:
        if not self._obfuscates:
            return chunk
        body = chunk[: -len(_CHUNK_END)] + b',"obfuscation":"'
        missing = -(len(body) + 1 + len(_CHUNK_END)) % _PADDED_BYTES
        return body + secrets.token_urlsafe(missing)[:missing].encode() + b'"' + _CHUNK_END


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFormatter:
    """Formatter of single tokens. as_ids: as token_id:17 instead of as text, so that no two tokens look alike."""

    tokenizer: Tokenizer
    as_ids: bool = False

    def chat(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.as_ids else self.tokenizer.token_text(token_id)

    def completion(self, token_id: int) -> str:
        """Alternatives are JSON keys, so part of a code point is written as its bytes: bytes:\\xe2\\x96."""
        if self.as_ids:
            return f"token_id:{token_id}"
        token_bytes = self.tokenizer.token_bytes(token_id)
        try:
            return token_bytes.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def prompt_logprobs(
    positions: Sequence[PositionLogprobs | None], formatter: TokenFormatter
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's format: per position, the alternatives and the prompt's own token, by token id."""
    return [None if position is None else _prompt_position(position, formatter) for position in positions]


def _prompt_position(position: PositionLogprobs, formatter: TokenFormatter) -> dict[str, dict[str, Any]]:
    ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(position.top, start=1)]
    own = (position.token_id, position.logprob, position.rank)
    return {
        str(token_id): {
            "logprob": max(logprob, LOWEST_LOGPROB),
            "rank": rank,
            "decoded_token": formatter.chat(token_id),
        }
        for token_id, logprob, rank in (*ranked, own)
    }
