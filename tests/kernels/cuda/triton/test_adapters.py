"""Adapters by Triton: each row gets what its own adds. Oracle: float64, as in tests/kernels/test_adapters.py.

Planted bugs that these tests have caught: a stretch of inputs left out; the ranks of the first part for all;
the neighbour's rows.
"""

import pytest
import torch

from faser.kernels.cuda.triton.adapters import TritonAdapters, room_rank
from faser.kernels.interface.adapters import LowRank
from tests.kernels.cuda.fake_device import FakeAccelerator
from tests.kernels.test_adapters import PARTS, World, adapter, layout, random

SLOTS_OF_ROWS = [0, 1, 0, -1, 4, 2, 2, 3, 1, 0, 0, 2, -1, 1, 1, 0, 2, 2, 0]  # more than a tile


class _Kernels:
    """The part of a backend that a World uses."""

    def __init__(self) -> None:
        self.adapters = TritonAdapters(FakeAccelerator())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("depth", [70, 1100])
def test_each_row_gets_what_its_adapter_adds(dtype: torch.dtype, tolerance: float, depth: int) -> None:
    world, slots = World.of(_Kernels(), dtype, depth), SLOTS_OF_ROWS
    x, out = random(len(slots), depth, seed=1).to(dtype), random(len(slots), sum(PARTS), seed=2).to(dtype)
    found = world.added(x, out, layout(slots))
    torch.testing.assert_close(found.double(), world.wanted(x, out, slots), rtol=2.0**-7, atol=tolerance)
    untouched = [row for row, slot in enumerate(slots) if slot not in (0, 1, 2)]
    assert torch.equal(found[untouched], out[untouched])
    for row in (0, 5, 8, 16):
        alone = world.added(x[row : row + 1], out[row : row + 1], layout([slots[row]]))
        assert torch.equal(alone[0], found[row]), "bits depend on other rows"


def test_a_slot_keeps_nothing_of_a_larger_adapter() -> None:
    """Ranks above 64 take several programs each."""
    kernels, dtype = TritonAdapters(FakeAccelerator()), torch.float32
    room = kernels.room(PARTS, 70, dtype, slots=2, max_rank=100)
    assert room.up.shape[2] == 128
    x, out = random(3, 70, seed=1), torch.zeros(3, sum(PARTS))
    for ranks in ((100, 70, 100), (2, None, 65)):
        parts = adapter(ranks, 7, dtype)
        kernels.set(room, 1, kernels.pack(room, parts))
        rows, found, wanted = kernels.rows(layout([1, -1, 1])), out.clone(), out.clone().double()
        assert rows is not None
        kernels.add(x, room, found, rows)
        first = 0
        for width, part in zip(PARTS, parts, strict=True):
            if isinstance(part, LowRank):
                product = part.up.double() @ part.down.double()
                wanted[::2, first : first + width] += x[::2].double() @ product.T
            first += width
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-3)


def test_rooms_hold_whole_programs_of_ranks() -> None:
    assert [room_rank(each) for each in (1, 16, 17, 64, 65, 256)] == [16, 16, 32, 64, 128, 256]
