"""Arrays reach the device through pinned buffers, which are not filled again before they were copied.

Bugs these tests have been seen to catch: arrays that begin at the same place or come in another order, numbers of
other arrays at the end, a buffer for every step, a buffer that is not sent.
"""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from faser.engine.execution.runner.staged_numbers import StagedNumbers
from faser.kernels.torch_backend import TorchBackend
from tests.kernels.cuda.fake_device import FakeAccelerator
from tests.kernels.cuda.fake_graph import fake_backend


def arrays(count: int, seed: int) -> list[NDArray[np.int64]]:
    return [
        np.random.default_rng(seed + at).integers(0, 99, length) for at, length in enumerate((count, 3, count))
    ]


@pytest.mark.parametrize("count", [0, 1, 64, 70])
def test_arrays_arrive_apart(count: int) -> None:
    staged = StagedNumbers(fake_backend())
    for seed in range(3):
        wanted = arrays(count, seed)
        found = staged.send(*wanted)
        assert [each.tolist() for each in found] == [each.tolist() for each in wanted]
    (nothing,) = staged.send(np.zeros(0, dtype=np.int64))
    assert len(nothing) == 0


def test_no_buffer_is_filled_while_it_may_be_copied_and_none_is_made_in_later_steps() -> None:
    accelerator = FakeAccelerator()
    staged = StagedNumbers(fake_backend(accelerator))
    addresses = {staged.send(*arrays(5, seed))[0].data_ptr() for seed in range(6)}
    accelerator.wait()  # which compares every copy with what it was given
    assert len(addresses) == 1


def test_a_device_without_pinned_memory_gets_plain_copies() -> None:
    wanted = arrays(4, 0)
    found = StagedNumbers(TorchBackend()).send(*wanted)
    assert [each.tolist() for each in found] == [each.tolist() for each in wanted]
    assert all(each.dtype is torch.int64 for each in found)
