"""StepBuilder makes the rows of a step, and StepsInFlight has the steps that were launched and not committed yet.

Neither decides anything: the scheduler says which rows a step has, and when one is launched and committed.
"""

from collections import deque
from dataclasses import dataclass, field

from faser.engine.contract.plan import AdapterPlacement, SequenceStart, StepPlan, StepRows
from faser.engine.control.decoding import Decoding, Draft
from faser.engine.control.sequence import Sequence
from faser.engine.control.speculation.learning import StepPrediction
from faser.engine.control.speculation.step_drafts import StepDrafts
from faser.engine.control.targets import NO_TARGETS, NoTargets, StepLimits


@dataclass(slots=True)
class StepBuilder:
    """A StepPlan in the making. budget: rows that may still be added. sequences: of rows, in their order."""

    budget: int
    limits: StepLimits | NoTargets = NO_TARGETS
    started: list[SequenceStart] = field(default_factory=list)
    adapters: list[AdapterPlacement] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    rows: StepRows = field(default_factory=StepRows)
    preempted: bool = False

    def start(self, sequence: Sequence, snapshot: int | None) -> None:
        self.started.append(
            SequenceStart(
                slot=sequence.held_slot,
                sampling=sequence.sampling,
                seed=sequence.seed,
                prompt_len=sequence.prompt_len,
                token_ids=tuple(sequence.token_ids),
                salt=sequence.table.root,
                predicted_token_ids=sequence.request.predicted_token_ids,
                snapshot=snapshot,
                adapter=sequence.adapter_slot,
            )
        )

    def add(
        self,
        sequence: Sequence,
        start: int,
        token_ids: list[int] | tuple[int, ...],
        *,
        samples: bool,
        num_drafts: int = 0,
        new_blocks: list[int] | tuple[int, ...] = (),
    ) -> None:
        """Add a sequence and its rows. Arguments as in StepRows.add."""
        self.sequences.append(sequence)
        self.rows.add(
            sequence.held_slot,
            start,
            token_ids,
            samples=samples,
            num_drafts=num_drafts,
            new_blocks=tuple(new_blocks),
        )
        self.budget -= len(token_ids)

    def add_known(
        self, sequence: Sequence, num_rows: int, new_blocks: list[int] | tuple[int, ...], *, in_flight: int = 0
    ) -> None:
        """Add rows for the next known tokens. in_flight: rows before these, which the step in flight computes."""
        start, known = sequence.num_computed + in_flight, sequence.token_ids
        end = start + num_rows
        samples = end == len(known) and sequence.generates
        self.add(sequence, start, known[start:end], samples=samples, new_blocks=new_blocks)

    def decode_all(self, decoding: Decoding, kept: dict[Sequence, Draft]) -> None:
        """Begin with the rows of all of these, and with those of their drafts."""
        decoding.lay(self.rows, kept)
        self.sequences += decoding.sequences
        self.budget -= len(self.rows.token_ids)

    def drop(self, sequence: Sequence) -> None:
        """Take the rows of a preempted sequence back. This step has not started it: admission never preempts."""
        self.preempted = True
        if sequence in self.sequences:
            at = self.sequences.index(sequence)
            del self.sequences[at]
            self.budget += self.rows.remove(at)


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step in flight. sequences: in the order of the plan's rows. drafts: that it verifies; None: none."""

    plan: StepPlan
    sequences: list[Sequence]
    drafts: StepDrafts | None
    prediction: StepPrediction


class StepsInFlight(deque[StepInFlight]):
    """The steps in flight, at most two, the oldest first. number: of the step launched last.

    released: slots whose sequences have left; each waits for the end of the steps with rows for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.released: list[int] = []

    def only(self) -> StepInFlight:
        """Return the one step in flight."""
        assert len(self) == 1, f"{len(self)} steps are in flight"
        return self[0]

    def check_none(self) -> None:
        """AssertionError if a step is in flight."""
        assert not self, f"step {self.number} has not been committed"

    def idle(self, slots: list[int]) -> list[int]:
        """Return those of free slots that have no rows in a step in flight; the same list if none is in flight."""
        return [slot for slot in slots if slot not in self[0].plan.rows.slots] if self else slots

    def take_released(self) -> tuple[int, ...]:
        """Return and forget the slots to release, except those with rows in a step in flight."""
        if not self.released:
            return ()
        busy = frozenset().union(*(each.plan.rows.slots for each in self))
        released = tuple(slot for slot in self.released if slot not in busy)
        self.released = [slot for slot in self.released if slot in busy]
        return released


@dataclass(slots=True)
class FollowingRows:
    """Rows of a sequence after the step in flight. num_in_flight: its rows there, unless they bring a token.

    num_rows: of known tokens; 0: one row, for the token that the step in flight brings.
    """

    sequence: Sequence
    num_in_flight: int
    num_rows: int

    @property
    def end(self) -> int:
        """Tokens of the sequence that are computed after these rows."""
        sequence = self.sequence
        if not self.num_rows:
            return len(sequence.token_ids) + 1
        return sequence.num_computed + self.num_in_flight + self.num_rows
