"""Adapters of every backend. Oracle: the weights W + B A, in float64, of each row by itself.

Planted bugs that these tests have caught: the adapter of the neighbour row; the columns of a part one panel off;
inputs of the second part read from those of the first.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest
import torch
from torch import Tensor

from faser.errors import ConfigError
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import library_path
from faser.kernels.interface.adapters import AdapterRoom, Adapters, LowRank, adapter_runs
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.shapes import RowLayout
from faser.kernels.torch_backend import TorchBackend

PARTS, DEPTH, SLOTS = (48, 20, 36), 70, 5
RANKS: tuple[tuple[int | None, ...], ...] = ((8, 8, 8), (1, None, 3), (None, None, 16), (None, None, None))


@pytest.fixture(params=["torch", "native"])
def backend(request: pytest.FixtureRequest, kernel_cache: Path) -> Backend:
    if request.param == "torch":
        return TorchBackend()
    return NativeBackend(library_path(cache_dir=kernel_cache), num_threads=2)


def layout(adapters: list[int], counts: list[int] | None = None) -> RowLayout:
    """Sequences with these adapters and numbers of rows."""
    lengths = torch.tensor(counts or [1] * len(adapters))
    return RowLayout(
        query_start=torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).int(),
        seq_len=lengths.int(),
        positions=torch.cat([torch.arange(each) for each in lengths]).int(),
        block_table=torch.zeros(len(adapters), 1, dtype=torch.int32),
        adapters=torch.tensor(adapters, dtype=torch.int32),
    )


def random(*size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def adapter(
    ranks: tuple[int | None, ...], seed: int, dtype: torch.dtype, depth: int = DEPTH
) -> tuple[LowRank | None, ...]:
    return tuple(
        None
        if rank is None
        else LowRank(
            down=(random(rank, depth, seed=seed + 10 * part) * depth**-0.5).to(dtype),
            up=(random(PARTS[part], rank, seed=seed + 10 * part + 1) * 2).to(dtype),
        )
        for part, rank in enumerate(ranks)
    )


class HasAdapters(Protocol):
    """A backend, as far as these tests know it."""

    @property
    def adapters(self) -> Adapters: ...


@dataclass
class World:
    """A room with adapters in its slots 0 … 3; slot 4 is empty."""

    backend: HasAdapters
    room: AdapterRoom
    adapters: list[tuple[LowRank | None, ...]]

    @classmethod
    def of(cls, backend: HasAdapters, dtype: torch.dtype, depth: int = DEPTH) -> "World":
        kernels = backend.adapters
        room = kernels.room(PARTS, depth, dtype, slots=SLOTS, max_rank=16)
        adapters = [adapter(ranks, 100 * slot, dtype, depth) for slot, ranks in enumerate(RANKS)]
        for slot, each in enumerate(adapters):
            kernels.set(room, slot, kernels.pack(room, each))
        return cls(backend, room, adapters)

    def added(self, x: Tensor, out: Tensor, rows: RowLayout) -> Tensor:
        found, of_rows = out.clone(), self.backend.adapters.rows(rows)
        assert of_rows is not None
        self.backend.adapters.add(x, self.room, found, of_rows)
        return found

    def wanted(self, x: Tensor, out: Tensor, slots: list[int]) -> Tensor:
        """In float64, but for the one rounding between the products."""
        found = out.double()
        for row, slot in enumerate(slots):
            first = 0
            for width, part in zip(PARTS, self.adapters[slot] if 0 <= slot < 4 else (None,) * 3, strict=True):
                if part is not None:
                    inner = (part.down.double() @ x[row].double()).to(x.dtype).double()
                    found[row, first : first + width] += part.up.double() @ inner
                first += width
        return found


@pytest.mark.parametrize("counts", [[1] * 9, [3, 1, 2, 5, 1, 1, 120, 1, 7]])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_each_row_gets_what_its_adapter_adds(
    dtype: torch.dtype, tolerance: float, counts: list[int], backend: Backend
) -> None:
    """Adapters lie apart and side by side; some rows have none, an empty slot, or one that changes nothing."""
    world, slots = World.of(backend, dtype), [0, 1, 0, -1, 4, 2, 2, 3, 1]
    of_rows = [slot for slot, count in zip(slots, counts, strict=True) for _ in range(count)]
    x, out = random(len(of_rows), DEPTH, seed=1).to(dtype), random(len(of_rows), sum(PARTS), seed=2).to(dtype)
    found, wanted = world.added(x, out, layout(slots, counts)), world.wanted(x, out, of_rows)
    torch.testing.assert_close(found.double(), wanted, rtol=2.0**-7, atol=tolerance)
    untouched = [row for row, slot in enumerate(of_rows) if slot not in (0, 1, 2)]
    assert torch.equal(found[untouched], out[untouched])
    assert not torch.equal(found, out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_a_row_do_not_depend_on_other_rows(dtype: torch.dtype, kernel_cache: Path) -> None:
    native = NativeBackend(library_path(cache_dir=kernel_cache), num_threads=2)
    world, slots = World.of(native, dtype), [0, 1, 0, -1, 2, 2, 1, 0, 0, 4, 1] * 3
    x, out = random(len(slots), DEPTH, seed=1).to(dtype), random(len(slots), sum(PARTS), seed=2).to(dtype)
    together = world.added(x, out, layout(slots))
    for row, slot in enumerate(slots):
        if slot >= 0:
            alone = world.added(x[row : row + 1], out[row : row + 1], layout([slot]))
            assert torch.equal(alone[0], together[row])


def test_a_slot_is_emptied_and_filled_again(backend: Backend) -> None:
    world, kernels = World.of(backend, torch.float32), backend.adapters
    x, out, rows = random(2, DEPTH, seed=1), random(2, sum(PARTS), seed=2), layout([1, 0])
    before = world.added(x, out, rows)
    kernels.set(world.room, 1, None)
    assert torch.equal(world.added(x, out, rows)[0], out[0])
    kernels.set(world.room, 1, kernels.pack(world.room, world.adapters[1]))
    assert torch.equal(world.added(x, out, rows), before)


def test_a_rank_above_the_limit_is_refused_by_both_numbers(backend: Backend) -> None:
    world = World.of(backend, torch.float32)
    with pytest.raises(ConfigError, match="rank 17; --max-lora-rank is 16"):
        backend.adapters.pack(world.room, adapter((17, None, None), 5, torch.float32))


def test_rows_without_adapters_have_nothing_to_add(backend: Backend) -> None:
    assert backend.adapters.rows(layout([-1, -1])) is None


def test_runs_are_rows_of_neighbours_with_one_adapter() -> None:
    assert adapter_runs(layout([2, 2, -1, 0, 2], [1, 3, 2, 1, 2])) == [(2, 0, 4), (0, 6, 7), (2, 7, 9)]
