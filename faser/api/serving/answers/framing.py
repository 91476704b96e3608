"""AnswerFraming: how choices become an answer: one JSON document, or the events of a stream.

Each dialect has one: choices_framing.py has that of chats and completions. A framing belongs to one answer and may
have state.

Source of the framing of events: WHATWG HTML, section 9.2 (server-sent events).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from faser.api.protocol.errors import HttpError
from faser.api.serving.answers.formatter import Choice, ChoiceState
from faser.api.serving.answers.speculation_report import SpeculationReport
from faser.api.serving.answers.usage import Usage
from faser.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What an answer says of itself. created_s: Unix seconds. model: the name that the request uses.

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

    def document(
        self, choices: Sequence[Choice], states: Sequence[ChoiceState], usage: Usage, report: SpeculationReport
    ) -> dict[str, Any]:
        """The whole answer. choices: complete, as AnswerFormatter.choice makes them."""
        ...

    def events(self, chunks: Sequence[Choice], usage: Usage) -> bytes:
        """Events for what one step adds to a choice. chunks: as AnswerFormatter.chunks makes them."""
        ...

    def failure(self, error: HttpError) -> bytes:
        """Events that end a stream after a failure."""
        ...

    def end(self, usage: Usage, report: SpeculationReport) -> bytes:
        """Events that end a complete stream."""
        ...
