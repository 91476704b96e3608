"""A runner that replays recordings instead of calling kernel after kernel, where the sizes of a step allow it.

A step is three recordings, one behind the other and without a wait in between:

    trunk     rows -> hidden states     by Bucket: so many rows, of so many sequences, one each or several
    head      hidden states -> logits   by how many rows
    choice    logits -> tokens          by how many rows, and by what their requests ask for

so that their number is the sum of these sizes, not the product. A step in between is padded to the next size. The
same trunks serve steps with and without drafts: who never drafts replays the same recordings. What no recording
fits is computed by the eager runner, on the same buffers.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from faser.engine.batch import RowBatch
from faser.engine.choosing import DeviceChooser, Pending
from faser.engine.models.decoder import Decoder
from faser.engine.requests import Cuts, Requests
from faser.engine.runner import Runner
from faser.kernels.backend import AttentionPlan, Backend, KvShape
from faser.kernels.capture import Bucket, Capture, Recording, Stage

STAGE = "recording steps"
_TRUNK_BYTES = 4 << 20  # of a recording with some hundred kernels, and what it allocates
_WRAPPER_BYTES = 8 << 20  # that an attention wrapper keeps for its plans
_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_ALL_CUTS = (
    Cuts(random=False, top_k=False, top_p=False),
    *(Cuts(random=True, top_k=top_k, top_p=top_p) for top_k in (False, True) for top_p in (False, True)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSizes:
    """Which sizes are recorded, ascending. rows: of steps. most_sequences: that a step has.

    blocks_each: that one sequence has at most.
    """

    rows: tuple[int, ...]
    most_sequences: int
    blocks_each: int

    @classmethod
    def usual(
        cls,
        *,
        most_rows: int,
        most_sequences: int,
        most_drafts: int,
        blocks_each: int,
        wanted: Sequence[int] | None = None,
    ) -> "GraphSizes":
        """For steps of up to most_sequences with up to most_drafts drafted tokens each, and most_rows in all.

        wanted: rows; None: powers of two and what lies halfway, up to 512.
        """
        most = min(most_sequences * (most_drafts + 1), most_rows, max(_SIZES[-1], most_sequences))
        rows = wanted or (*(each for each in _SIZES if each < most), most_sequences, most)
        return cls(rows=tuple(sorted(set(rows))), most_sequences=most_sequences, blocks_each=blocks_each)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """One row each as far as there are sequences, and several each from two rows on."""
        plain = [
            Bucket(rows=rows, sequences=rows, one_row_each=True)
            for rows in self.rows
            if rows <= self.most_sequences
        ]
        several = [
            Bucket(rows=rows, sequences=min(rows - 1, self.most_sequences), one_row_each=False)
            for rows in self.rows
            if rows > 1
        ]
        return (*plain, *several)

    def expected_bytes(self, num_kinds: int, num_depths: int = 1) -> int:
        """About what recordings of so many kinds of attention layers will take, beside what steps take anyway."""
        return len(self.buckets) * num_depths * (_TRUNK_BYTES + num_kinds * _WRAPPER_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guessing:
    """What a runner that drafts is asked for. windows: of its guesses. depths: layers that draft; None: all."""

    windows: tuple[float, ...] = ()
    depths: tuple[int | None, ...] = (None,)


@dataclass(frozen=True, slots=True)
class _Trunk:
    bucket: Bucket
    plan: AttentionPlan
    max_blocks: int
    recording: Recording


class GraphRunner(Runner):
    """See Runner. Records at construction; report is called with (stage, done, total).

    max_logit_rows: most rows whose logits are taken at once.
    """

    def __init__(
        self,
        decoder: Decoder,
        backend: Backend,
        kv: KvShape,
        chooser: DeviceChooser,
        capture: Capture,
        *,
        sizes: GraphSizes,
        max_logit_rows: int,
        guessing: Guessing = Guessing(),
        report: Callable[[str, int, int], None],
    ) -> None:
        super().__init__(decoder, backend, kv, chooser)
        self._capture = capture
        self._device_chooser = chooser
        self._num_blocks = kv.num_blocks
        self._sizes = sizes
        self._inputs = _Inputs(capture, sizes.rows[-1])
        self._head_rows: Stage = capture.stage(max_logit_rows, torch.int64)
        self._head_sizes = tuple(each for each in sizes.rows if each <= max_logit_rows)
        self._trunks: dict[tuple[Bucket, int], _Trunk] = {}
        self._heads: dict[int, Recording] = {}
        self._takes: dict[tuple[int, Cuts], Recording] = {}
        self._guesses: dict[tuple[int, Cuts, float], Recording] = {}
        self._buckets = {True: _Ladder(sizes, one_row_each=True), False: _Ladder(sizes, one_row_each=False)}
        self._record_all(guessing, report)

    @property
    def num_recordings(self) -> int:
        return len(self._trunks) + len(self._heads) + len(self._takes) + len(self._guesses)

    @torch.inference_mode()
    def forward(self, batch: RowBatch, num_layers: int | None = None) -> None:
        depth = self.num_layers if num_layers is None else num_layers
        trunk = self._trunk_for(batch, depth)
        if trunk is None:
            super().forward(batch, num_layers)
            return
        self._inputs.send(batch, self._device_chooser)
        self._capture.lay_out(trunk.plan, batch.layout)
        trunk.recording.replay()
        self._batch, self._plan = batch, None
        self._hidden = self._decoder.hidden[: len(batch.token_ids)]
        self._next_layer = depth

    @torch.inference_mode()
    def advance(self, num_layers: int | None = None) -> None:
        """See Runner. Behind a replayed part too, whose plan has padded rows and is of no use to the others."""
        assert self._batch is not None, "advance before begin"
        if self._plan is None:
            self._plan = self._backend.plan(self._batch.layout, self._block_size)
        super().advance(num_layers)

    @torch.inference_mode()
    def logits(self, rows: Sequence[int] | NDArray[np.int64]) -> torch.Tensor:
        """See Runner. Valid until the next call."""
        assert self._hidden is not None, "logits before forward"
        size = _next(self._head_sizes, len(rows))
        if size is None:
            return super().logits(rows)
        wanted = self._head_rows.host()
        wanted[: len(rows)], wanted[len(rows) :] = rows, 0
        self._head_rows.send()
        self._heads[size].replay()
        return self._decoder.logit_rows[: len(rows)]

    @torch.inference_mode()
    def choose(self, rows: NDArray[np.int64], requests: Requests) -> Pending:
        logits, size = self.logits(rows), _next(self._head_sizes, len(rows))
        recording = None if size is None else self._takes.get((size, requests.cuts))
        if recording is None:
            return self._device_chooser.take(logits, requests)
        self._device_chooser.send(requests)
        recording.replay()
        return self._device_chooser.taken(len(rows))

    @torch.inference_mode()
    def guess(self, rows: NDArray[np.int64], requests: Requests, window: float) -> Pending:
        logits, size = self.logits(rows), _next(self._head_sizes, len(rows))
        recording = None if size is None else self._guesses.get((size, requests.cuts, window))
        if recording is None:
            return self._device_chooser.guess(logits, requests, window)
        self._device_chooser.send(requests)
        recording.replay()
        return self._device_chooser.guessed(len(rows))

    def _trunk_for(self, batch: RowBatch, depth: int) -> _Trunk | None:
        """The smallest that the batch fits into."""
        layout = batch.layout
        num_rows, num_sequences = len(batch.token_ids), len(layout.seq_len)
        bucket = self._buckets[num_rows == num_sequences].fitting(num_rows, num_sequences)
        trunk = None if bucket is None else self._trunks.get((bucket, depth))
        if trunk is None or _num_blocks(batch, self._block_size) > trunk.max_blocks:
            return None
        return trunk

    def _record_all(self, guessing: Guessing, report: Callable[[str, int, int], None]) -> None:
        """Large ones first: what they allocate is enough for the others."""
        depths = [self.num_layers if each is None else each for each in (None, *guessing.depths)]
        trunks = [(bucket, depth) for bucket in reversed(self._sizes.buckets) for depth in dict.fromkeys(depths)]
        heads = self._head_sizes[::-1]
        num_choices = len(heads) * len(_ALL_CUTS) * (1 + len(guessing.windows))
        total = len(trunks) + len(heads) + num_choices
        for bucket, depth in trunks:
            self._trunks[bucket, depth] = self._record_trunk(bucket, depth)
            report(STAGE, self.num_recordings, total)
        for size in heads:
            self._record_ends(size, guessing.windows)
            report(STAGE, self.num_recordings, total)

    def _record_trunk(self, bucket: Bucket, depth: int) -> _Trunk:
        # Sequences may share blocks, so that all of them together can have more than there are.
        max_blocks = min(bucket.sequences * self._sizes.blocks_each, 2 * self._num_blocks + bucket.sequences)
        plan = self._capture.plan(bucket, self._block_size, max_blocks)

        def run() -> None:
            hidden = self._decoder.embed(self._inputs.read(bucket.rows, self._device_chooser))
            self._decoder.run_layers(hidden, 0, depth, self._cache, plan)

        return _Trunk(bucket, plan, max_blocks, self._record(run))

    def _record_ends(self, size: int, windows: tuple[float, ...]) -> None:
        """What comes behind a trunk, for so many rows."""
        decoder, chooser = self._decoder, self._device_chooser
        rows, logits = self._head_rows.device[:size], decoder.logit_rows[:size]
        self._heads[size] = self._record(lambda: _run_head(decoder, rows))
        for cuts in _ALL_CUTS:
            self._takes[size, cuts] = self._record(partial(chooser.run_take, logits, cuts))
            for window in windows:
                guess = partial(chooser.run_guess, logits, window, cuts)
                self._guesses[size, cuts, window] = self._record(guess)

    @torch.inference_mode()
    def _record(self, work: Callable[[], None]) -> Recording:
        return self._capture.record(work)


def _run_head(decoder: Decoder, rows: torch.Tensor) -> None:
    decoder.logits(decoder.hidden.index_select(0, rows))


class _Inputs:
    """Token ids of a step's rows at a fixed place, and where fed ones come from."""

    def __init__(self, capture: Capture, max_rows: int) -> None:
        self._max_rows = max_rows
        self._stage: Stage = capture.stage(2 * max_rows, torch.int64)

    def send(self, batch: RowBatch, chooser: DeviceChooser) -> None:
        numbers, count = self._stage.host(), len(batch.token_ids)
        token_ids, sources = numbers[: self._max_rows], numbers[self._max_rows :]
        token_ids[:count], token_ids[count:] = batch.token_ids.numpy(), 0
        sources[:] = -1
        if batch.feed is not None:
            pending = batch.feed.pending.tokens
            assert pending.data_ptr() == chooser.tokens.data_ptr(), "fed from another runner's choice"
            sources[batch.feed.rows] = batch.feed.sources
        self._stage.send()

    def read(self, rows: int, chooser: DeviceChooser) -> torch.Tensor:
        """[rows] int64, on the device."""
        device = self._stage.device
        token_ids, sources = device[:rows], device[self._max_rows : self._max_rows + rows]
        fed = chooser.tokens.index_select(0, sources.clamp_min(0)).clamp_min(0)
        return torch.where(sources >= 0, fed, token_ids)


class _Ladder:
    """The buckets of one kind, in order of rows."""

    def __init__(self, sizes: GraphSizes, *, one_row_each: bool) -> None:
        self._buckets = [each for each in sizes.buckets if each.one_row_each is one_row_each]
        self._rows = tuple(each.rows for each in self._buckets)

    def fitting(self, rows: int, sequences: int) -> Bucket | None:
        at = bisect_left(self._rows, rows)
        while at < len(self._buckets):
            if self._buckets[at].sequences >= sequences:
                return self._buckets[at]
            at += 1
        return None


def _next(sizes: tuple[int, ...], count: int) -> int | None:
    """The least size that is not smaller."""
    at = bisect_left(sizes, count)
    return sizes[at] if at < len(sizes) else None


def _num_blocks(batch: RowBatch, block_size: int) -> int:
    lengths: NDArray[np.int32] = batch.layout.seq_len.numpy()
    return int((-(-lengths // np.int32(block_size))).sum())
