"""What an answer looks like: one contract, which chat_shape.py and text_shape.py implement.

A choice is a dict that is about to become JSON. All that differs between the two routes stands behind
this seam; framing, usage and errors are the same for both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from faser.api.serving.prompts import Prompt
from faser.types import OutputDelta, PositionLogprobs

Choice = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class ChoiceState:
    """One choice while its answer arrives. Written by the shape, but for prompt_logprobs.

    index: in the answer. started: whether something of it was sent. text_offset: characters whose tokens
    have been reported, for the text shape's logprobs.
    """

    index: int
    prompt: Prompt
    prompt_logprobs: Sequence[PositionLogprobs | None] | None = None
    started: bool = False
    text_offset: int = 0


class AnswerFormatter(Protocol):
    """One route's answers."""

    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    chunk_object_name: ClassVar[str]
    prompt_field: ClassVar[str]

    def whole(self, state: ChoiceState, delta: OutputDelta) -> Choice:
        """A choice that is complete: delta is everything it has."""
        ...

    def pieces(self, state: ChoiceState, delta: OutputDelta) -> list[Choice]:
        """What one step adds to a choice, as chunks in the order they are sent; may be none."""
        ...

    def beside_choices(self, states: Sequence[ChoiceState]) -> dict[str, Any]:
        """Fields of a complete answer that stand beside its choices."""
        ...
