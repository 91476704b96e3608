"""The drafting loop of a head: a first pass over committed tokens, with the target's states, then one per token.

Remembers nothing from one proposal to the next. Positions and places differ: a token has a position in its
sequence, which its random numbers depend on, and its row has a place in the head's cache.

    position      p ................. n - 1 | n         n + 1     ...
    states        p - 1 ............. n - 2 | -         -                the target's, which predicted the token
    rows          |  HeadInput: committed   | x_1       x_2       ...
    hidden        |  of the pass            | of p - 1's row, in place of states, and so on
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.contract.plan import StopRule
from faser.engine.execution.drafters.draft_samplers import DraftRows, DraftSampler, PredictingSampler
from faser.engine.execution.drafters.head_runner import HeadRunner
from faser.engine.execution.drafters.passes import DraftBatch, DraftInput, DraftProgress, chunks, cut, rows_of
from faser.engine.execution.drafters.states import HiddenStates, StatePiece
from faser.engine.execution.runner.batch import BlockTable
from faser.kernels.interface.head_drafting import DraftRules, StopNumbers
from faser.kernels.interface.shapes import RowLayout


@dataclass(slots=True, kw_only=True)
class HeadInput:
    """Where one sequence's draft begins. rows: start is the place of the first one in the head's cache.

    position: of the first row's token. pieces: the states of the positions before those of the rows.
    """

    rows: DraftInput
    position: int
    pieces: list[StatePiece]


class HeadPassLoop:
    """table: of the head's cache. max_rows: most rows of a pass. sampler: of the head's vocabulary.

    predicts: how it chooses, where the runner can draft in one call with it; None: a pass after another.
    """

    def __init__(
        self,
        runner: HeadRunner,
        table: BlockTable,
        states: HiddenStates,
        sampler: DraftSampler,
        *,
        max_rows: int,
        predicts: PredictingSampler | None = None,
    ) -> None:
        self._predicts = predicts if runner.drafts_in_one_call else None
        self._runner = runner
        self._table = table
        self._states = states
        self._sampler = sampler
        self._max_rows = max_rows

    @torch.inference_mode()
    def draft(
        self,
        inputs: Sequence[HeadInput],
        stop: StopRule | None,
        until: Callable[[], bool] | None = None,
    ) -> DraftBatch:
        """As DraftLoop.draft."""
        if not inputs:
            return DraftBatch()
        num_rows = sum([len(each.rows.token_ids) for each in inputs])
        if self._predicts is not None and until is None and num_rows <= self._max_rows:
            return self._in_one_call(self._predicts, inputs, stop)
        progress = DraftProgress([each.rows for each in inputs])
        shifts = np.array([each.position - each.rows.start for each in inputs])  # from places to positions
        progress.draft_starts += shifts
        hidden, passes = self._read(inputs)
        active = np.arange(len(inputs))
        drafting = _Drafting.of(self._table, progress.slots, progress.draft_starts - shifts)
        rows = DraftRows(
            slots=progress.slots,
            positions=progress.draft_starts,
            draft_starts=progress.draft_starts,
        )
        while True:
            tokens = self._sampler.choose(self._runner.logits_of(hidden), rows)
            staying = progress.take(active, tokens, stop)
            if not len(staying) or (until is not None and until()):
                return progress.batch(passes)
            if len(staying) < len(active):
                kept = torch.from_numpy(np.searchsorted(active, staying))
                hidden, drafting = hidden.index_select(0, kept.to(hidden.device)), drafting.among(kept)
            active = staying
            token_ids, rows = progress.feed(active)
            hidden = self._runner.draft(torch.from_numpy(token_ids), drafting.next_layout(), hidden)
            passes += 1

    def _in_one_call(
        self, predicts: PredictingSampler, inputs: Sequence[HeadInput], stop: StopRule | None
    ) -> DraftBatch:
        slots = np.array([each.rows.slot for each in inputs])
        draft_starts = np.array([each.position + len(each.rows.token_ids) for each in inputs])
        max_tokens = np.array([each.rows.max_tokens for each in inputs])
        ahead = predicts.ahead(slots, draft_starts, int(max_tokens.max()))
        found = self._runner.draft_all(
            rows_of([each.rows for each in inputs], self._table),
            self._states_of(inputs),
            DraftRules(
                max_tokens=max_tokens,
                window=predicts.window,
                stop=None
                if stop is None
                else StopNumbers(
                    row_price=stop.row_price,
                    pass_prices=stop.pass_prices,
                    intercept=stop.intercept,
                    slope=stop.slope,
                ),
                metadata=None if ahead is None else ahead.metadata,
                uniforms=None if ahead is None else ahead.uniforms,
            ),
        )
        counts = found.counts.tolist()
        return DraftBatch(
            token_ids=cut(found.token_ids, counts),
            confidences=cut(found.margins, counts),
            num_fed=tuple(found.num_fed.tolist()),
            passes=found.passes,
        )

    def _states_of(self, inputs: Sequence[HeadInput]) -> Tensor:
        return self._states.gather([piece for each in inputs for piece in each.pieces])

    def _read(self, inputs: Sequence[HeadInput]) -> tuple[Tensor, int]:
        """Hidden states of the last row of every input, [S, Hh], and how many passes that took."""
        states = self._states_of(inputs)
        ends, first, passes = [], 0, 0
        for pieces in chunks([each.rows for each in inputs], self._max_rows):
            batch = rows_of(pieces, self._table)
            hidden = self._runner.read(batch, states[first : first + batch.num_rows])
            first += batch.num_rows
            passes += 1
            last_rows = batch.last_rows[[piece.ends for piece in pieces]]
            ends.append(hidden.index_select(0, torch.from_numpy(last_rows).to(hidden.device)))
        return ends[0] if len(ends) == 1 else torch.cat(ends), passes


@dataclass(slots=True, kw_only=True)
class _Drafting:
    """S sequences with one row each in every pass: what is the same in all passes is looked up once.

    block_table: [S, B], query_start: [S + 1], as in RowLayout. places: [S] int32, of the rows of the next pass.
    """

    block_table: Tensor
    query_start: Tensor
    places: Tensor

    @classmethod
    def of(cls, table: BlockTable, slots: NDArray[np.int64], places: NDArray[np.int64]) -> "_Drafting":
        """places: [S] of the first draft tokens. The slots hold the blocks of the whole drafts."""
        held = [table.blocks(slot) for slot in slots.tolist()]
        width = max(map(len, held))
        return cls(
            block_table=torch.tensor([blocks + [0] * (width - len(blocks)) for blocks in held], dtype=torch.int32),
            query_start=torch.arange(len(slots) + 1, dtype=torch.int32),
            places=torch.from_numpy(places.astype(np.int32)),
        )

    def among(self, kept: Tensor) -> "_Drafting":
        """Those at these positions, [N] int64."""
        return _Drafting(
            block_table=self.block_table[kept],
            query_start=self.query_start[: len(kept) + 1],
            places=self.places[kept],
        )

    def next_layout(self) -> RowLayout:
        """Of the rows of the next pass."""
        places = self.places
        self.places = places + 1
        return RowLayout(
            query_start=self.query_start,
            seq_len=self.places,
            positions=places,
            block_table=self.block_table,
        )
