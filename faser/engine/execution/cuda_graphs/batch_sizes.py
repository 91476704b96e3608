"""Graph batch sizes: the step sizes for which graphs are captured, and the one that a step is padded to."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from faser.kernels.interface.graph_capture import GraphBatchSize

_BACKBONE_BYTES = 4 << 20  # of a graph with some hundred kernels, and what it allocates
_WRAPPER_BYTES = 256 << 10  # that an attention wrapper keeps for its plans
# A padding row costs little while a step mostly reads weights. From about 200 rows on it costs as much as any
# other, so sizes are an eighth apart there at most. Larger steps hide the launches of eager kernels. For 64
# sequences with four drafts these are 61 graphs of all layers and 132 of LM head and samplers: about 260 MiB and
# 4 s, both estimated.
_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, *range(144, 256, 16), *range(256, 513, 32))
_MOST_ROWS_EACH = 6  # drafts of one length are mostly short


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSizes:
    """The sizes of one set of graphs.

    rows: of the steps, ascending. max_sequences: most sequences of a step. max_blocks_each: most blocks of one
    sequence. max_rows_each: steps of more than max_sequences rows have sizes of their own where all sequences have
    as many rows, from 2 to this number; 1: none has.
    """

    rows: tuple[int, ...]
    max_sequences: int
    max_blocks_each: int
    max_rows_each: int = 1

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
    ) -> "GraphSizes":
        """For steps of at most max_rows rows: max_sequences sequences with max_drafts draft tokens each.

        requested: the sizes in rows; None: those of _SIZES that steps can have.
        """
        most = min(max_sequences * (max_drafts + 1), max_rows, max(_SIZES[-1], max_sequences))
        rows = requested or (*(each for each in _SIZES if each < most), max_sequences, most)
        return cls(
            rows=tuple(sorted(set(rows))),
            max_sequences=max_sequences,
            max_blocks_each=max_blocks_each,
            max_rows_each=min(max_drafts + 1, _MOST_ROWS_EACH, block_size),
        )

    @property
    def batch_sizes(self) -> tuple[GraphBatchSize, ...]:
        """One row per sequence for sizes up to max_sequences; the same number of rows for every sequence beyond;
        then several rows per sequence from two rows on.

        Where a step may have far more rows than sequences, attention without that promise takes tiles for a
        sequence that has nearly all of them: 64 sequences of 5 rows fill 20 of 128 packed rows, and 64 would do.
        """
        single = [
            GraphBatchSize(rows=rows, sequences=rows, one_row_each=True)
            for rows in self.rows
            if rows <= self.max_sequences
        ]
        several = [
            GraphBatchSize(rows=rows, sequences=min(rows - 1, self.max_sequences), one_row_each=False)
            for rows in self.rows
            if rows > 1
        ]
        return (*single, *self._uniform(), *several)

    def _uniform(self) -> list[GraphBatchSize]:
        found = {
            (min(rows // each, self.max_sequences), each)
            for rows in self.rows
            for each in range(2, self.max_rows_each + 1)
        }
        return [
            GraphBatchSize(rows=count * each, sequences=count, one_row_each=False, rows_each=each)
            for count, each in sorted(found, key=lambda pair: pair[0] * pair[1])
            if count * each > self.max_sequences
        ]

    def expected_bytes(self, num_kinds: int) -> int:
        """Estimated device memory of the graphs, in addition to what eager steps need.

        num_kinds: kinds of attention layers that the model has.
        """
        return len(self.batch_sizes) * (_BACKBONE_BYTES + num_kinds * _WRAPPER_BYTES)


class BatchSizeIndex:
    """The batch sizes of one kind, ordered by rows, for look-up."""

    def __init__(self, sizes: GraphSizes, *, one_row_each: bool, rows_each: int | None = None) -> None:
        self._batch_sizes = [
            each for each in sizes.batch_sizes if each.one_row_each is one_row_each and each.rows_each == rows_each
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
