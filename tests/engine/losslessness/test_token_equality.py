"""Speculation changes no token: forty prompts, sixteen at once, on against off, over every drafter and policy.

Oracle: the same engine without a drafter. Float32 on the native kernels, where a row has the same bits whatever
its neighbours; a KV pool that is too small for all, so that sequences are preempted; prefix caching on.
Planted bugs it was seen to catch are listed with the tests of the parts.
"""

from pathlib import Path
from typing import Any

import pytest

from faser.config.speculation import POLICIES, TEXT_METHODS
from faser.engine.checkpoints.ngram_model import count, save
from faser.engine.engine import Engine
from tests.engine.losslessness.equality import CAP, FEATURES, Answer, answers, build, requests, write_pair

DRAFTERS: dict[str, dict[str, Any]] = {
    "auto": {},
    **{method: {"method": method} for method in TEXT_METHODS if method != "grammar"},
    "draft_model": {"method": "draft_model"},
    "chooser": {"method": "auto"},
    "coupled draft_model": {"method": "draft_model", "draft_sample_method": "coupled"},
    "sampled draft_model": {"method": "draft_model", "draft_sample_method": "probabilistic"},
}
# Every policy with these, and `faser` with all; every policy with all with --full.
BY_EVERY_POLICY = ("auto", "draft_model")
WITH_MODEL = ("draft_model", "chooser", "coupled draft_model", "sampled draft_model")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter"))


@pytest.fixture(scope="module")
def greedy_answers(checkpoints: tuple[Path, Path]) -> dict[tuple[str, int], Answer]:
    engine = build(checkpoints, None)
    found = answers(engine, requests(temperature=0.0))
    assert engine.stats().num_preemptions > 0, "the pool is meant to be too small"
    return found


@pytest.fixture(scope="module", params=DRAFTERS)
def drafting(
    request: pytest.FixtureRequest,
    checkpoints: tuple[Path, Path],
    greedy_answers: dict[tuple[str, int], Answer],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, Engine]:
    name = str(request.param)
    given = dict(DRAFTERS[name])
    if name in WITH_MODEL:
        given["model"] = str(checkpoints[1])
    if name == "ngram_model":
        file = tmp_path_factory.mktemp("ngrams") / "answers.npz"
        save(count([token_ids for token_ids, _ in greedy_answers.values()]), file)
        given["ngram_model"] = str(file)
    return name, build(checkpoints, given)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.full(
    but=("auto-off", "suffix-goodput", "ngram_model-off", "draft_model-goodput", "coupled draft_model-off")
)
def test_greedy_tokens_are_those_without_speculation(
    drafting: tuple[str, Engine], policy: str, greedy_answers: dict[tuple[str, int], Answer], full: bool
) -> None:
    name, engine = drafting
    if not (full or policy in ("fixed", "faser") or name in BY_EVERY_POLICY):
        pytest.skip("with --full")
    engine.use_policy(policy, 3 if policy == "fixed" else None)
    before = engine.stats().speculation
    found = answers(engine, requests(temperature=0.0))
    assert found == greedy_answers
    after = engine.stats().speculation
    assert before is not None
    assert after is not None
    drafts = after.num_drafts - before.num_drafts
    assert drafts == 0 or policy != "off"
    if policy in ("fixed", "table", "survival"):  # goodput and faser may find that drafting does not pay
        assert drafts > 0, f"{name} under {policy} sent no draft"
    assert engine.stats().kv_usage == 0.0


@pytest.mark.parametrize(
    ("feature", "draft_sample_method"),
    [
        *((feature, "coupled") for feature in FEATURES),
        ("penalties", "greedy"),
        *(
            pytest.param(feature, "greedy", marks=pytest.mark.full)
            for feature in FEATURES
            if feature != "penalties"
        ),
    ],
)
@pytest.mark.full(but=("penalties-greedy",))
def test_sampled_tokens_and_scores_are_those_without_speculation(
    checkpoints: tuple[Path, Path], feature: str, draft_sample_method: str
) -> None:
    """Point-mass drafts: the very same tokens, since every row has the noise it would have had alone."""
    asked = requests(**FEATURES[feature])
    expected = answers(build(checkpoints, None), asked)
    engine = build(
        checkpoints, {"method": "auto", "model": str(checkpoints[1]), "draft_sample_method": draft_sample_method}
    )
    engine.use_policy("fixed", CAP)
    found = answers(engine, asked)
    assert found == expected
    assert feature != "schema" or engine.stats().num_preemptions > 0, "matchers are meant to start in the middle"
    speculated = engine.stats().speculation
    assert speculated is not None
    assert sum(each.accepted for each in speculated.methods) > 0
