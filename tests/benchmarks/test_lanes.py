"""The benchmark of lanes: every way does the same work, and ratios are of the serial time to theirs."""

import os
import statistics
from pathlib import Path

import pytest
import torch

from benchmarks.lanes import Load, Size, measure_pair, ratios, spread
from faser.engine.execution.overlap.partition import EVERYTHING, Cores
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import library_path

TINY = Size(num_layers=2, hidden=32, inner=64, rows=2)


def test_ratios_are_of_the_serial_time_to_each_other_way() -> None:
    times = {"serial": [4.0, 2.0, 6.0], "lanes 0.500": [2.0, 1.0, 8.0]}
    assert ratios(times, min) == {"lanes 0.500": 2.0}
    assert ratios(times, statistics.median) == {"lanes 0.500": 2.0}
    assert ratios({"serial": [2.0], "lanes 0.500": [4.0]}, min) == {"lanes 0.500": 0.5}


def test_a_spread_is_of_the_sorted_times() -> None:
    assert spread([float(each) for each in (9, 1, 5, 3, 7, 2, 4, 6, 8, 10)]) == {"min": 1, "median": 6, "p90": 10}


def test_a_load_multiplies_its_hidden_state_by_every_layer(kernel_cache: Path) -> None:
    load = Load(NativeBackend(library_path(cache_dir=kernel_cache), num_threads=2), TINY)
    first = load.run(EVERYTHING).clone()
    second = load.run(EVERYTHING)
    assert first.shape == (TINY.rows, TINY.hidden)
    assert torch.isfinite(second.float()).all()
    assert not torch.equal(first, second)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two lanes take two cores")
def test_a_pair_is_measured_every_way(kernel_cache: Path) -> None:
    backend = NativeBackend(library_path(cache_dir=kernel_cache), num_threads=2)
    lanes = Cores()
    found = measure_pair(lanes, Load(backend.concurrent_instance(), TINY), Load(backend, TINY), 0.02)
    lanes.close()
    assert found["rounds"] >= 1
    assert found["serial_ms"] > 0
    ways = {f"lanes {share:.3f}" for share in lanes.shares()}
    assert set(found["speed_up"]) == set(found["median"]) == ways
    assert {f"lanes {each['share']:.3f}" for each in found["co_run"]} == ways
