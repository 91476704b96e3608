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
from numpy.typing import NDArray

from faser.engine.contract.plan import SequenceRows
from faser.engine.execution.drafting.drafter import ProposedDrafts
from faser.engine.execution.overlap.partition import PendingResult
from faser.engine.execution.runner.batch import RowBatch
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.rows import DraftedRows, StepTokens
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.sampling.verify import SampleAndMatch, Verifier, matched

Ints = NDArray[np.int64]


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

    def of(self, rows: tuple[SequenceRows, ...], batch: RowBatch) -> PendingResult[StepTokens]:
        """The tokens of every sequence whose rows reach the end of its known tokens; the others get none."""
        at = [i for i, each in enumerate(rows) if each.samples]
        if not at:
            return PendingResult(lambda: StepTokens.none(len(rows)))
        sampling = [rows[i] for i in at]
        last_rows, drafted = sampling_rows(sampling, rows, batch), any(each.num_drafts for each in sampling)
        if self._samples_in_runner and self._depend_on_logits_alone(sampling, drafted=drafted):
            finding, launches_more = self._sample_and_match(sampling, last_rows), False
        else:
            finding, launches_more = partial(self._verify, sampling, last_rows, drafted=drafted), True
        return PendingResult(lambda: finding().among(at, len(rows)), launches_more=launches_more)

    def _depend_on_logits_alone(self, sampling: list[SequenceRows], *, drafted: bool) -> bool:
        """No request edits its logits or reports them, and no draft needs more than the samples at its rows."""
        matches = not drafted or isinstance(self._verifier, SampleAndMatch)
        return matches and self._sampler.needs_only_logits([rows.slot for rows in sampling])

    def _sample_and_match(self, sampling: list[SequenceRows], last_rows: Ints) -> Callable[[], StepTokens]:
        """Launches the sampling of all rows at once; the call that is returned waits for it. last_rows: [S]."""
        counts, distances = _verifying_rows(sampling)
        slots = np.array([rows.slot for rows in sampling]).repeat(counts)
        ends = np.array([rows.start + len(rows.token_ids) for rows in sampling]).repeat(counts)
        metadata = self._sampler.metadata(slots, ends - distances)
        pending = self._runner.sample(last_rows.repeat(counts) - distances, metadata)
        return lambda: matched(sampling, pending.wait().token_ids)

    def _verify(self, sampling: list[SequenceRows], last_rows: Ints, *, drafted: bool) -> StepTokens:
        counts, distances = _verifying_rows(sampling)
        logits = self._runner.logits(last_rows.repeat(counts) - distances)
        verifier, probs = (self._verifier, self._drafts.probs(sampling)) if drafted else (self._plain, None)
        return verifier.verify(logits, _drafted_rows(sampling), probs)


def sampling_rows(sampling: list[SequenceRows], rows: tuple[SequenceRows, ...], batch: RowBatch) -> Ints:
    """[len(sampling)] for each sequence that samples, the index of its last row in the batch."""
    if len(sampling) == len(rows):
        return batch.last_rows
    return batch.last_rows[[i for i, each in enumerate(rows) if each.samples]]


def _verifying_rows(sampling: list[SequenceRows]) -> tuple[Ints, Ints]:
    """How many rows of each sequence sample, [S], and how far each of them is from its sequence's last row, [R].

    γ          |    2    | 0 | 1    |
    counts     |    3    | 1 | 2    |
    distances  | 2  1  0 | 0 | 1  0 |
    """
    counts = np.array([rows.num_drafts + 1 for rows in sampling])
    ends = counts.cumsum()
    return counts, ends.repeat(counts) - np.arange(1, ends[-1] + 1)


def _drafted_rows(sampling: list[SequenceRows]) -> list[DraftedRows]:
    return [
        DraftedRows(
            slot=rows.slot,
            position=rows.start + len(rows.token_ids) - rows.num_drafts,
            draft=rows.drafted,
        )
        for rows in sampling
    ]
