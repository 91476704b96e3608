"""The fastest way that is right is chosen, once for each device and version.

Planted bugs that these tests have caught: a wrong result chosen because it is fast; a file of another device read;
the margin left out; a way that fails ends the start; the reference's own result compared after a way has
overwritten it.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from faser.kernels.cuda.choices import Choices, GraphClock, Way, driver_version

ABOUT = {"device": "NVIDIA H200", "torch": "2.11"}


class GivenClock:
    """Says how long each way takes; counts what it was asked."""

    def __init__(self, seconds: Mapping[Way, float]) -> None:
        self._seconds = seconds
        self.asked = 0

    def seconds(self, work: Way) -> float:
        self.asked += 1
        return self._seconds[work]


def reference() -> torch.Tensor:
    return torch.tensor([1.0, 2.0, -4.0])


def near() -> torch.Tensor:
    return torch.tensor([1.0, 2.001, -4.0])


def wrong() -> torch.Tensor:
    return torch.tensor([1.0, 2.0, 4.0])


def nan() -> torch.Tensor:
    return torch.tensor([1.0, float("nan"), -4.0])


def short() -> torch.Tensor:
    return torch.tensor([1.0])


def failing() -> torch.Tensor:
    raise RuntimeError("no kernel image")


WAYS: dict[str, Way] = {"plain": reference, "fused": near}


@pytest.mark.parametrize(
    "plain_s, fused_s, chosen", [(1.0, 0.9, "fused"), (1.0, 0.98, "plain"), (1.0, 1.5, "plain")]
)
def test_another_way_than_the_reference_must_be_faster_by_a_margin(
    plain_s: float, fused_s: float, chosen: str
) -> None:
    clock = GivenClock({reference: plain_s, near: fused_s})
    assert Choices(clock).fastest("norm", WAYS, tolerance=0.01) == chosen


@pytest.mark.parametrize("way", [wrong, nan, short, failing])
def test_a_way_whose_result_is_wrong_or_missing_is_left_out_and_named(
    way: Way, caplog: pytest.LogCaptureFixture
) -> None:
    clock = GivenClock({reference: 1.0, way: 0.1, near: 0.5})
    with caplog.at_level(logging.WARNING, "faser"):
        assert Choices(clock).fastest("norm", WAYS | {"broken": way}, tolerance=0.01) == "fused"
    (message,) = [each.getMessage() for each in caplog.records]
    assert message.startswith("norm: broken is not used on this device: ")


def test_ways_are_compared_with_what_is_expected_where_the_reference_is_less_exact() -> None:
    """A way near the expected result is taken, one that makes the reference's errors is not."""
    clock = GivenClock({wrong: 1.0, reference: 0.5, near: 0.9})
    ways = {"rounded": wrong, "exact": reference}
    assert Choices(clock).fastest("norm", ways, tolerance=0.01, expected=near) == "exact"
    clock = GivenClock({reference: 1.0, wrong: 0.5})
    ways = {"rounded": reference, "same": reference, "other": wrong}
    assert Choices(clock).fastest("norm", ways, tolerance=0.01, expected=near) == "rounded"


def test_a_way_that_writes_where_the_reference_wrote_is_compared_with_what_was_there() -> None:
    held = torch.zeros(2)

    def first() -> torch.Tensor:
        return held.copy_(torch.tensor([1.0, 2.0]))

    def second() -> torch.Tensor:
        return held.copy_(torch.tensor([3.0, 4.0]))

    clock = GivenClock({first: 1.0, second: 0.1})
    assert Choices(clock).fastest("norm", {"first": first, "second": second}, tolerance=0.01) == "first"


def test_without_a_clock_the_reference_is_taken_and_nothing_runs() -> None:
    assert Choices().fastest("norm", {"plain": failing, "fused": failing}, tolerance=0.0) == "plain"


def test_an_error_of_the_reference_is_raised() -> None:
    clock = GivenClock({failing: 1.0, near: 0.1})
    with pytest.raises(RuntimeError, match="no kernel image"):
        Choices(clock).fastest("norm", {"plain": failing, "fused": near}, tolerance=0.01)


def test_a_second_start_on_the_same_device_measures_nothing(tmp_path: Path) -> None:
    path = tmp_path / "kernels" / "choices.json"
    clock = GivenClock({reference: 1.0, near: 0.5})
    assert Choices(clock, path, ABOUT).fastest("norm", WAYS, tolerance=0.01) == "fused"
    slow = GivenClock({reference: 1.0, near: 2.0})
    assert Choices(slow, path, ABOUT).fastest("norm", WAYS, tolerance=0.01) == "fused"
    assert slow.asked == 0
    assert Choices(slow, path, ABOUT).fastest("gate", WAYS, tolerance=0.01) == "plain"


def test_the_driver_is_the_kernel_modules(tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert driver_version(file) == ""
    file.write_text("580.159.04\n")
    assert driver_version(file) == "580.159.04"


@pytest.mark.parametrize("about", [ABOUT | {"device": "NVIDIA L4"}, ABOUT | {"torch": "2.12"}, {}])
def test_another_device_or_version_measures_again(tmp_path: Path, about: dict[str, str]) -> None:
    path = tmp_path / "choices.json"
    Choices(GivenClock({reference: 1.0, near: 0.5}), path, ABOUT).fastest("norm", WAYS, tolerance=0.01)
    clock = GivenClock({reference: 1.0, near: 2.0})
    assert Choices(clock, path, about).fastest("norm", WAYS, tolerance=0.01) == "plain"
    assert clock.asked > 0


def test_other_ways_than_those_compared_are_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "choices.json"
    clock = GivenClock({reference: 1.0, near: 0.5})
    assert Choices(clock, path, ABOUT).fastest("norm", WAYS, tolerance=0.01) == "fused"
    again = GivenClock({reference: 1.0, near: 0.5, reference_copy: 0.2})
    ways = WAYS | {"tuned": reference_copy}
    assert Choices(again, path, ABOUT).fastest("norm", ways, tolerance=0.01) == "tuned"


def reference_copy() -> torch.Tensor:
    return reference()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"about": 3}', '{"about": {}, "chosen": [1]}'])
def test_a_damaged_file_is_measured_over(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "choices.json"
    path.write_text(text)
    clock = GivenClock({reference: 1.0, near: 0.5})
    with caplog.at_level(logging.WARNING, "faser"):
        assert Choices(clock, path, {}).fastest("norm", WAYS, tolerance=0.01) == "fused"
    assert "kernels are measured again" in caplog.text or text == '{"about": 3}'
    assert Choices(GivenClock({}), path, {}).fastest("norm", WAYS, tolerance=0.01) == "fused"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_large_copy_takes_longer_than_a_small_one_on_a_device() -> None:
    clock = GraphClock(torch.device("cuda", 0))
    small, large = (torch.empty(size, device="cuda:0") for size in (1 << 10, 1 << 26))
    assert clock.seconds(lambda: small.add_(1)) < clock.seconds(lambda: large.add_(1))
