"""The drafting loop without a wait between passes: what one is still choosing is what the next is fed.

Owns the order in which passes are launched and read. What a draft is and which of its tokens are kept is as in
passes.py; the tokens stay where the model runs until then, and the host lays out one pass while another runs.

    device    | pass 1               | pass 2               | pass 3               |
    host      launch 1, launch 2     | read 1, launch 3     | read 2, launch 4     | read 3 ...

So a rule takes effect one pass later: whether pass 3 may be is asked of what pass 1 chose. A token below the price
of its row is dropped all the same, and so is the one drafted behind it meanwhile. Where the price of a pass ends a
round, one pass more was made, and what it brought is kept as far as the price of a row allows.

What was fed and is then dropped has keys and values behind the end of its course, where nothing is taken for
computed: whoever computes this position next writes it before any row reads it.

On a GPU this loop has not run yet.
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
    DraftLoop,
    DraftProgress,
    Piece,
    chunks,
    rows_of,
)
from faser.engine.execution.runner.batch import BlockTable, RowBatch, TokenFeedback
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.token_samplers import PendingTokens
from faser.kernels.interface.backend import RowLayout
from faser.kernels.interface.sampling_metadata import SamplingMetadata

Ints = NDArray[np.int64]


class DeviceFedPassLoop:
    """See DraftLoop. The runner makes the choice; until is asked while the pass before the one it is about runs.

    waiting: drafts where likely tokens are to be named, which a runner's guess does not do.
    """

    def __init__(
        self,
        runner: Runner,
        table: BlockTable,
        choice: RunnerDraftSampler,
        *,
        max_rows: int,
        waiting: DraftLoop,
        num_layers: int | None = None,
    ) -> None:
        self._runner = runner
        self._table = table
        self._choice = choice
        self._max_rows = max_rows
        self._waiting = waiting
        self._num_layers = num_layers

    @torch.inference_mode()
    def draft(
        self,
        openings: Sequence[DraftInput],
        stop: StopRule | None,
        until: Callable[[], bool] | None = None,
        *,
        wants_top_ids: bool = False,
    ) -> DraftBatch:
        if wants_top_ids:
            return self._waiting.draft(openings, stop, until, wants_top_ids=True)
        if not openings:
            return DraftBatch(courses=(), passes=0, probs=None)
        progress = DraftProgress(openings)
        running, passes = self._open(openings, progress)
        willing = running.going
        while len(going := willing[progress.max_tokens[willing] > running.depth]) and not (
            until is not None and until()
        ):
            last, running = running, self._go_on(running, going)
            progress.count_fed(going)
            passes += 1
            willing = _read(last, progress, stop)
        _read(running, progress, stop)
        return DraftBatch(courses=progress.courses(), passes=passes, probs=None)

    def _open(self, openings: Sequence[DraftInput], progress: DraftProgress) -> tuple["_Pass", int]:
        """Launch what chooses the first token of every opening; and how many passes that is."""
        *before, last = spread(openings, self._max_rows)
        for pieces in before:
            self._runner.forward(rows_of(pieces, self._table), self._num_layers)
        batch = rows_of(last, self._table)
        self._runner.forward(batch, self._num_layers)
        requests = self._choice.metadata(progress.slots, progress.draft_starts)
        pending = self._runner.guess(batch.last_rows, requests, self._choice.window)
        lines = _Lines(progress.draft_starts, batch.layout.block_table, requests)
        opened = _Pass(depth=1, going=np.arange(len(openings)), lines=lines, pending=pending)
        return opened, len(before) + 1

    def _go_on(self, last: "_Pass", going: Ints) -> "_Pass":
        """Launch a pass that is fed what the last one chooses, of those that still go on."""
        everybody = len(going) == len(last.going)
        sources = None if everybody else np.searchsorted(last.going, going)
        lines = last.lines if sources is None else last.lines.of(sources)
        rows = lines.rows
        feed = TokenFeedback(pending=last.pending, rows=rows, sources=rows if sources is None else sources)
        self._runner.forward(lines.batch(last.depth, feed), self._num_layers)
        pending = self._runner.guess(rows, lines.requests_behind(last.depth), self._choice.window)
        return _Pass(depth=last.depth + 1, going=going, lines=lines, pending=pending)


def spread(openings: Sequence[DraftInput], max_rows: int) -> list[Sequence[DraftInput | Piece]]:
    """All rows of the openings in as few passes as can be, and the last row of every opening in the last pass.

    So one guess is for all of them. Three openings with last rows A, B and C, in passes of 6 rows:

        in order     a a a a a A | b B c c c c | C
        here         a a a a a b | c c c c     | A B C
    """
    assert len(openings) <= max_rows, f"{len(openings)} sequences draft; a pass has {max_rows} rows"
    num_rows = sum(len(each.token_ids) for each in openings)
    room = (-(-num_rows // max_rows) - 1) * max_rows  # of all passes before the last
    if not room:
        return [openings]
    early, last = [], []
    for each in openings:
        count = min(room, len(each.token_ids) - 1)
        room -= count
        if count:
            early.append(replace(each, token_ids=each.token_ids[:count]))
        last.append(replace(each, start=each.start + count, token_ids=each.token_ids[count:]))
    return [*chunks(early, max_rows), last]


class _Lines:
    """Sequences that have one row each in a pass, [S]: what of it is the same in every pass.

    draft_starts: positions of their first drafted tokens. requests: of these tokens. rows: numbers of the rows.
    """

    def __init__(self, draft_starts: Ints, block_table: Tensor, requests: SamplingMetadata) -> None:
        self._draft_starts = draft_starts
        self._block_table = block_table
        self._requests = requests
        self.rows = np.arange(len(draft_starts))
        self._token_ids = torch.from_numpy(np.zeros_like(draft_starts))  # all are fed
        self._query_start = torch.from_numpy(np.arange(len(draft_starts) + 1, dtype=np.int32))

    def of(self, chosen: Ints) -> "_Lines":
        table = self._block_table[torch.from_numpy(chosen)]
        return _Lines(self._draft_starts[chosen], table, self._requests.among(chosen))

    def batch(self, depth: int, feed: TokenFeedback) -> RowBatch:
        """The rows of everybody's drafted token number depth, from 1 on."""
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
            feed=feed,
        )

    def requests_behind(self, depth: int) -> SamplingMetadata:
        """Of the tokens that follow these rows."""
        return self._requests.at(self._draft_starts + depth)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """A pass that was launched. It chooses token number depth, from 1 on, of each of going: [S] openings."""

    depth: int
    going: Ints
    lines: _Lines
    pending: PendingTokens


def _read(passed: _Pass, progress: DraftProgress, stop: StopRule | None) -> Ints:
    """Wait for a pass and take its tokens; returns who is willing to go on.

    Who drafted on behind a dropped token is dropped again: survival never rises.
    """
    return progress.take(passed.going, drafted_by_runner(passed.pending.wait()), stop)
