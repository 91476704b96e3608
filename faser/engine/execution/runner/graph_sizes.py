"""The sizes of steps that CUDA graphs are captured for, and which of them a step is padded to.

Knows rows and sequences, and how many rows of a sequence a tile of attention holds; neither graphs nor models.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from faser.kernels.interface.graph_capture import GraphBatchSize
from faser.optional import present

_BACKBONE_BYTES = 4 << 20  # of a graph with some hundred kernels, and what it allocates
_WRAPPER_BYTES = 256 << 10  # that an attention wrapper keeps for its plans
# A padding row costs little while a step mostly reads weights. From about 200 rows on it costs as much as any
# other, so sizes are an eighth apart there at most. Larger steps hide the launches of eager kernels, but for those
# where all sequences verify as many drafts: eager attention takes wider tiles. For 64 sequences with four drafts
# these are 80 graphs of all layers and 132 of LM head and samplers: about 340 MiB and 5 s, both estimated.
_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, *range(144, 256, 16), *range(256, 513, 32))
_UNIFORM_SIZES = (576, 640, 768, 896, 1024)
_MOST_ROWS_EACH = 6  # drafts of one length are mostly short
_MOST_PAIRED = 128  # rows; of more sequences the keys, which are read for each row, cost more than a wait


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSizes:
    """The sizes of one set of graphs.

    rows: of the steps, ascending. max_sequences: most sequences of a step. max_blocks_each: most blocks of one
    sequence. max_rows_each: steps of more than max_sequences rows have sizes of their own where all sequences have
    as many rows, from 2 to this number; 1: none has. uniform_rows: further sizes for these alone. tile_rows: for
    steps whose sequences have up to so many rows each there are sizes of their own, ascending; see GraphBatchSize.
    max_single_rows: the most rows of a step that has a size for one row a sequence, if that is more than
    max_sequences.
    """

    rows: tuple[int, ...]
    max_sequences: int
    max_blocks_each: int
    max_rows_each: int = 1
    uniform_rows: tuple[int, ...] = ()
    tile_rows: tuple[int | None, ...] = (None,)
    max_single_rows: int = 0

    @classmethod
    def default(
        cls,
        *,
        max_rows: int,
        max_sequences: int,
        max_drafts: int,
        max_blocks_each: int,
        requested: Sequence[int] | None = None,
        block_size: int = _MOST_ROWS_EACH,
        tile_rows: Sequence[int] = (),
        pairs: bool = False,
    ) -> "GraphSizes":
        """For steps of at most max_rows rows: max_sequences sequences with max_drafts draft tokens each.

        requested: the sizes in rows; None: those of _SIZES that steps can have. tile_rows: of the backend's
        GraphCapture; sizes have those that drafts can fill. pairs: the last two rows of up to half as many
        sequences as _MOST_PAIRED have sizes as if each were a sequence.
        """
        rows_each = min(max_drafts + 1, _MOST_ROWS_EACH, block_size)
        most = min(max_sequences * (max_drafts + 1), max_rows, max(_SIZES[-1], max_sequences))
        rows = requested or (*(each for each in _SIZES if each < most), max_sequences, most)
        uniform = () if requested else [each for each in _UNIFORM_SIZES if each <= max_rows]
        sufficient = [most for fewer, most in pairwise((0, *sorted(tile_rows))) if fewer <= max_drafts]
        return cls(
            rows=tuple(sorted(set(rows))),
            max_sequences=max_sequences,
            max_blocks_each=max_blocks_each,
            max_rows_each=rows_each,
            uniform_rows=tuple(uniform),
            tile_rows=tuple(sufficient) or (None,),
            max_single_rows=min(2 * max_sequences, _MOST_PAIRED) if pairs else 0,
        )

    @property
    def most_rows(self) -> int:
        return max(each.rows for each in self.batch_sizes)

    @property
    def batch_sizes(self) -> tuple[GraphBatchSize, ...]:
        """One row per sequence for sizes up to max_sequences; the same number of rows for every sequence beyond;
        then several rows per sequence from two rows on, for each width of attention's tiles.

        A step takes the narrowest tile that holds the rows of each of its sequences: 64 sequences of 5 rows and 4
        query heads a KV head fill 20 of 64 packed rows, and tiles of 16 would read all keys twice.
        """
        single = [
            GraphBatchSize(rows=rows, sequences=rows, one_row_each=True)
            for rows in self.rows
            if rows <= max(self.max_sequences, self.max_single_rows)
        ]
        several = [
            GraphBatchSize(
                rows=rows, sequences=min(rows - fewer, self.max_sequences), one_row_each=False, tile_rows=most
            )
            for rows in self.rows
            for fewer, most in pairwise((1, *self.tile_rows))
            if fewer is not None and rows > fewer
        ]
        return (*single, *self._uniform(), *several)

    def _uniform(self) -> list[GraphBatchSize]:
        found = {
            (min(rows // each, self.max_sequences), each)
            for rows in (*self.rows, *self.uniform_rows)
            for each in range(2, self.max_rows_each + 1)
        }
        return [
            GraphBatchSize(rows=count * each, sequences=count, one_row_each=False, rows_each=each)
            for count, each in sorted(found, key=lambda pair: pair[0] * pair[1])
            if count * each > self.max_sequences
        ]

    def expected_bytes(self, num_kinds: int, backbone_bytes: int = _BACKBONE_BYTES) -> int:
        """Estimated device memory of the graphs, in addition to what eager steps need.

        num_kinds: kinds of attention layers that the model has. backbone_bytes: of one graph without its plans.
        """
        return len(self.batch_sizes) * (backbone_bytes + num_kinds * _WRAPPER_BYTES)


class StepSizes:
    """The look-up of the size that a step is padded to."""

    def __init__(self, sizes: GraphSizes) -> None:
        self._single = BatchSizeIndex(sizes, one_row_each=True)
        self._uniform = {
            each: BatchSizeIndex(sizes, one_row_each=False, rows_each=each)
            for each in range(2, sizes.max_rows_each + 1)
        }
        self._several = [
            (each, BatchSizeIndex(sizes, one_row_each=False, tile_rows=each)) for each in sizes.tile_rows
        ]

    def fitting(self, counts: NDArray[np.int32]) -> GraphBatchSize | None:
        """The smallest size that a step fits into; of sizes for several rows, that with the narrowest tiles.

        counts: rows of each sequence.
        """
        rows, sequences, most = int(counts.sum()), len(counts), int(counts.max())
        if most == 1 and (single := self._single.fitting(rows, sequences)) is not None:
            return single
        index = next(
            (index for tile, index in self._several if tile is None or most <= tile), self._several[-1][1]
        )
        kinds = [self._uniform[most]] if most in self._uniform and rows == most * sequences else []
        found = present(each.fitting(rows, sequences) for each in (*kinds, index))
        return min(found, key=lambda size: size.rows, default=None)


class BatchSizeIndex:
    """The batch sizes of one kind, ordered by rows, for look-up."""

    def __init__(
        self, sizes: GraphSizes, *, one_row_each: bool, rows_each: int | None = None, tile_rows: int | None = None
    ) -> None:
        kind = one_row_each, rows_each, tile_rows
        self._batch_sizes = [
            each for each in sizes.batch_sizes if (each.one_row_each, each.rows_each, each.tile_rows) == kind
        ]
        self._rows = tuple(each.rows for each in self._batch_sizes)

    def fitting(self, rows: int, sequences: int) -> GraphBatchSize | None:
        """The smallest size with room for these rows and sequences."""
        at = bisect_left(self._rows, rows)
        while at < len(self._batch_sizes):
            if self._batch_sizes[at].sequences >= sequences:
                return self._batch_sizes[at]
            at += 1
        return None


def next_size(sizes: tuple[int, ...], count: int) -> int | None:
    """The smallest of these ascending sizes that is at least count."""
    at = bisect_left(sizes, count)
    return sizes[at] if at < len(sizes) else None


def size_for(sizes: tuple[int, ...], count: int) -> int:
    """Return the smallest of these ascending sizes that is at least count, which is at most the largest."""
    return sizes[bisect_left(sizes, count)]
