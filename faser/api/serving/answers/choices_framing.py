"""ChoicesFraming: answers of chats and completions: a list of choices, and events with data lines only.

The last event of a stream is [DONE], as with OpenAI.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from faser.api.protocol.errors import HttpError, error_body
from faser.api.serving.answers.formatter import AnswerFormatter, Choice, ChoiceState
from faser.api.serving.answers.framing import Envelope
from faser.api.serving.answers.speculation_report import SpeculationReport
from faser.api.serving.answers.usage import Usage

_DONE = b"data: [DONE]\n\n"
_CHUNK_END = b"}\n\n"
_PADDED_BYTES = 64

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming:
    """How a stream reports usage.

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
        self._num_told = 0  # completion tokens in the usage of the chunk before
        self._writer = ChunkWriter(
            {**self._fields, "object": formatter.chunk_object_name},
            with_usage=self._streaming.ends_with_usage,
            obfuscates=self._streaming.obfuscates,
        )

    def document(
        self, choices: Sequence[Choice], states: Sequence[ChoiceState], usage: Usage, report: SpeculationReport
    ) -> dict[str, Any]:
        return {
            **self._fields,
            "object": self._formatter.object_name,
            "choices": choices,
            "usage": usage.as_json(),
            **report.as_json(),
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
                total = usage["prompt_tokens"] + self._num_told
                usage = {**usage, "completion_tokens": self._num_told, "total_tokens": total}
            self._num_told = usage["completion_tokens"]
        return self._writer.chunk([chunk], usage, fields)

    def failure(self, error: HttpError) -> bytes:
        return b"data: " + _encode(error_body(error.status, error.message, error.param)) + b"\n\n" + _DONE

    def end(self, usage: Usage, report: SpeculationReport) -> bytes:
        if not self._streaming.ends_with_usage:
            return _DONE
        return self._writer.last({"usage": usage.as_json(), **report.as_json()}) + _DONE


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
