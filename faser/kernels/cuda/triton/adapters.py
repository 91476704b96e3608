"""Adapters on a GPU: low-rank additions to products, for tiles of 16 rows whose slots the device reads.

    down    partial[i, r] = down[s] x[r], over stretch i of the inputs     s: the slot of row r
    up      out[r] += up[s] (partial[0, r] + partial[1, r] + …)

A tile goes through the different adapters of its rows, one after the other; where all have one, as in a prompt, it
reads that one's weights once. Stretches of inputs are programs of their own, since one tile alone has few; `up`
adds them in order. So a row's bits depend on neither the other rows nor its place among them. The kernels read the
slots from device memory, so they fit into CUDA graphs.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from faser.kernels.cuda.device import Accelerator
from faser.kernels.cuda.triton.common import EXACT, expect, expect_lines, jit, jit_for_any, next_power_of_2
from faser.kernels.interface.adapters import LowRank, check_rank, row_adapters
from faser.kernels.interface.shapes import RowLayout

_ROWS = tl.constexpr(16)
_TILE_ROWS = 16
_MOST_ROWS = 1024  # of a launch
_STRETCH = 512  # inputs of a program by `down`
_STEP = tl.constexpr(128)
_COLUMNS = 64  # of a program by `up`
_FEWEST_RANKS, _MOST_RANKS = 16, 64  # that a program multiplies at once
_NONE = tl.constexpr(1 << 30)  # behind all slots
_TYPES = (torch.bfloat16, torch.float16, torch.float32)


@jit
def _added(rows, weights, sums, WIDE: tl.constexpr):
    """sums + rows @ weights, float32. WIDE: widen the factors first: the interpreter multiplies no bfloat16."""
    if WIDE:
        rows, weights = rows.to(tl.float32), weights.to(tl.float32)
    return tl.dot(rows, weights, sums, input_precision="ieee")


@jit_for_any("num_rows")
def _adapter_down(
    x, stride, slots, down, ranks, partial, num_rows, depth, width, num_parts,
    MAX_RANK: tl.constexpr, RANKS: tl.constexpr, STRETCH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """RANKS inner values of a tile, over one stretch. width: num_parts * MAX_RANK."""
    row = tl.program_id(0) * _ROWS + tl.arange(0, _ROWS)
    first = tl.program_id(1) * RANKS
    column = first + tl.arange(0, RANKS)
    part, before = first // MAX_RANK, first % MAX_RANK
    stretch = tl.program_id(2)
    inside = row < num_rows
    slot = tl.load(slots + row, mask=inside, other=-1)
    slot = tl.where(slot < 0, _NONE, slot)
    sums = tl.zeros((_ROWS, RANKS), tl.float32)
    current = tl.min(slot)
    while current < _NONE:
        mine = slot == current
        if tl.load(ranks + current * num_parts + part) > before:
            found = tl.zeros((_ROWS, RANKS), tl.float32)
            for start in range(stretch * STRETCH, stretch * STRETCH + STRETCH, _STEP):
                at = start + tl.arange(0, _STEP)
                exists = at < depth
                places = x + row.to(tl.int64)[:, None] * stride + at[None, :]
                values = tl.load(places, mask=mine[:, None] & exists[None, :], other=0.0)
                lines = down + (current * width + column).to(tl.int64)[None, :] * depth + at[:, None]
                weights = tl.load(lines, mask=exists[:, None], other=0.0)
                found = _added(values, weights, found, WIDE)
            sums = tl.where(mine[:, None], found, sums)
        slot = tl.where(mine, _NONE, slot)
        current = tl.min(slot)
    place = partial + (stretch * num_rows + row).to(tl.int64)[:, None] * width + column[None, :]
    tl.store(place, sums, mask=inside[:, None])


@jit_for_any("num_rows")
def _adapter_up(
    partial, slots, up, ranks, blocks, out, stride, num_rows, size, width, num_parts, num_stretches,
    MAX_RANK: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """COLUMNS outputs of a tile, all of one part. blocks: [N blocks, 3], first column, behind the last, part."""
    row = tl.program_id(0) * _ROWS + tl.arange(0, _ROWS)
    block = blocks + tl.program_id(1) * 3
    column = tl.load(block) + tl.arange(0, COLUMNS)
    exists, part = column < tl.load(block + 1), tl.load(block + 2)
    inside = row < num_rows
    slot = tl.load(slots + row, mask=inside, other=-1)
    slot = tl.where(slot < 0, _NONE, slot)
    sums = tl.zeros((_ROWS, COLUMNS), tl.float32)
    changes = row < 0
    current = tl.min(slot)
    while current < _NONE:
        mine = slot == current
        rank = tl.load(ranks + current * num_parts + part)
        found = tl.zeros((_ROWS, COLUMNS), tl.float32)
        for start in range(0, rank, RANKS):
            at = start + tl.arange(0, RANKS)
            inner = tl.zeros((_ROWS, RANKS), tl.float32)
            for stretch in range(num_stretches):
                place = partial + (stretch * num_rows + row).to(tl.int64)[:, None] * width
                inner += tl.load(place + part * MAX_RANK + at[None, :], mask=mine[:, None], other=0.0)
            lines = up + (current * size + column).to(tl.int64)[None, :] * MAX_RANK + at[:, None]
            weights = tl.load(lines, mask=exists[None, :], other=0.0)
            found = _added(inner.to(weights.dtype), weights, found, WIDE)
        sums = tl.where(mine[:, None], found, sums)
        changes = changes | (mine & (rank > 0))
        slot = tl.where(mine, _NONE, slot)
        current = tl.min(slot)
    place = out + row.to(tl.int64)[:, None] * stride + column[None, :]
    kept = changes[:, None] & exists[None, :]
    sums += tl.load(place, mask=kept, other=0.0).to(tl.float32)
    tl.store(place, sums.to(out.dtype.element_ty), mask=kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonRoom:
    """The adapters of a product, on the device. down: [slots, parts * max_rank, K]; up: [slots, N, max_rank].

    ranks: [slots, parts] int32; 0: the part stays as it is. blocks: see _adapter_up. widths: of the parts.
    """

    down: Tensor
    up: Tensor
    ranks: Tensor
    blocks: Tensor
    widths: tuple[int, ...]
    max_rank: int

    @property
    def ranks_at_once(self) -> int:
        return min(_MOST_RANKS, self.up.shape[2])


class TritonAdapters:
    """Implements Adapters. AdapterRows are slots of rows, [R] int64 on the device."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def room(
        self, parts: tuple[int, ...], depth: int, dtype: torch.dtype, *, slots: int, max_rank: int
    ) -> TritonRoom:
        device, padded = self._accelerator.device, room_rank(max_rank)
        size, first, blocks = sum(parts), 0, []
        for number, width in enumerate(parts):
            blocks += [(at, first + width, number) for at in range(first, first + width, _COLUMNS)]
            first += width
        return TritonRoom(
            down=torch.zeros(slots, len(parts) * padded, depth, dtype=dtype, device=device),
            up=torch.zeros(slots, size, padded, dtype=dtype, device=device),
            ranks=torch.zeros(slots, len(parts), dtype=torch.int32, device=device),
            blocks=torch.tensor(blocks, dtype=torch.int32).to(device),
            widths=parts,
            max_rank=max_rank,
        )

    def pack(self, room: TritonRoom, parts: tuple[LowRank | None, ...]) -> tuple[LowRank | None, ...]:
        """On the host, in the type of the room: the device has those in use alone."""
        check_rank(parts, room.max_rank)

        def packed(weight: Tensor) -> Tensor:
            return weight.to("cpu", room.down.dtype, copy=True).contiguous()

        return tuple(each and LowRank(down=packed(each.down), up=packed(each.up)) for each in parts)

    def set(self, room: TritonRoom, slot: int, packed: tuple[LowRank | None, ...] | None) -> None:
        down, up, padded = room.down[slot].zero_(), room.up[slot].zero_(), room.up.shape[2]
        ranks = self._accelerator.host_numbers(len(room.widths)).zero_()
        first = 0
        for number, (width, part) in enumerate(zip(room.widths, packed or (), strict=False)):
            if part is not None:
                rank = ranks[number] = len(part.down)
                down[number * padded : number * padded + rank].copy_(part.down)
                up[first : first + width, :rank].copy_(part.up)
            first += width
        room.ranks[slot].copy_(self._accelerator.upload(ranks))

    def rows(self, layout: RowLayout) -> Tensor | None:
        if layout.adapters is None or int(layout.adapters.max()) < 0:
            return None
        found = row_adapters(layout)
        slots = self._accelerator.host_numbers(len(found), torch.int64)
        slots.copy_(torch.from_numpy(found))
        return self._accelerator.upload(slots)

    def rows_at(self, slots: Tensor) -> Tensor:
        return slots

    def add(self, x: Tensor, room: TritonRoom, out: Tensor, rows: Tensor) -> None:
        """Raises EngineError that names the tensor that does not fit."""
        (count, depth), (_, size, _) = x.shape, room.up.shape
        expect_lines("x", x, (count, room.down.shape[2]), room.down.dtype, like=room.down)
        expect_lines("out", out, (count, size), *_TYPES, like=x)
        expect("rows", rows, (count,), torch.int64, like=x)
        for first in range(0, count, _MOST_ROWS):  # bounds the memory between the two kernels
            some = slice(first, first + _MOST_ROWS)
            _add(x[some], room, out[some], rows[some], depth)


