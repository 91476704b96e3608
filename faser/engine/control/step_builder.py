"""StepBuilder: a StepPlan in the making. Owns the row budget and the rows given so far; decides nothing."""

from collections.abc import Collection
from dataclasses import dataclass, field

from faser.engine.contract.plan import PLACEHOLDER, SequenceRows, SequenceStart
from faser.engine.control.sequences.sequence import Sequence


@dataclass(slots=True)
class StepBuilder:
    """budget: rows that may still be added. rows: in the order in which they were given."""

    budget: int
    started: list[SequenceStart] = field(default_factory=list)
    rows: dict[Sequence, SequenceRows] = field(default_factory=dict)
    preempted: bool = False

    def start(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.started.append(
            SequenceStart(
                slot=sequence.slot,
                sampling=sequence.sampling,
                seed=sequence.seed,
                prompt_len=sequence.prompt_len,
                token_ids=tuple(sequence.token_ids),
                salt=sequence.request.cache_salt,
                predicted_token_ids=sequence.request.predicted_token_ids,
            )
        )

    def add(
        self,
        sequence: Sequence,
        num_rows: int,
        new_blocks: Collection[int],
        draft: tuple[int, ...] = (),
        *,
        in_flight: int = 0,
    ) -> None:
        """num_rows: of known tokens. draft: continues the last known one; empty unless the rows reach it.

        in_flight: rows before these, which the step in flight computes.
        """
        assert sequence.slot is not None
        start, known, num_drafts = sequence.num_computed + in_flight, sequence.token_ids, len(draft)
        end = start + num_rows
        samples = end == len(known)
        assert samples or not draft, "a draft follows the last known token"
        self.rows[sequence] = SequenceRows(
            slot=sequence.slot,
            start=start,
            token_ids=((known[start],) if num_rows == 1 else tuple(known[start:end])) + draft,
            new_blocks=tuple(new_blocks),
            samples=samples and sequence.generates,
            num_drafts=num_drafts,
        )
        self.budget -= num_rows + num_drafts

    def add_placeholder(self, sequence: Sequence, new_blocks: Collection[int]) -> None:
        """A row after the last known token, for the token that the step in flight will bring."""
        self.rows[sequence] = SequenceRows(
            slot=sequence.held_slot,
            start=sequence.num_tokens,
            token_ids=(PLACEHOLDER,),
            new_blocks=tuple(new_blocks),
            samples=True,
        )
        self.budget -= 1

    def drop(self, sequence: Sequence) -> None:
        """Take the rows of a preempted sequence back. This step has not started it: admission never preempts."""
        self.preempted = True
        rows = self.rows.pop(sequence, None)
        if rows is not None:
            self.budget += len(rows.token_ids)
