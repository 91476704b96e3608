"""Drafting ahead changes no token either: the same forty requests with lanes that both run, in random disorder.

Oracle: the same engine without a drafter.
"""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from faser.engine.engine import Engine
from faser.engine.execution.overlap.partition import (
    Cores,
    Draft,
    Lane,
    OverlapResult,
    Partition,
    PendingResult,
    Verify,
)
from tests.engine.losslessness.equality import CAP, FEATURES, Answer, answers, build, requests, write_pair

DRAFTERS: dict[str, dict[str, Any]] = {
    "greedy": {"method": "draft_model", "draft_sample_method": "greedy"},
    "coupled": {"method": "draft_model"},
    "chooser": {"method": "auto"},
}

D = TypeVar("D")
V = TypeVar("V")

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two lanes take two cores")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter"))


@pytest.fixture(scope="module")
def expected(checkpoints: tuple[Path, Path]) -> Callable[[float], dict[tuple[str, int], Answer]]:
    """Answers without speculation, by temperature."""
    engine = build(checkpoints, None)
    known: dict[float, dict[tuple[str, int], Answer]] = {}

    def at(temperature: float) -> dict[tuple[str, int], Answer]:
        if temperature not in known:
            known[temperature] = answers(engine, requests(temperature=temperature, logprobs=1))
        return known[temperature]

    return at


def drafting(
    checkpoints: tuple[Path, Path], name: str, partition: Partition | None = None, **settings: Any
) -> Engine:
    given = DRAFTERS[name] | {"model": str(checkpoints[1])}
    return build(checkpoints, given, spec_overlap="on", partition=partition, **settings)


def mode_steps(engine: Engine) -> dict[str, int]:
    stats = engine.stats().speculation
    assert stats is not None
    return dict(stats.mode_steps)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.full(but=("coupled-0.9",))
def test_tokens_are_those_without_speculation(
    checkpoints: tuple[Path, Path],
    name: str,
    temperature: float,
    expected: Callable[[float], dict[tuple[str, int], Answer]],
) -> None:
    engine = drafting(checkpoints, name)
    assert answers(engine, requests(temperature=temperature, logprobs=1)) == expected(temperature)
    stats = engine.stats()
    assert mode_steps(engine)["cores"] > 20
    assert stats.num_preemptions > 0
    assert stats.kv_usage == 0.0
    assert stats.speculation is not None
    assert sum(each.accepted for each in stats.speculation.methods) > 0


@pytest.mark.parametrize("policy", ["fixed", "table", "goodput", "survival", "faser"])
@pytest.mark.full
def test_every_policy_may_have_its_drafts_made_ahead(
    checkpoints: tuple[Path, Path], policy: str, expected: Callable[[float], dict[tuple[str, int], Answer]]
) -> None:
    engine = drafting(checkpoints, "coupled")
    engine.use_policy(policy, CAP if policy == "fixed" else None)
    assert answers(engine, requests(temperature=0.0, logprobs=1)) == expected(0.0)
    assert mode_steps(engine)["cores"] > 0


@pytest.mark.parametrize(
    "feature",
    [
        "penalties",
        "structure and all others",
        "scores",
        *(pytest.param(each, marks=pytest.mark.full) for each in ("plain", "truncated", "endings", "schema")),
    ],
)
@pytest.mark.full(but=("penalties",))
def test_whatever_was_asked_for_tokens_and_scores_are_those_without_speculation(
    checkpoints: tuple[Path, Path], feature: str
) -> None:
    """Early pruning is on as well: it looks and learns, and prunes where it is sure."""
    asked = requests(**FEATURES[feature])
    expected = answers(build(checkpoints, None), asked)
    engine = drafting(checkpoints, "coupled", early_prune="on")
    engine.use_policy("fixed", CAP)
    assert answers(engine, asked) == expected
    assert mode_steps(engine)["cores"] > 20


class Disordered:
    """Lanes that begin and end at random moments, one sometimes long before the other."""

    name = "cores"

    def __init__(self, lanes: Partition, seed: int) -> None:
        self._lanes = lanes
        self._random = random.Random(seed)

    @property
    def share(self) -> float:
        return self._lanes.share

    def shares(self) -> tuple[float, ...]:
        return self._lanes.shares()

    def resize(self, share: float) -> None:
        self._lanes.resize(share)

    def run_both(self, draft: Draft[D], verify: Verify[V]) -> OverlapResult[D, V]:
        waits = [self._random.choice((0.0, 0.0, 0.0005, 0.002)) for _ in range(4)]

        def drafting(lane: Lane, until: Callable[[], bool]) -> D:
            time.sleep(waits[0])
            found = draft(lane, until)
            time.sleep(waits[1])
            return found

        def verifying(lane: Lane) -> PendingResult[V]:
            time.sleep(waits[2])
            found = verify(lane).wait()
            time.sleep(waits[3])
            return PendingResult(lambda: found)

        return self._lanes.run_both(drafting, verifying)

    def close(self) -> None:
        self._lanes.close()


@pytest.mark.slow
@pytest.mark.full
def test_thousands_of_steps_with_random_delays_in_both_lanes_change_no_token(
    checkpoints: tuple[Path, Path], expected: Callable[[float], dict[tuple[str, int], Answer]], full: bool
) -> None:
    steps, seed = 0, 0
    engine = drafting(checkpoints, "coupled", partition=Disordered(Cores(), seed))
    while steps < (10_000 if full else 1_000):
        temperature = (0.0, 0.9)[seed % 2]
        asked = requests(temperature=temperature, logprobs=1)
        random.Random(seed).shuffle(asked)
        assert answers(engine, asked) == expected(temperature)
        steps, seed = mode_steps(engine)["cores"], seed + 1
