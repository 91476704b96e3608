"""The drafting loop without a wait between passes: the device feeds the tokens of one pass to the next.

Owns the order in which passes are launched and read. DraftProgress of passes.py decides which tokens are kept,
once the host has read them; until then they stay on the device, and the host lays out one pass while another runs.

    device    | pass 1               | pass 2               | pass 3               |
    host      launch 1, launch 2     | read 1, launch 3     | read 2, launch 4     | read 3 ...

So the stop rule takes effect one pass later: the tokens of pass 1 decide whether there is a pass 3. A token below
the price of its row is still dropped, and so is the one that was meanwhile drafted after it. Where the price of a
pass ends the drafts, one more pass has run, and its tokens are kept as far as the price of a row allows.

A token that was fed and is dropped later has keys and values after the end of its draft. The draft's num_fed does
not count them, so the next pass over this position writes them again before any row reads them.

This loop has not run on a GPU yet.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.contract.plan import StopRule
from faser.engine.execution.drafters.draft_samplers import RunnerDraftSampler, drafted_by_runner
from faser.engine.execution.drafters.passes import (
    DraftBatch,
    DraftInput,
    DraftProgress,
    Piece,
    chunks,
    rows_of,
)
from faser.engine.execution.runner.batch import BlockTable, RowBatch, TokenFeedback
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.tokens import PendingTokens
from faser.kernels.interface.sampling import SamplingMetadata
from faser.kernels.interface.shapes import RowLayout

Ints = NDArray[np.int64]


class DeviceFedPassLoop:
    """See DraftLoop. The runner samples. `until` is asked while the pass before the one that it may stop runs."""

    def __init__(
        self,
        runner: Runner,
        table: BlockTable,
        sampler: RunnerDraftSampler,
        *,
        max_rows: int,
        num_layers: int | None = None,
    ) -> None:
        self._runner = runner
        self._table = table
        self._sampler = sampler
        self._max_rows = max_rows
        self._num_layers = num_layers

    @torch.inference_mode()
    def draft(
        self,
        inputs: Sequence[DraftInput],
        stop: StopRule | None,
        until: Callable[[], bool] | None = None,
    ) -> DraftBatch:
        if not inputs:
            return DraftBatch()
        progress = DraftProgress(inputs)
        running, passes = self._launch_first(inputs, progress)
        staying = running.active
        while len(active := staying[progress.max_tokens[staying] > running.depth]) and not (
            until is not None and until()
        ):
            last, running = running, self._launch_next(running, active)
            progress.count_fed(active)
            passes += 1
            staying = _read(last, progress, stop)
        _read(running, progress, stop)
        return progress.batch(passes)

    def _launch_first(self, inputs: Sequence[DraftInput], progress: DraftProgress) -> tuple["_Pass", int]:
        """Launch the passes over the inputs; returns the last of them, and how many there are."""
        *before, last = spread(inputs, self._max_rows)
        for pieces in before:
            self._runner.forward(rows_of(pieces, self._table), self._num_layers)
        batch = rows_of(last, self._table)
        self._runner.forward(batch, self._num_layers)
        requests = self._sampler.metadata(progress.slots, progress.draft_starts)
        pending = self._runner.sample_drafts(batch.last_rows, requests, self._sampler.window)
        sequences = _Sequences(progress.draft_starts, batch.layout.block_table, requests)
        first = _Pass(depth=1, active=np.arange(len(inputs)), sequences=sequences, pending=pending)
        return first, len(before) + 1

    def _launch_next(self, last: "_Pass", active: Ints) -> "_Pass":
        """Launch a pass over the tokens that the last one samples for the active sequences."""
        all_active = len(active) == len(last.active)
        sources = None if all_active else np.searchsorted(last.active, active)
        sequences = last.sequences if sources is None else last.sequences.of(sources)
        rows = sequences.rows
        feed = TokenFeedback(pending=last.pending, rows=rows, sources=rows if sources is None else sources)
        self._runner.forward(sequences.batch(last.depth, feed), self._num_layers)
        pending = self._runner.sample_drafts(rows, sequences.requests_after(last.depth), self._sampler.window)
        return _Pass(depth=last.depth + 1, active=active, sequences=sequences, pending=pending)


def spread(inputs: Sequence[DraftInput], max_rows: int) -> list[Sequence[DraftInput | Piece]]:
    """All tokens of the inputs in as few passes as possible, and the last one of every input in the last pass.

    So the runner samples once for all of them. Three inputs with last tokens A, B and C, in passes of 6 rows:

        in order     a a a a a A | b B c c c c | C
        here         a a a a a b | c c c c     | A B C
    """
    assert len(inputs) <= max_rows, f"{len(inputs)} sequences draft; a pass has {max_rows} rows"
    num_rows = sum(len(each.token_ids) for each in inputs)
    room = (-(-num_rows // max_rows) - 1) * max_rows  # of all passes before the last
    if not room:
        return [inputs]
    early, last = [], []
    for each in inputs:
        count = min(room, len(each.token_ids) - 1)
        room -= count
        if count:
            early.append(replace(each, token_ids=each.token_ids[:count]))
        last.append(replace(each, start=each.start + count, token_ids=each.token_ids[count:]))
    return [*chunks(early, max_rows), last]


class _Sequences:
    """S sequences with one row each in a pass: everything that is the same in every pass.

    draft_starts: [S] positions of the first draft tokens. requests: of these tokens. rows: [S] row numbers.
    """

    def __init__(self, draft_starts: Ints, block_table: Tensor, requests: SamplingMetadata) -> None:
        self._draft_starts = draft_starts
        self._block_table = block_table
        self._requests = requests
        self.rows = np.arange(len(draft_starts))
        self._token_ids = torch.from_numpy(np.zeros_like(draft_starts))  # the device puts in the fed tokens
        self._query_start = torch.from_numpy(np.arange(len(draft_starts) + 1, dtype=np.int32))

    def of(self, chosen: Ints) -> "_Sequences":
        table = self._block_table[torch.from_numpy(chosen)]
        return _Sequences(self._draft_starts[chosen], table, self._requests.among(chosen))

    def batch(self, depth: int, feed: TokenFeedback) -> RowBatch:
        """The rows of draft token number depth, from 1 on, of every sequence."""
        seq_len = (self._draft_starts + depth).astype(np.int32)
        return RowBatch(
            token_ids=self._token_ids,
            layout=RowLayout(
                query_start=self._query_start,
                seq_len=torch.from_numpy(seq_len),
                positions=torch.from_numpy(seq_len - 1),
                block_table=self._block_table,
            ),
            last_rows=feed.rows,
            feedback=feed,
        )

    def requests_after(self, depth: int) -> SamplingMetadata:
        """Of the tokens that follow draft token number depth."""
        return self._requests.at(self._draft_starts + depth)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """A launched pass. It samples draft token number depth, from 1 on. active: [S] numbers of the inputs."""

    depth: int
    active: Ints
    sequences: _Sequences
    pending: PendingTokens


def _read(passed: _Pass, progress: DraftProgress, stop: StopRule | None) -> Ints:
    """Wait for a pass and take its tokens; returns the sequences that stay active.

    A token drafted after a dropped one is dropped too: survival never rises.
    """
    return progress.take(passed.active, drafted_by_runner(passed.pending.wait()), stop)
