"""When a head counts as better. Oracle: how often luck alone passes, over seeded draws.

Planted bugs that these tests have caught: the noise of each head by itself instead of that of the difference;
answers that count alike, whatever their length.

A round of learning on a tiny target. Oracle: a second round measures the first one's head as the served one.

Planted bug that these tests have caught: held-out answers are learned from.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from faser.distill.online_learner import (
    LEAST_ANSWERS,
    AnswerLength,
    OnlineLearner,
    compare,
    read_trained_head,
    write_trained_head,
)
from faser.distill.target import FrozenTarget
from faser.engine.contract.messages import Learn, LearnableAnswer, LearningRules
from faser.engine.execution.drafting.head_weights import load_head
from faser.errors import ModelError
from tests.distill.beginner import learnable, markov_target, write_beginner
from tests.engine.execution.drafting.seeded_heads import head_spec
from tests.engine.test_head_engine import WIDTH
from tests.engine.test_head_refresh_engine import write_random


def lengths(values: list[float], drafts: list[int] | None = None) -> list[AnswerLength]:
    counts = drafts or [10] * len(values)
    return [AnswerLength(drafts=count, length=value) for count, value in zip(counts, values, strict=True)]


def luck(rng: np.random.Generator, gain: float) -> bool:
    """Answers differ by 1 from each other, heads by .1 on each answer, and by the gain on all."""
    base = rng.normal(2.0, 1.0, 30)
    drafts = rng.integers(1, 60, 30).tolist()
    before, after = (base + shift + rng.normal(0.0, 0.1, 30) for shift in (0.0, gain))
    return compare(lengths(before.tolist(), drafts), lengths(after.tolist(), drafts)).is_better


def test_luck_rarely_passes_and_a_gain_that_is_far_below_the_answers_spread_does() -> None:
    rng = np.random.default_rng(1)
    assert sum(luck(rng, 0.0) for _ in range(500)) < 25
    assert sum(luck(rng, 0.15) for _ in range(500)) > 450


def test_an_answer_counts_by_its_drafts() -> None:
    found = compare(lengths([1.0, 2.0], [30, 10]), lengths([1.5, 2.0], [30, 10]))
    assert (found.before, found.after) == (1.25, 1.625)


def test_few_answers_prove_nothing() -> None:
    few, enough = [1.0] * (LEAST_ANSWERS - 1), [1.0] * LEAST_ANSWERS
    assert not compare(lengths(few), lengths([2.0] * len(few))).is_better
    assert compare(lengths(enough), lengths([2.0] * len(enough))).is_better
    nothing = compare([], [])
    assert (nothing.is_better, nothing.answers) == (False, 0)


def test_answers_too_short_for_a_draft_do_not_count() -> None:
    one = lengths([1.0] * LEAST_ANSWERS, [5] * (LEAST_ANSWERS - 1) + [0])
    assert compare(one, one).answers == LEAST_ANSWERS - 1


@pytest.mark.parametrize("gain, better", [(0.005, False), (0.02, True)])
def test_a_gain_of_less_than_a_hundredth_is_not_worth_a_swap(gain: float, better: bool) -> None:
    before, after = [1.0] * 20, [1.0 + gain] * 20
    assert compare(lengths(before), lengths(after)).is_better is better


RULES = LearningRules(epochs=8, rows=64, rate=5e-3, warm_up=2)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    return markov_target(tmp_path_factory.mktemp("markov"))[1]


@pytest.fixture(scope="module")
def beginner(target: FrozenTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_beginner(tmp_path_factory.mktemp("beginner"), target)


@pytest.fixture(scope="module")
def answers(target: FrozenTarget) -> list[LearnableAnswer]:
    return learnable(target, 60)


def task(answers: list[LearnableAnswer], into: Path, head: Path | None = None, **rules: Any) -> Learn:
    return Learn(
        head=None if head is None else str(head),
        into=str(into),
        answers=tuple(answers),
        rules=msgspec.structs.replace(RULES, **rules),
        seed=1,
    )


def learner_of(target: FrozenTarget, first: Path) -> OnlineLearner:
    return OnlineLearner(target, first, int8=True, dtype=torch.float32)


@pytest.mark.full
def test_a_head_that_has_learned_is_better_and_can_be_served(
    target: FrozenTarget, beginner: Path, answers: list[LearnableAnswer], tmp_path: Path
) -> None:
    learner = learner_of(target, beginner)
    found = learner.learn(task(answers, tmp_path / "1"))
    assert found.is_better
    assert found.after > found.before + found.noise
    assert (found.held_out, found.tokens) == (20, 40 * 16)
    head = load_head(tmp_path / "1", target.decoder, target.backend, max_positions=64, max_rows=8)
    served = load_head(beginner, target.decoder, target.backend, max_positions=64, max_rows=8)
    assert head.spec == served.spec
    again = learner.learn(task(answers, tmp_path / "2", head=tmp_path / "1"))
    assert again.before == pytest.approx(found.after)


@pytest.mark.full
def test_what_is_held_out_is_never_learned_from(
    target: FrozenTarget, beginner: Path, answers: list[LearnableAnswer], tmp_path: Path
) -> None:
    """Held-out answers of other tokens make the same head, to the bit."""
    other = [
        msgspec.structs.replace(each, answer=tuple(reversed(each.answer))) if each.held_out else each
        for each in answers
    ]
    for name, said in (("a", answers), ("b", other)):
        learner_of(target, beginner).learn(task(said, tmp_path / name, epochs=1))
    assert len({(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"}) == 1


def test_without_held_out_answers_nothing_is_learned(
    target: FrozenTarget, beginner: Path, answers: list[LearnableAnswer], tmp_path: Path
) -> None:
    learning = [each for each in answers if not each.held_out]
    for said in (learning, [each for each in answers if each.held_out], []):
        found = learner_of(target, beginner).learn(task(said, tmp_path / "none"))
        assert (found.is_better, found.tokens) == (False, 0)
    assert not (tmp_path / "none").exists()


def test_of_more_answers_than_there_is_room_for_the_newest_are_learned_from(
    target: FrozenTarget, beginner: Path, answers: list[LearnableAnswer], tmp_path: Path
) -> None:
    each = (6 + 16) * 2 * WIDTH * 2  # bytes of the states of one answer, of two layers
    learner = learner_of(target, beginner)
    found = learner.learn(task(answers, tmp_path / "head", state_bytes=30 * each, epochs=1))
    assert (found.held_out, found.tokens) == (10, 20 * 16)


def test_a_head_is_read_as_it_was_written(target: FrozenTarget, beginner: Path, tmp_path: Path) -> None:
    for int8 in (True, False):
        head = read_trained_head(beginner, target)
        write_trained_head(tmp_path, head, target, int8=int8)
        again = read_trained_head(tmp_path, target)
        assert replace(again, weights={}, draft_ids=head.draft_ids) == replace(head, weights={}, spec=again.spec)
        assert torch.equal(again.draft_ids, head.draft_ids)
        for name, weight in head.weights.items():
            torch.testing.assert_close(again.weights[name], weight, rtol=1e-2, atol=2e-2)


def test_a_head_of_another_form_is_refused_with_the_reason(target: FrozenTarget, tmp_path: Path) -> None:
    decoder = target.config.spec
    layers = replace(
        decoder,
        layers=(replace(decoder.layers[0], attention=replace(decoder.attention, window=None, bias=False)),),
        tie_word_embeddings=False,
    )
    spec = head_spec(
        decoder=layers,
        draft_vocab_size=WIDTH,
        target_hidden_size=WIDTH,
        norm_before_residual=True,
    )
    write_random(tmp_path, spec)
    with pytest.raises(ModelError, match="cannot be trained: its states have no norms of their own"):
        read_trained_head(tmp_path, target)
