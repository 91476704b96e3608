"""Engines that sample in the runner and schedule asynchronously answer what all others do.

Oracle: the same engine, step after step, on the native kernels, where a row has the same bits in every batch; so
answers are compared token by token, log probabilities included. Requests end at unforeseeable stop
tokens, share blocks, are preempted, and some of them need more than their logits.
"""

import random
from pathlib import Path
from typing import Any

import pytest

from faser.engine.engine import Engine
from faser.types.request import Request
from tests.engine.losslessness.equality import FEATURES, Answer, answers, build, requests, write_pair

STOPS: dict[str, Any] = {"temperature": 1.0, "ignore_eos": False, "stop_token_ids": tuple(range(3, 40))}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter"))


def mixed() -> list[Request]:
    """A third of them need only logits; the others have every other feature."""
    kinds: list[dict[str, Any]] = [STOPS, {"temperature": 0.0}, *FEATURES.values()]
    asked = [requests(**(kind | {"max_tokens": 40})) for kind in kinds]
    return [asked[i % len(kinds)][i] for i in range(len(asked[0]))]


@pytest.fixture(scope="module")
def alone(pair: tuple[Path, Path]) -> dict[tuple[str, int], Answer]:
    return answers(build(pair, None, async_scheduling=False), mixed())


def test_answers_are_those_of_steps_that_wait_for_each_other(
    pair: tuple[Path, Path], alone: dict[tuple[str, int], Answer]
) -> None:
    assert answers(build(pair, None, async_scheduling=True), mixed()) == alone


@pytest.mark.parametrize("sampling", [STOPS, {"temperature": 0.0}, FEATURES["truncated"]])
@pytest.mark.full(but=("sampling0",))
def test_requests_that_need_only_logits_answer_the_same(pair: tuple[Path, Path], sampling: dict[str, Any]) -> None:
    asked = requests(**sampling)
    engine = build(pair, None, async_scheduling=True)

    found = answers(engine, asked)

    assert found == answers(build(pair, None, async_scheduling=False), asked)
    assert engine.stats().num_preemptions or sampling is STOPS
    assert not engine.has_work()


@pytest.mark.parametrize("policy", ["faser", "fixed"])
@pytest.mark.parametrize("method", ["draft_model", "suffix"])
@pytest.mark.full(but=("draft_model-faser",))
def test_engines_that_speculate_answer_the_same(
    pair: tuple[Path, Path], alone: dict[tuple[str, int], Answer], method: str, policy: str
) -> None:
    drafter = {"method": method} | ({"model": str(pair[1])} if method == "draft_model" else {})
    engine = build(pair, drafter, async_scheduling=True, spec_overlap="off")
    engine.use_policy(policy)
    assert answers(engine, mixed()) == alone


def arriving(engine: Engine, asked: list[Request], *, seed: int) -> dict[str, tuple[int, ...]]:
    """Requests that come a few at a time, in any step; a third of them are aborted once they say token 7 or 8.

    Tokens by request, as far as they were heard.
    """
    rng, left = random.Random(seed), asked[::-1]
    heard: dict[str, list[int]] = {}
    while left or engine.has_work():
        for _ in range(min(len(left), rng.choice([0, 0, 1, 2]))):
            engine.add(left.pop())
        for delta in engine.step():
            tokens = heard.setdefault(delta.request_id, [])
            for token_id in delta.token_ids:
                tokens.append(token_id)
                if int(delta.request_id) % 3 == 0 and token_id % 64 in (7, 8):
                    engine.abort(delta.request_id)
                    break
    return {name: tuple(tokens) for name, tokens in heard.items()}


@pytest.mark.parametrize("drafter", [None, {"method": "suffix"}])
def test_arrivals_and_aborts_in_flight_change_no_token(
    pair: tuple[Path, Path], drafter: dict[str, Any] | None
) -> None:
    """Short answers, long prompts and a small step budget: most steps compute parts of prompts."""
    asked = requests(**(STOPS | {"max_tokens": 25}))
    plain = arriving(build(pair, None, async_scheduling=False), asked, seed=1)
    engine = build(pair, drafter, async_scheduling=True, spec_overlap="off")
    if drafter is not None:
        engine.use_policy("faser")

    assert arriving(engine, asked, seed=2) == plain
    assert len({*map(len, plain.values())}) > 5
    assert engine.stats().prefix_cache_hits > 0
