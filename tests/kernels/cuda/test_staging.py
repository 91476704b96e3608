"""Numbers on their way between host and device, the device emulated: it says when a buffer is used too early.

Bugs these tests have been seen to catch: one buffer instead of two that take turns, a
buffer filled without a wait, values handed out that the next fetch overwrites, a fence marked before the copy,
numbers compared with what was sent two sends ago, values of one shape read at another one's place.
"""

import numpy as np
import pytest
import torch

from faser.kernels.cuda.staging import Fetcher, StagedNumbers, Staging
from tests.kernels.cuda.fake_device import FakeAccelerator


def test_the_device_has_what_was_sent_last() -> None:
    stage = StagedNumbers(FakeAccelerator(), 3, torch.int64)
    for value in range(5):
        stage.host()[:] = value
        stage.send()
        assert stage.device.tolist() == [value] * 3


def test_numbers_are_not_overwritten_while_they_may_be_copied() -> None:
    accelerator = FakeAccelerator()
    stage = StagedNumbers(accelerator, 3, torch.float32)
    for value in range(6):
        stage.host()[:] = value
        stage.send()
    accelerator.wait()  # which compares every copy with what it was given
    assert stage.device.tolist() == [5.0] * 3


def test_the_next_step_is_filled_without_waiting_for_this_one() -> None:
    accelerator = FakeAccelerator()
    stage = StagedNumbers(accelerator, 3, torch.int32)
    for value in (1, 2):
        stage.host()[:] = value
        stage.send()
    assert accelerator.done == 0
    stage.host()
    assert accelerator.done == 1


def test_a_place_that_is_asked_for_twice_is_the_same() -> None:
    stage = StagedNumbers(FakeAccelerator(), 2, torch.int64)
    stage.host()[0] = 4
    stage.host()[1] = 5
    stage.send()
    assert stage.device.tolist() == [4, 5]


def test_a_place_on_the_device_stays_where_it_is() -> None:
    stage = StagedNumbers(FakeAccelerator(), 2, torch.int64)
    place = stage.device.data_ptr()
    for _ in range(3):
        stage.host()[:] = 0
        stage.send()
        assert stage.device.data_ptr() == place


def test_what_the_device_has_is_not_sent_again() -> None:
    """Oracle: everything is sent. Zeros are there from the beginning; bits count, not values."""
    accelerator = FakeAccelerator()
    stage = StagedNumbers(accelerator, 2, torch.float32)
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
        stage.host()[:] = values
        stage.send()
        assert accelerator.given - given == sends
        assert torch.equal(stage.device.view(torch.int32), torch.tensor(values).view(torch.int32))
    accelerator.wait()


def test_a_part_can_be_sent() -> None:
    """What is behind it stays as it was sent before."""
    accelerator = FakeAccelerator()
    staging = Staging(accelerator, 4, torch.int32)
    for value, count in ((1, None), (2, 3), (3, 1), (4, 0)):
        staging.hosts[staging.claim()].fill_(value)
        staging.send(count)
    assert staging.device.tolist() == [3, 2, 2, 1]
    accelerator.wait()


def test_fetched_values_are_those_of_the_moment_and_stay() -> None:
    fetcher = Fetcher(FakeAccelerator())
    tokens, leads = torch.tensor([3, 1, 2]), torch.tensor([[0.5], [2.0]])
    first = fetcher.fetch((tokens, leads))
    tokens.fill_(9)
    found = first.wait()
    fetcher.fetch((tokens, leads)).wait()
    assert found[0].tolist() == [3, 1, 2]
    assert found[0].dtype == np.int64
    assert found[1].tolist() == [[0.5], [2.0]]
    assert first.wait()[0] is found[0]


@pytest.mark.parametrize("values", [(), (torch.zeros(0, dtype=torch.int64),)])
def test_nothing_can_be_fetched(values: tuple[torch.Tensor, ...]) -> None:
    found = Fetcher(FakeAccelerator()).fetch(values).wait()
    assert [each.tolist() for each in found] == [each.tolist() for each in values]


def test_steps_share_buffers() -> None:
    """Two fetches at a time, as with one step ahead: no pinned memory after the first ones."""
    accelerator = FakeAccelerator()
    fetcher = Fetcher(accelerator)
    tokens = torch.arange(30)
    pending = fetcher.fetch((tokens,))
    following = fetcher.fetch((tokens,))
    used = accelerator.pinned_bytes
    for count in range(1, 30):
        assert pending.wait()[0].tolist() == tokens[: len(pending.wait()[0])].tolist()
        pending, following = following, fetcher.fetch((tokens[:count],))
    assert accelerator.pinned_bytes == used


def test_a_slice_of_a_table_can_be_fetched() -> None:
    table = torch.arange(12).view(3, 4)
    (found,) = Fetcher(FakeAccelerator()).fetch((table[:, 1:3],)).wait()
    assert found.tolist() == [[1, 2], [5, 6], [9, 10]]
