"""Staging buffers and readbacks on an emulated device, which fails when a pinned buffer is used too early.

Bugs that these tests have caught: one pinned buffer instead of two that take turns, a
buffer filled without a wait, values handed out that the next readback overwrites, an event recorded before the
copy, numbers compared with what was sent two sends ago, values of one shape read from another's slice.
"""

import numpy as np
import pytest
import torch

from faser.kernels.cuda.staging import DoubleBuffer, PinnedStagingBuffer, ReadbackPool
from tests.kernels.cuda.fake_device import FakeAccelerator


def test_a_send_of_the_same_numbers_is_not_skipped_once_the_device_has_written_to_them() -> None:
    accelerator = FakeAccelerator()
    buffer = PinnedStagingBuffer(accelerator, 2, torch.int64)
    for changes in (False, True, False):
        buffer.host()[:] = (3, 4)
        if changes:
            buffer.device[0] = 9
            buffer.will_change()
        buffer.send()
        assert buffer.device.tolist() == [3, 4]
    before = accelerator.given
    buffer.host()[:] = (3, 4)
    buffer.send()
    assert accelerator.given == before


def test_the_device_has_what_was_sent_last() -> None:
    staging = PinnedStagingBuffer(FakeAccelerator(), 3, torch.int64)
    for value in range(5):
        staging.host()[:] = value
        staging.send()
        assert staging.device.tolist() == [value] * 3


def test_numbers_are_not_overwritten_while_they_may_be_copied() -> None:
    accelerator = FakeAccelerator()
    staging = PinnedStagingBuffer(accelerator, 3, torch.float32)
    for value in range(6):
        staging.host()[:] = value
        staging.send()
    accelerator.wait()  # which compares every copy with what it was given
    assert staging.device.tolist() == [5.0] * 3


def test_the_next_step_is_filled_without_waiting_for_this_one() -> None:
    accelerator = FakeAccelerator()
    staging = PinnedStagingBuffer(accelerator, 3, torch.int32)
    for value in (1, 2):
        staging.host()[:] = value
        staging.send()
    assert accelerator.done == 0
    staging.host()
    assert accelerator.done == 1


def test_the_host_buffer_is_the_same_until_it_is_sent() -> None:
    staging = PinnedStagingBuffer(FakeAccelerator(), 2, torch.int64)
    staging.host()[0] = 4
    staging.host()[1] = 5
    staging.send()
    assert staging.device.tolist() == [4, 5]


def test_the_address_on_the_device_stays() -> None:
    staging = PinnedStagingBuffer(FakeAccelerator(), 2, torch.int64)
    address = staging.device.data_ptr()
    for _ in range(3):
        staging.host()[:] = 0
        staging.send()
        assert staging.device.data_ptr() == address


def test_what_the_device_has_is_not_sent_again() -> None:
    """Oracle: everything is sent. Zeros are there from the beginning; bits count, not values."""
    accelerator = FakeAccelerator()
    staging = PinnedStagingBuffer(accelerator, 2, torch.float32)
    for values, sends in (
        ([0.0, 0.0], 0),
        ([1.0, 0.0], 1),
        ([1.0, 0.0], 0),
        ([1.0, -0.0], 1),
        ([1.0, 0.0], 1),
        ([2.0, 0.0], 1),
        ([1.0, 0.0], 1),
    ):
        given = accelerator.given
        staging.host()[:] = values
        staging.send()
        assert accelerator.given - given == sends
        assert torch.equal(staging.device.view(torch.int32), torch.tensor(values).view(torch.int32))
    accelerator.wait()


def test_a_part_can_be_sent() -> None:
    """The rest stays as it was sent before."""
    accelerator = FakeAccelerator()
    staging = DoubleBuffer(accelerator, 4, torch.int32)
    for value, count in ((1, None), (2, 3), (3, 1), (4, 0)):
        staging.hosts[staging.claim()].fill_(value)
        staging.send(count)
    assert staging.device.tolist() == [3, 2, 2, 1]
    accelerator.wait()


def test_values_read_back_are_those_of_the_moment_and_stay() -> None:
    readbacks = ReadbackPool(FakeAccelerator())
    tokens, leads = torch.tensor([3, 1, 2]), torch.tensor([[0.5], [2.0]])
    first = readbacks.read_back((tokens, leads))
    tokens.fill_(9)
    found = first.wait()
    readbacks.read_back((tokens, leads)).wait()
    assert found[0].tolist() == [3, 1, 2]
    assert found[0].dtype == np.int64
    assert found[1].tolist() == [[0.5], [2.0]]
    assert first.wait()[0] is found[0]


@pytest.mark.parametrize("values", [(), (torch.zeros(0, dtype=torch.int64),)])
def test_values_without_elements_can_be_read_back(values: tuple[torch.Tensor, ...]) -> None:
    found = ReadbackPool(FakeAccelerator()).read_back(values).wait()
    assert [each.tolist() for each in found] == [each.tolist() for each in values]


def test_steps_share_buffers() -> None:
    """Two readbacks at a time, as in asynchronous scheduling: no pinned memory after the first ones."""
    accelerator = FakeAccelerator()
    readbacks = ReadbackPool(accelerator)
    tokens = torch.arange(30)
    pending = readbacks.read_back((tokens,))
    following = readbacks.read_back((tokens,))
    used = accelerator.pinned_bytes
    for count in range(1, 30):
        assert pending.wait()[0].tolist() == tokens[: len(pending.wait()[0])].tolist()
        pending, following = following, readbacks.read_back((tokens[:count],))
    assert accelerator.pinned_bytes == used


def test_a_slice_of_a_table_can_be_read_back() -> None:
    table = torch.arange(12).view(3, 4)
    (found,) = ReadbackPool(FakeAccelerator()).read_back((table[:, 1:3],)).wait()
    assert found.tolist() == [[1, 2], [5, 6], [9, 10]]
