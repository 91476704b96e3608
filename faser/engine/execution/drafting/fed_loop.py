"""The drafting loop without a wait between passes: the device feeds the tokens of one pass to the next.

Owns the order in which passes are launched and read. DraftProgress of loop.py decides which tokens are kept, once
the host has read them; until then they stay on the device, and the host lays out one pass while another runs.

    device    | pass 1               | pass 2               | pass 3               |
    host      launch 1, launch 2     | read 1, launch 3     | read 2, launch 4     | read 3 ...

A runner with CUDA graphs lays out the rows of the further passes once, for the longest drafts that there can be.
The device moves them from pass to pass (runner/passes_ahead.py), so a pass costs the host its launches alone.
Drafts that have ended stay in the passes until they are half of them.

So the stop rule takes effect one pass later: the tokens of pass 1 decide whether there is a pass 3. A token below
the price of its row is still dropped, and so is the one that was meanwhile drafted after it. Where the price of a
pass ends the drafts, one more pass has run, and its tokens are kept as far as the price of a row allows.

A token that was fed and is dropped later has keys and values after the end of its draft. The draft's num_fed does
not count them, so the next pass over this position writes them again before any row reads them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from faser.engine.contract.plan import StopRule
from faser.engine.execution.drafting.loop import (
    DraftBatch,
    DraftInput,
    DraftProgress,
    ModelPasses,
    OneRowEach,
    no_drafts,
)
from faser.engine.execution.drafting.samplers import PointMassSampler, drafted_by_runner
from faser.engine.execution.runner.batch import ContinuedDrafts, TokenFeedback
from faser.engine.execution.sampling.tokens import PendingTokens
from faser.kernels.interface.sampling import SamplingMetadata
from faser.types.arrays import Ints


class FedPassLoop:
    """Loop whose runner samples and feeds. `until` is asked while the pass before the one it may stop runs."""

    def __init__(self, passes: ModelPasses, sampler: PointMassSampler) -> None:
        self._passes = passes
        self._runner = passes.runner
        self._sampler = sampler

    @torch.inference_mode()
    def draft(
        self,
        inputs: Sequence[DraftInput],
        stop: StopRule | None,
        until: Callable[[], bool] | None = None,
    ) -> DraftBatch:
        if not inputs:
            return no_drafts()
        progress = DraftProgress(inputs)
        running, num_passes = self._launch_first(inputs, progress)
        staying = running.active
        while len(active := staying[progress.max_tokens[staying] > running.depth]) and not (
            until is not None and until()
        ):
            last, running = running, self._launch_next(running, active, progress)
            progress.count_fed(active)
            num_passes += 1
            staying = _read(last, progress, stop)
        _read(running, progress, stop)
        return progress.batch(num_passes)

    def _launch_first(self, inputs: Sequence[DraftInput], progress: DraftProgress) -> tuple["_Pass", int]:
        """Launch the passes over the inputs; returns the last of them, and how many there are."""
        batch, num_passes = self._passes.read(inputs)
        requests, rows = self._sampler.metadata(progress.slots, progress.draft_starts), np.arange(len(inputs))
        first = _Pass(
            depth=1,
            rows=rows,
            active=rows,
            sequences=OneRowEach.of(self._passes.table, progress.slots, progress.places),
            requests=requests,
            pending=self._runner.sample_drafts(batch.last_rows, requests),
        )
        return self._continued(first, progress), num_passes

    def _launch_next(self, last: "_Pass", active: Ints, progress: DraftProgress) -> "_Pass":
        """Launch a pass over the tokens that the last one samples for the active sequences.

        Where the device has the passes ready, those of all sequences, until half of them would run in vain.
        """
        sequences, requests, sources = last.sequences, last.requests, last.sequences.rows
        if last.is_continued and 2 * len(active) > len(last.rows):
            sequences.skip()
            pending = self._runner.follow_on()
            return replace(last, depth=last.depth + 1, active=active, pending=pending)
        if len(active) < len(last.rows):
            sources = np.searchsorted(last.rows, active)
            sequences, requests = sequences.take(sources), requests.among(sources)
            self._passes.keep(sources)
        feed = TokenFeedback(tokens=last.pending.tokens, rows=sequences.rows, sources=sources)
        placeholders = torch.zeros(len(active), dtype=torch.int64)  # the device puts in the fed tokens
        self._runner.forward(sequences.next_batch(placeholders, feed))
        following = requests.at(progress.draft_starts[active] + last.depth)
        launched = _Pass(
            depth=last.depth + 1,
            rows=active,
            active=active,
            sequences=sequences,
            requests=requests,
            pending=self._runner.sample_drafts(sequences.rows, following),
        )
        return self._continued(launched, progress)

    def _continued(self, launched: "_Pass", progress: DraftProgress) -> "_Pass":
        """The pass, and the further ones made ready on the device, where there may be any and it can run them."""
        rows, places = launched.rows, launched.sequences.places.astype(np.int64)
        num_more = int(progress.max_tokens[rows].max()) - launched.depth
        if num_more <= 0:
            return launched
        drafts = ContinuedDrafts(
            slots=progress.slots[rows].tolist(),
            places=places,
            shifts=(progress.draft_starts - progress.places)[rows],
            num_passes=num_more,
            requests=launched.requests,
        )
        return replace(launched, is_continued=self._runner.continue_drafts(drafts, self._passes.table))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """A launched pass. It samples draft token number depth, from 1 on, for S sequences.

    rows: [S] their numbers among the inputs. active: those whose tokens may be kept. requests: what was asked for,
    by the first tokens of their drafts. is_continued: the runner has further passes of these sequences ready.
    """

    depth: int
    rows: Ints
    active: Ints
    sequences: OneRowEach
    requests: SamplingMetadata
    pending: PendingTokens
    is_continued: bool = False


def _read(passed: _Pass, progress: DraftProgress, stop: StopRule | None) -> Ints:
    """Wait for a pass and take its tokens; returns the sequences that stay active.

    A token drafted after a dropped one is dropped too: survival never rises.
    """
    tokens = drafted_by_runner(passed.pending.wait())
    if len(passed.active) < len(passed.rows):
        tokens = tokens.among(np.searchsorted(passed.rows, passed.active))
    return progress.take(passed.active, tokens, stop)
