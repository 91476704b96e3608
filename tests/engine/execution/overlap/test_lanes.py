"""Lanes whose processors cannot run the models are replaced by others, once."""

from collections.abc import Callable

import pytest

from faser.engine.execution.overlap.lanes import DeviceLanes, Lanes, make_on_lanes
from faser.kernels.interface.shapes import LaneError
from faser.kernels.torch_backend import TorchBackend
from tests.engine.execution.overlap.alternating_partition import AlternatingPartition
from tests.kernels.cuda.fake_device import FakeAccelerator


class Closable(AlternatingPartition):
    """closed: whether it is."""

    def __init__(self, share: float) -> None:
        super().__init__(FakeAccelerator(), (share,))
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Maker:
    """Fails at first. shares: of the draft lanes for which something was to be made."""

    def __init__(self, *, fails: int) -> None:
        self.shares: list[float] = []
        self._fails = fails

    def __call__(self, on: DeviceLanes) -> str:
        self.shares += [each.share for each in on.draft]
        if len(self.shares) <= self._fails:
            raise LaneError(f"no clusters on {self.shares[-1]:g}")
        return "runners"


def lanes_of(partition: Closable) -> Lanes:
    return Lanes(partition=partition, target=TorchBackend(), draft=None)


def test_lanes_that_can_run_the_models_stay() -> None:
    lanes, make = lanes_of(Closable(0.25)), Maker(fails=0)
    assert make_on_lanes(lanes, make, None) == (lanes, "runners")
    assert make.shares == [0.25]


def test_lanes_that_cannot_run_the_models_are_replaced_and_the_reason_is_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Bugs seen caught: the first partition left open; the second one made before the first is closed."""
    first, second, make = Closable(0.25), Closable(0.5), Maker(fails=1)

    def otherwise() -> Closable:
        assert first.closed
        return second

    found, made = make_on_lanes(lanes_of(first), make, otherwise)
    assert (found.partition, found.fallback, made) == (second, "no clusters on 0.25", "runners")
    assert make.shares == [0.25, 0.5]
    assert not second.closed
    assert "no clusters on 0.25" in caplog.text


@pytest.mark.parametrize("otherwise, shares", [(None, [0.25]), (lambda: Closable(0.5), [0.25, 0.5])])
def test_where_no_lanes_can_run_the_models_the_start_fails(
    otherwise: Callable[[], Closable] | None, shares: list[float]
) -> None:
    make = Maker(fails=3)
    with pytest.raises(LaneError, match=f"no clusters on {shares[-1]:g}"):
        make_on_lanes(lanes_of(Closable(0.25)), make, otherwise)
    assert make.shares == shares
