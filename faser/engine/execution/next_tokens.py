"""From the rows of a forward to the next tokens of every sequence, drafted ones verified.

Two ways lead there, and where both are open they find the same tokens:

    sample and match in the runner   every row's token is sampled right after the forward; drafts that equal the
                                     samples are accepted
    verify                           the verifier reads the logits of the last γ + 1 rows of each sequence; without
                                     any draft that is sampling
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from faser.engine.contract.plan import StepRows
from faser.engine.execution.drafting.drafter import ProposedDrafts
from faser.engine.execution.overlap.partition import PendingResult
from faser.engine.execution.runner.batch import RowBatch
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.rows import DraftLayout, StepTokens
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.sampling.verify import (
    SampleAndMatch,
    Verifier,
    decided_by,
    matched,
    needs_only_samples,
)
from faser.types.arrays import Ints


class NextTokens:
    """Reads the runner's last forward. Leaves the sampler's state as it is: the executor commits the tokens.

    drafts: what the drafter proposed for the step.
    samples_in_runner: the runner can sample; it does where tokens depend on nothing but their logits.
    """

    def __init__(
        self,
        runner: Runner,
        sampler: Sampler,
        drafts: ProposedDrafts,
        *,
        verifier: Verifier,
        samples_in_runner: bool,
    ) -> None:
        self._runner = runner
        self._sampler = sampler
        self._drafts = drafts
        self._verifier = verifier
        self._plain = SampleAndMatch(sampler)  # of steps without drafts
        self._samples_in_runner = samples_in_runner

    def of(self, rows: StepRows, batch: RowBatch) -> PendingResult[StepTokens]:
        """The tokens of every sequence whose rows reach the end of its known tokens; the others get none."""
        at = [i for i, samples in enumerate(rows.samples) if samples]
        if not at:
            return PendingResult(lambda: StepTokens.none(len(rows)))
        layout, numbers = sampling_rows(rows, at, batch)
        if self._samples_in_runner and self._depend_on_logits_alone(layout):
            finding, launches_more = self._sample_and_match(layout, numbers), False
        else:
            finding, launches_more = partial(self._verify, layout, numbers), True
        return PendingResult(lambda: finding().among(at, len(rows)), launches_more=launches_more)

    def _depend_on_logits_alone(self, layout: DraftLayout) -> bool:
        """No request edits its logits or reports them, and no draft needs more than the samples at its rows."""
        matches = layout.num_rows == len(layout.first) or needs_only_samples(self._verifier)
        return matches and self._sampler.needs_only_logits(layout.slots[layout.first].tolist())

    def _sample_and_match(self, layout: DraftLayout, numbers: Ints) -> Callable[[], StepTokens]:
        """Launches the sampling of all rows at once; the call that is returned waits for it."""
        pending = self._runner.sample(numbers, self._sampler.metadata(layout.slots, layout.positions))
        decided = decided_by(self._verifier, layout)
        return lambda: matched(layout, pending.wait().token_ids, decided)

    def _verify(self, layout: DraftLayout, numbers: Ints) -> StepTokens:
        logits = self._runner.logits(numbers)
        if layout.num_rows == len(layout.first):
            return self._plain.verify(logits, layout, None)
        return self._verifier.verify(logits, layout, self._drafts.probs(layout))


def sampling_rows(rows: StepRows, at: list[int], batch: RowBatch) -> tuple[DraftLayout, Ints]:
    """The last γ + 1 rows of the sequences at these positions, and their numbers in the batch, [R]."""
    slots, starts, counts, num_drafts = (
        np.array(column, dtype=np.int64) for column in (rows.slots, rows.starts, rows.counts, rows.num_drafts)
    )
    last_rows = batch.last_rows
    if len(at) < len(rows):
        slots, starts, counts, num_drafts = slots[at], starts[at], counts[at], num_drafts[at]
        last_rows = last_rows[at]
    positions = starts + counts - num_drafts
    if not num_drafts.any():
        return DraftLayout.plain(slots, positions), last_rows
    verifying = num_drafts + 1
    ends = verifying.cumsum()
    distances = ends.repeat(verifying) - np.arange(1, ends[-1] + 1)  # of each row from its sequence's last one
    numbers = last_rows.repeat(verifying) - distances
    drafted = batch.token_ids.numpy()[numbers[distances > 0] + 1]
    return DraftLayout.of(slots, positions, num_drafts, drafted), numbers
