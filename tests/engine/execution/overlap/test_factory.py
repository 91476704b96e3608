"""Which lanes an engine gets, from its settings and its device. Nothing is divided here: partitions are fakes."""

import logging
from typing import Any

import pytest
import torch

from faser.config.engine import EngineConfig
from faser.engine.execution.overlap.factory import LanePlaces, make_lanes, places_of
from faser.engine.execution.overlap.partition import Partition, Serial
from faser.errors import ConfigError
from faser.kernels.interface.backend import Backend
from faser.kernels.torch.backend import TorchBackend
from tests.engine.execution.overlap.taking_turns import TakingTurns
from tests.kernels.cuda.fake_device import FakeAccelerator

DRAFT_MODEL = {"method": "draft_model", "model": "beside"}
SHARES = (12 / 132, 20 / 132, 36 / 132)


def on_gpu() -> Backend:
    """Of such a device only the name is looked at."""
    backend = TorchBackend()
    backend.device = torch.device("cuda", 0)
    return backend


def config_of(device: str = "cuda:0", **settings: Any) -> EngineConfig:
    return EngineConfig(
        device=device, backend="torch", speculative_config=settings.pop("speculative", DRAFT_MODEL), **settings
    )


class Divider:
    """Notes what it is asked for. refusal: why it gives something else."""

    def __init__(self, refusal: str | None = None) -> None:
        self.asked: list[tuple[str, torch.device]] = []
        self._refusal = refusal

    def __call__(self, name: str, device: torch.device) -> tuple[Partition, str | None]:
        self.asked.append((name, device))
        return TakingTurns(FakeAccelerator(), SHARES), self._refusal


def test_a_gpu_is_divided_as_the_setting_says() -> None:
    for name in ("auto", "sm", "streams"):
        divide = Divider()
        target, draft = on_gpu(), on_gpu()
        lanes = make_lanes(config_of(spec_partition=name), target, draft, divide=divide)
        assert lanes is not None
        assert (lanes.target, lanes.draft) == (target, draft)
        assert divide.asked == [(name, torch.device("cuda", 0))]


def test_who_is_not_divided_is_told_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="faser.engine"):
        lanes = make_lanes(config_of(), on_gpu(), on_gpu(), divide=Divider("cuGreenCtxCreate: not permitted"))
    assert lanes is not None
    assert lanes.fallback == "cuGreenCtxCreate: not permitted"
    assert lanes.fallback in caplog.text


def test_nothing_is_divided_where_nobody_could_overlap() -> None:
    divide = Divider()
    none_of_these: list[tuple[dict[str, Any], Backend | None]] = [
        ({"spec_overlap": "off"}, on_gpu()),
        ({"spec_partition": "serial"}, on_gpu()),
        ({}, None),
        ({"speculative": DRAFT_MODEL | {"draft_sample_method": "probabilistic"}}, on_gpu()),
        ({"speculative_policy": "off"}, on_gpu()),
    ]
    for settings, draft in none_of_these:
        assert make_lanes(config_of(**settings), on_gpu(), draft, divide=divide) is None
    assert divide.asked == []


@pytest.mark.parametrize(
    "settings, reason",
    [
        ({"spec_partition": "serial"}, "spec_partition is serial"),
        ({"speculative_policy": "off"}, "the policy is off"),
        ({"speculative": DRAFT_MODEL | {"draft_sample_method": "probabilistic"}}, "only point masses"),
    ],
)
def test_what_is_wanted_and_cannot_be_is_refused_by_name(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_lanes(config_of(spec_overlap="on", **settings), on_gpu(), on_gpu(), divide=Divider())


@pytest.mark.parametrize(
    "speculative, drafter",
    [
        ({}, "the default method drafts from text alone"),
        ({"method": "ngram"}, "method ngram drafts from text alone"),
        ({"method": "layer_skip"}, "method layer_skip drafts with the model itself"),
    ],
)
def test_overlap_without_a_draft_model_is_refused_with_what_to_add(
    speculative: dict[str, Any], drafter: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_lanes(config_of("cpu", spec_overlap="on", speculative=speculative), TorchBackend(), None)
    assert str(caught.value) == (
        f"--spec-overlap on needs a draft model, and {drafter}; "
        """add --speculative-config '{"model": "DRAFT"}' or leave --spec-overlap at auto"""
    )


def test_a_partition_for_another_kind_of_device_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="spec_partition is cores, which divides a cpu device; device is cuda:0"):
        config_of(spec_partition="cores")
    for name in ("sm", "streams"):
        with pytest.raises(ConfigError, match=f"spec_partition is {name}, which divides a cuda device"):
            config_of("cpu", spec_partition=name)


def test_on_a_cpu_the_setting_divides_cores_and_no_gpu_is_asked_for() -> None:
    divide = Divider()
    one = make_lanes(config_of("cpu", num_threads=1), TorchBackend(), TorchBackend(), divide=divide)
    assert one is None
    with pytest.raises(ConfigError, match="two lanes take two cores"):
        make_lanes(config_of("cpu", num_threads=1, spec_overlap="on"), TorchBackend(), TorchBackend())
    assert divide.asked == []


def test_places_are_those_that_lanes_will_have_and_the_partition_is_as_it_was() -> None:
    partition = TakingTurns(FakeAccelerator(), SHARES)
    partition.resize(SHARES[1])
    places = places_of(partition)
    assert [each.share for each in places.draft] == list(SHARES)
    assert [each.share for each in places.verify] == [1 - each for each in SHARES]
    assert partition.share == SHARES[1]
    assert places_of(Serial()) == LanePlaces()
