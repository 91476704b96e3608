"""AnswerFormatter: how the answers of one route look. chat_formatter.py and completion_formatter.py implement it.

A choice is a dict that is about to be written as JSON. The formatter holds every difference between the two
routes; framing, usage and errors are the same for both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from faser.api.parsing.answer_parser import AnswerParser
from faser.api.serving.requests.prompts import TokenizedPrompt
from faser.types import OutputDelta, PositionLogprobs

Choice = dict[str, Any]


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
