"""The comparison of the latency model with the simulator, on a machine that is cheap to simulate."""

import argparse
import json

import pytest

from benchmarks.simulator.latency_model import cell, errors, worst
from benchmarks.simulator.machines import conversation, cpu, paced


def asked(**changed: object) -> argparse.Namespace:
    return argparse.Namespace(**{"requests": 150, "seeds": 2, "trace": None, **changed})


def test_at_a_third_of_the_capacity_means_are_within_a_fifth() -> None:
    """The simulator is the oracle: the real scheduler, step by step. Filed results have the errors by load."""
    found = cell(cpu(), "made", "off", 0.3, asked())
    for way in ("planned", "fitted"):
        for name in ("ttft", "tpot", "latency"):
            assert found[way][name] == pytest.approx(0, abs=0.2), (way, name)
    assert json.dumps(found)


def test_beyond_the_capacity_nothing_is_predicted() -> None:
    assert errors({}, {"ttft": 1.0}) is None


def test_the_worst_error_keeps_its_sign() -> None:
    cells = [
        {"requests": "made", "load": 0.2, "planned": {"ttft": 0.1}, "fitted": None},
        {"requests": "made", "load": 0.2, "planned": {"ttft": -0.3}, "fitted": {"ttft": 0.0}},
    ]
    assert worst(cells) == {"planned, made, 0.2": {"ttft": -0.3}, "fitted, made, 0.2": {"ttft": 0.0}}


def test_requests_are_paced_to_a_rate_and_scaled() -> None:
    found = paced(conversation(101), 4.0, scale=0.5)
    assert found[0][0] == 0
    assert found[-1][0] == pytest.approx(25.0)
    assert found[7][1] == max(round(conversation(101)[7][1] * 0.5), 1)
