"""What the scheduler and SpeculationControl exchange about one step. Values, no torch."""

from dataclasses import dataclass

from faser.engine.contract.plan import StopRule
from faser.engine.control.speculation.policies.policy import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherRows:
    """The rows of a step in addition to those of the sequences that may draft.

    rows: how many there are. sequences: how many of them bring a sequence its next token. launches_ahead: without
    drafts the step could be launched before the one in flight has ended.
    """

    rows: int
    sequences: int
    launches_ahead: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftDecision:
    """Which sequences draft before a step.

    chosen: their positions among the sequences that may draft. lengths: most tokens of each, at least 1.
    """

    chosen: tuple[int, ...]
    lengths: tuple[int, ...]
    stop: StopRule | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapDecision:
    """Which sequences draft concurrently with a step.

    chosen: as in DraftDecision. slots, lengths: [N] each. share: of the processors that the drafter gets.
    """

    chosen: tuple[int, ...]
    slots: Ints
    lengths: Ints
    share: float
