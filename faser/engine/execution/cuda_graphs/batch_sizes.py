"""Which sizes of steps are recorded, and which of them a step fits into. Knows no recordings."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from faser.kernels.interface.graph_capture import GraphBatchSize

_TRUNK_BYTES = 4 << 20  # of a recording with some hundred kernels, and what it allocates
_WRAPPER_BYTES = 8 << 20  # that an attention wrapper keeps for its plans
_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# Padding costs little where weights are what is read; larger steps are long enough to be launched as they run.
_LANE_SIZES = (4, 16, 32, 64, 128, 256)


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
    def buckets(self) -> tuple[GraphBatchSize, ...]:
        """One row each as far as there are sequences, and several each from two rows on."""
        plain = [
            GraphBatchSize(rows=rows, sequences=rows, one_row_each=True)
            for rows in self.rows
            if rows <= self.most_sequences
        ]
        several = [
            GraphBatchSize(rows=rows, sequences=min(rows - 1, self.most_sequences), one_row_each=False)
            for rows in self.rows
            if rows > 1
        ]
        return (*plain, *several)

    def for_lanes(self) -> "GraphSizes":
        """Those of steps that share the device: few, as there is a set of recordings for every lane and share.

        One of them is that of a row for every sequence, or such steps of few sequences would fit nowhere.
        """
        most = min(self.rows[-1], _LANE_SIZES[-1])
        rows = {most, min(self.most_sequences, most), *(each for each in _LANE_SIZES if each < most)}
        return replace(self, rows=tuple(sorted(rows)))

    def expected_bytes(self, num_kinds: int, num_depths: int = 1) -> int:
        """About what recordings of so many kinds of attention layers will take, beside what steps take anyway."""
        return len(self.buckets) * num_depths * (_TRUNK_BYTES + num_kinds * _WRAPPER_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftGraphs:
    """What a runner that drafts is asked for. windows: of its guesses. depths: layers that draft; None: all."""

    windows: tuple[float, ...] = ()
    depths: tuple[int | None, ...] = (None,)


class BatchSizes:
    """The buckets of one kind, in order of rows."""

    def __init__(self, sizes: GraphSizes, *, one_row_each: bool) -> None:
        self._buckets = [each for each in sizes.buckets if each.one_row_each is one_row_each]
        self._rows = tuple(each.rows for each in self._buckets)

    def fitting(self, rows: int, sequences: int) -> GraphBatchSize | None:
        at = bisect_left(self._rows, rows)
        while at < len(self._buckets):
            if self._buckets[at].sequences >= sequences:
                return self._buckets[at]
            at += 1
        return None


def next_size(sizes: tuple[int, ...], count: int) -> int | None:
    """The least size that is not smaller."""
    at = bisect_left(sizes, count)
    return sizes[at] if at < len(sizes) else None
