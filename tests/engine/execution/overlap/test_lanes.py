"""Which lanes an engine gets, from its settings and its device, and what replaces those that cannot run it."""

import logging
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from faser.config.engine import EngineConfig
from faser.engine.execution.overlap.lanes import (
    DeviceLanes,
    Lanes,
    device_lanes_of,
    make_gpu_partition,
    make_lanes,
    make_on_lanes,
    make_partition,
)
from faser.engine.execution.overlap.partition import Partition, Serial, core_numbers
from faser.errors import ConfigError
from faser.kernels.cuda.lanes import GreenContextError, GreenDriver
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.shapes import LaneError
from faser.kernels.torch_backend import TorchBackend
from tests.engine.execution.overlap.alternating_partition import AlternatingPartition
from tests.kernels.cuda.fake_device import FakeAccelerator
from tests.kernels.cuda.fake_green_driver import FakeGreenDriver
from tests.kernels.cuda.fake_lane_device import FakeLaneDevice


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
    return Lanes(partition=partition, target=TorchBackend(), draft=TorchBackend())


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


DRAFT_MODEL = {"method": "draft_model", "model": "beside"}
USABLE = sorted(os.sched_getaffinity(0))
two_cores = pytest.mark.skipif(len(USABLE) < 2, reason="needs two cores")
SHARES = (12 / 132, 20 / 132, 36 / 132)


def on_gpu() -> Backend:
    """A backend whose device is named cuda:0; no GPU is used."""
    backend = TorchBackend()
    backend.device = torch.device("cuda", 0)
    return backend


def config_of(device: str = "cuda:0", **settings: Any) -> EngineConfig:
    return EngineConfig(
        device=device, backend="torch", speculative_config=settings.pop("speculative", DRAFT_MODEL), **settings
    )


class FakeDivider:
    """A DivideGpu that keeps its calls. refusal: why it returns another partition."""

    def __init__(self, refusal: str | None = None) -> None:
        self.asked: list[tuple[str, torch.device]] = []
        self._refusal = refusal

    def __call__(self, name: str, device: torch.device) -> tuple[Partition, str | None]:
        self.asked.append((name, device))
        return AlternatingPartition(FakeAccelerator(), SHARES), self._refusal


def test_a_gpu_is_divided_as_the_setting_says() -> None:
    for name in ("auto", "sm", "streams"):
        divide = FakeDivider()
        target, draft = on_gpu(), on_gpu()
        lanes = make_lanes(config_of(spec_partition=name, spec_overlap="auto"), target, draft, divide=divide)
        assert lanes is not None
        assert (lanes.target, lanes.draft) == (target, draft)
        assert divide.asked == [(name, torch.device("cuda", 0))]


def test_a_fallback_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="faser.engine"):
        config, divide = config_of(spec_overlap="auto"), FakeDivider("cuGreenCtxCreate: not permitted")
        lanes = make_lanes(config, on_gpu(), on_gpu(), divide=divide)
    assert lanes is not None
    assert lanes.fallback == "cuGreenCtxCreate: not permitted"
    assert lanes.fallback in caplog.text


def test_drafting_takes_turns_unless_asked_to_overlap() -> None:
    divide = FakeDivider()
    assert make_lanes(config_of(), on_gpu(), on_gpu(), divide=divide) is None
    assert make_lanes(config_of("cpu", num_threads=2), TorchBackend(), TorchBackend(), divide=divide) is None
    assert divide.asked == []


def test_nothing_is_divided_where_nothing_can_overlap() -> None:
    divide = FakeDivider()
    none_of_these: list[tuple[dict[str, Any], Backend | None]] = [
        ({"spec_overlap": "off"}, on_gpu()),
        ({"spec_partition": "serial"}, on_gpu()),
        ({}, None),
        ({"speculative": DRAFT_MODEL | {"draft_sample_method": "probabilistic"}}, on_gpu()),
        ({"speculative_policy": "off"}, on_gpu()),
    ]
    for settings, draft in none_of_these:
        assert make_lanes(config_of(**{"spec_overlap": "auto"} | settings), on_gpu(), draft, divide=divide) is None
    assert divide.asked == []


@pytest.mark.parametrize(
    "settings, reason",
    [
        ({"spec_partition": "serial"}, "spec_partition is serial"),
        ({"speculative_policy": "off"}, "the policy is off"),
        ({"speculative": DRAFT_MODEL | {"draft_sample_method": "probabilistic"}}, "only point masses"),
    ],
)
def test_overlap_that_is_demanded_and_impossible_is_refused_with_the_reason(
    settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_lanes(config_of(spec_overlap="on", **settings), on_gpu(), on_gpu(), divide=FakeDivider())


def test_a_partition_for_another_kind_of_device_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="spec_partition is cores, which divides a cpu device; device is cuda:0"):
        config_of(spec_partition="cores")
    for name in ("sm", "streams"):
        with pytest.raises(ConfigError, match=f"spec_partition is {name}, which divides a cuda device"):
            config_of("cpu", spec_partition=name)


def test_on_a_cpu_the_setting_divides_cores() -> None:
    divide = FakeDivider()
    alone = config_of("cpu", num_threads=1, spec_overlap="auto")
    one = make_lanes(alone, TorchBackend(), TorchBackend(), divide=divide)
    assert one is None
    with pytest.raises(ConfigError, match="two lanes take two cores"):
        make_lanes(config_of("cpu", num_threads=1, spec_overlap="on"), TorchBackend(), TorchBackend())
    assert divide.asked == []


def test_device_lanes_are_listed_for_every_share_and_the_share_stays() -> None:
    partition = AlternatingPartition(FakeAccelerator(), SHARES)
    partition.resize(SHARES[1])
    lanes = device_lanes_of(partition)
    assert [each.share for each in lanes.draft] == list(SHARES)
    assert [each.share for each in lanes.verify] == [1 - each for each in SHARES]
    assert partition.share == SHARES[1]
    assert device_lanes_of(Serial()) == DeviceLanes()


def test_the_factory_knows_its_partitions_and_refuses_the_others_by_name() -> None:
    assert make_partition("serial").name == "serial"
    assert make_partition("auto", (USABLE[0],)).name == "serial"
    for name in ("streams", "halves"):
        with pytest.raises(ConfigError, match=f"partition is {name}; on a CPU it must be auto, serial or cores"):
            make_partition(name)


@two_cores
def test_where_there_are_two_cores_they_are_divided() -> None:
    assert make_partition("auto").name == "cores"
    assert core_numbers(1) == (USABLE[0],)
    assert set(core_numbers()) <= set(USABLE)


def test_a_driver_that_cannot_be_opened_is_a_refusal_too() -> None:
    def missing() -> GreenDriver:
        raise GreenContextError("dividing a GPU takes the package cuda-bindings")

    partition, refused = make_gpu_partition("sm", FakeLaneDevice(), missing)
    assert (partition.name, refused) == ("streams", "dividing a GPU takes the package cuda-bindings")


def test_the_factory_knows_what_divides_a_gpu_and_refuses_the_others_by_name() -> None:
    def unwanted() -> GreenDriver:
        raise AssertionError("this partition needs no groups")

    device = FakeLaneDevice()
    assert make_gpu_partition("auto", device, FakeGreenDriver)[0].name == "sm"
    for name in ("serial", "streams"):
        partition, refused = make_gpu_partition(name, device, unwanted)
        assert (partition.name, refused) == (name, None)
    for name in ("cores", "halves"):
        with pytest.raises(ConfigError, match=f"partition is {name}; on a GPU it must be auto, sm, streams or"):
            make_gpu_partition(name, device, unwanted)