def _add(x: Tensor, room: TritonRoom, out: Tensor, rows: Tensor, depth: int) -> None:
    count, (_, width, _), (_, size, padded) = len(x), room.down.shape, room.up.shape
    tiles, stretches, ranks = -(-count // _TILE_ROWS), -(-depth // _STRETCH), room.ranks_at_once
    wide = x.device.type == "cpu"
    partial = torch.empty(stretches, count, width, dtype=torch.float32, device=x.device)
    _adapter_down[(tiles, width // ranks, stretches)](
        x, x.stride(0), rows, room.down, room.ranks, partial, count, depth, width, len(room.widths),
        MAX_RANK=padded, RANKS=ranks, STRETCH=_STRETCH, WIDE=wide, **EXACT,
    )  # fmt: skip
    _adapter_up[(tiles, len(room.blocks))](
        partial, rows, room.up, room.ranks, room.blocks, out, out.stride(0), count, size, width,
        len(room.widths), stretches, MAX_RANK=padded, RANKS=ranks, COLUMNS=_COLUMNS, WIDE=wide, **EXACT,
    )  # fmt: skip


def room_rank(max_rank: int) -> int:
    """Return the ranks that a room has memory for: a power of two, or whole programs."""
    if max_rank > _MOST_RANKS:
        return -(-max_rank // _MOST_RANKS) * _MOST_RANKS
    return max(_FEWEST_RANKS, next_power_of_2(max_rank))
