"""The faults that the emulated device finds, on which the tests of CUDA graphs rely."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.kernels.cuda.fake_device import FakeAccelerator


def replay_of(work: Callable[[], None]) -> Callable[[], None]:
    return FakeAccelerator().graph_recorder().capture(work).replay


def test_a_replay_computes_anew_from_what_is_there() -> None:
    x, out, weight = torch.zeros(2, 3), torch.zeros(2, 4), torch.randn(3, 4)

    def work() -> None:
        wide = (x * 2).contiguous()[:, :3]
        torch.mm(wide, weight, out=out)
        out[1].add_(wide.sum())

    replay = replay_of(work)
    for _ in range(3):
        x.normal_()
        wanted = 2 * x @ weight
        wanted[1] += 2 * x.sum()
        replay()
        torch.testing.assert_close(out, wanted)


def test_what_is_allocated_within_belongs_to_the_graph() -> None:
    x = torch.zeros(4)
    made: list[Tensor] = []
    replay = replay_of(lambda: made.append(x + 1))
    x.fill_(5)
    replay()
    assert made[-1].tolist() == [6] * 4


def test_a_graph_keeps_the_hosts_numbers_of_its_capture() -> None:
    out, numbers = torch.zeros(1), [1.0]

    def work() -> None:
        out.fill_(numbers[0])

    replay = replay_of(work)
    numbers[0] = 2.0
    replay()
    assert out.item() == 1.0


def test_a_tensor_that_is_replaced_is_not_seen() -> None:
    holder, out = [torch.ones(2)], torch.zeros(2)

    def work() -> None:
        out.copy_(holder[0])

    replay = replay_of(work)
    holder[0] = torch.full((2,), 7.0)
    replay()
    assert out.tolist() == [1, 1]


def test_kernels_that_are_not_torchs_are_replayed_as_one_call() -> None:
    accelerator = FakeAccelerator()
    x, out = torch.zeros(2), torch.zeros(2)

    def kernel() -> None:
        out.copy_(torch.tensor(x.tolist()) + 1)

    graph = accelerator.graph_recorder().capture(lambda: accelerator.launch(kernel))
    x.fill_(3)
    graph.replay()
    assert len(graph.calls) == 1
    assert out.tolist() == [4, 4]


@pytest.mark.parametrize(
    "work, problem",
    [
        (lambda x: x.sum().item(), "item within"),
        (lambda x: x.tolist(), "tolist within"),
        (lambda x: x.numpy(), "numpy within"),
        (lambda x: bool(x.any()), "__bool__ within"),
        (lambda x: x.cpu(), "cpu within"),
        (lambda _: torch.tensor([1.0]), "tensor within"),
        (lambda x: x.nonzero(), "nonzero waits"),
        (lambda x: x[x > 0], "index by a mask"),
        (lambda x: torch.masked_select(x, x > 0), "masked_select waits"),
    ],
)
def test_what_waits_for_the_device_fails_within_a_capture(work: Callable[[Tensor], object], problem: str) -> None:
    x = torch.ones(3)

    def forgetting() -> None:
        work(x)

    with pytest.raises(AssertionError, match=problem):
        replay_of(forgetting)


def test_waits_and_copies_from_the_host_fail_within_a_capture() -> None:
    accelerator = FakeAccelerator()
    host, event = accelerator.host_numbers(2), accelerator.event()
    runs: list[int] = []

    def later(work: Callable[[], object]) -> Callable[[], None]:
        """Run the work only in the capture, not in the warm-ups."""

        def run() -> None:
            runs.append(0)
            if len(runs) > 2:
                work()

        return run

    place = torch.zeros(2, dtype=torch.int32)
    for work, problem in (
        (accelerator.wait, "the host waits within"),
        (event.synchronize, "the host waits within"),
        (lambda: accelerator.transfer(host, place), "copied from the host within"),
        (lambda: accelerator.transfer(place, host), "the host gets values within"),
        (lambda: accelerator.host_numbers(1), "pinned memory is allocated within"),
    ):
        runs.clear()
        with pytest.raises(AssertionError, match=problem):
            accelerator.graph_recorder().capture(later(work))
        assert accelerator.tape is None


def test_pinned_memory_that_is_overwritten_too_early_is_found() -> None:
    accelerator = FakeAccelerator()
    host, event = accelerator.host_numbers(2).fill_(1), accelerator.event()
    accelerator.transfer(host, torch.zeros(2, dtype=torch.int32))
    event.record()
    host.fill_(2)
    with pytest.raises(AssertionError, match="written to while the device was copying"):
        event.synchronize()


def test_what_comes_from_the_device_is_there_after_a_wait() -> None:
    accelerator = FakeAccelerator()
    host, event, place = accelerator.host_numbers(2), accelerator.event(), torch.ones(2, dtype=torch.int32)
    accelerator.transfer(place, host)
    place.fill_(9)
    assert host.tolist() != [1, 1]
    event.record()
    event.synchronize()
    assert host.tolist() == [1, 1]


def test_a_transfer_between_unpinned_memory_is_refused() -> None:
    with pytest.raises(AssertionError, match="waits for the device"):
        FakeAccelerator().transfer(torch.ones(2), torch.zeros(2))
