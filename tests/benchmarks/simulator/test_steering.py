"""Attainment by load: what is counted and kept, and that the oracle knows."""

import argparse
import json
import sys
from pathlib import Path

import pytest

from benchmarks.simulator import steering
from benchmarks.simulator.machines import cpu, h200
from benchmarks.simulator.steering import at_share, main, served, summary

ASKED = argparse.Namespace(trace=None, requests=60, seeds=1)


def test_the_highest_load_lies_on_the_line_between_two_loads() -> None:
    runs = [
        {"load": load, "attainment": kept} for load, kept in ((0.5, 1.0), (0.7, 0.94), (0.9, 0.86), (1.0, 0.95))
    ]
    assert at_share(runs, 0.9) == 0.8
    assert at_share(runs, 0.99) == 0.533
    assert at_share(runs[1:], 0.95) is None
    assert at_share(runs[:2], 0.9) == 0.7


def test_a_summary_has_the_means_of_the_seeds_by_load() -> None:
    cells = [
        {"machine": "cpu", "arm": "off", "load": 0.5, "seed": seed, "commit": "", "attainment": kept}
        for seed, kept in enumerate((1.0, 0.8))
    ]
    (found,) = summary(cells)["arms"]
    assert (found["machine"], found["arm"], found["at_90"]) == ("cpu", "off", 0.5)
    assert found["loads"] == [{"load": 0.5, "runs": 2, "attainment": pytest.approx(0.9)}]


def test_cells_that_are_there_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, float]] = []

    def counted(_machine: object, arm: str, load: float, *_: object) -> dict[str, float]:
        ran.append((arm, load))
        return {"attainment": 0.5}

    monkeypatch.setattr(steering, "served", counted)
    out = tmp_path / "out.json"
    for loads in ("0.5", "0.5,0.7"):
        monkeypatch.setattr(
            sys, "argv", ["steering", str(out), "--machines", "cpu", "--loads", loads, "--seeds", "1"]
        )
        main()
    assert ran == [*((arm, 0.5) for arm in steering.ARMS), *((arm, 0.7) for arm in steering.ARMS)]
    assert len(json.loads(out.read_text())["cells"]) == 2 * len(steering.ARMS)


@pytest.mark.parametrize("make", [cpu, h200])
def test_every_token_that_the_oracle_verifies_is_accepted(make: steering.MakeMachine) -> None:
    found = served(make(), "oracle", 0.5, ASKED, 0)
    assert found["drafted"] == found["accepted"] > 0.3


def test_targets_are_kept_at_a_low_load() -> None:
    assert served(cpu(), "waits", 0.3, ASKED, 0)["attainment"] > 0.9
