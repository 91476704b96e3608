"""What is learnt of acceptance. Oracles: the rates that the outcomes were drawn with."""

import numpy as np
import pytest
from numpy.typing import NDArray

from faser.config.drafters import DRAFT_METHODS
from faser.engine.control.speculation.acceptance.estimator import Acceptance, Outcomes

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

CAP = 4
SUFFIX = DRAFT_METHODS.index("suffix")


def model_acceptance(num_slots: int = 4) -> Acceptance:
    return Acceptance(num_slots, CAP, method="draft_model", always_drafts=True)


def full(count: int, value: int) -> Ints:
    return np.full(count, value, dtype=np.int64)


def outcome(
    slots: list[int],
    accepted: list[int],
    *,
    verified: int = CAP,
    drafted: int = CAP,
    method: int = 0,
    confidences: Floats | None = None,
) -> Outcomes:
    count = len(slots)
    return Outcomes(
        slots=np.array(slots, dtype=np.int64),
        methods=full(count, method),
        drafted=full(count, drafted),
        verified=full(count, verified),
        accepted=np.array(accepted, dtype=np.int64),
        confidences=np.full((count, CAP), 2.0) if confidences is None else confidences,
    )


def run_lengths(rng: np.random.Generator, chances: Floats) -> Ints:
    """How many leading tokens are accepted. chances: [S, K]."""
    return np.asarray((rng.random(chances.shape) < chances).cumprod(axis=1).sum(axis=1), dtype=np.int64)


def test_before_any_data_every_slot_has_the_prior_of_its_method() -> None:
    survival = model_acceptance().survival(np.arange(2))
    assert survival == pytest.approx(np.tile(0.7 ** np.arange(CAP + 1), (2, 1)))


def test_each_slot_finds_its_own_rate() -> None:
    rng = np.random.default_rng(0)
    acceptance = model_acceptance(2)
    rates = np.array([[0.9], [0.3]])
    found = []
    for step in range(600):
        accepted = run_lengths(rng, np.repeat(rates, CAP, axis=1))
        acceptance.learn(outcome([0, 1], accepted.tolist()))
        if step > 200:
            found.append(acceptance.survival(np.arange(2))[:, 1])
    assert np.mean(found, axis=0) == pytest.approx(rates[:, 0], abs=0.04)


def test_depths_are_told_apart() -> None:
    rng = np.random.default_rng(1)
    acceptance = model_acceptance(8)
    chances = np.tile([0.9, 0.8, 0.6, 0.3], (8, 1))
    for _ in range(400):
        acceptance.learn(outcome([*range(8)], run_lengths(rng, chances).tolist()))
    survival = acceptance.survival(np.arange(8)).mean(axis=0)
    assert survival[1:] / survival[:-1] == pytest.approx(chances[0], abs=0.06)


def test_tokens_after_the_first_rejection_teach_nothing() -> None:
    """All else equal: a long draft refused at its first token, and a draft of that token alone."""
    long, short = model_acceptance(1), model_acceptance(1)
    for _ in range(5):
        long.learn(outcome([0], [0], verified=4, drafted=4))
        short.learn(outcome([0], [0], verified=1, drafted=1))
    assert long.survival(np.arange(1)) == pytest.approx(short.survival(np.arange(1)))


def test_a_new_sequence_starts_from_what_holds_for_all() -> None:
    acceptance = model_acceptance(3)
    for _ in range(200):
        acceptance.learn(outcome([0, 1], [0, 0]))
    fresh = acceptance.survival(np.array([2]))[0, 1]
    assert fresh < 0.2
    acceptance.release(0)
    acceptance.start(0)
    assert acceptance.survival(np.array([0]))[0, 1] == pytest.approx(fresh)


def test_forgetting_everything_leaves_the_prior() -> None:
    acceptance = model_acceptance(2)
    for _ in range(50):
        acceptance.learn(outcome([0, 1], [0, 0]))
    acceptance.forget()
    assert acceptance.survival(np.arange(2))[:, 1] == pytest.approx(0.7)


def test_one_slots_luck_hardly_touches_another() -> None:
    acceptance = model_acceptance(2)
    before = acceptance.survival(np.array([1]))[0, 1]
    acceptance.learn(outcome([0], [0]))
    assert abs(acceptance.survival(np.array([1]))[0, 1] - before) < 0.1


@pytest.mark.parametrize("before, after", [(0.9, 0.1), (0.1, 0.9)])
def test_a_change_of_text_is_believed_within_twenty_steps(before: float, after: float) -> None:
    rng = np.random.default_rng(2)
    acceptance = model_acceptance(1)
    for step in range(320):
        rate = before if step < 300 else after
        acceptance.learn(outcome([0], run_lengths(rng, np.full((1, CAP), rate)).tolist()))
    assert acceptance.survival(np.arange(1))[0, 1] == pytest.approx(after, abs=0.3)


def test_survival_never_rises_and_stays_between_0_and_1() -> None:
    rng = np.random.default_rng(3)
    acceptance = Acceptance(5, CAP, method="suffix", always_drafts=False)
    for _ in range(100):
        slots = rng.permutation(5)[: rng.integers(1, 6)]
        drafted = rng.integers(0, CAP + 1, len(slots))
        verified = (rng.random(len(slots)) * (drafted + 1)).astype(np.int64)
        accepted = (rng.random(len(slots)) * (verified + 1)).astype(np.int64)
        methods = rng.integers(0, len(DRAFT_METHODS), len(slots))
        confidences = rng.random((len(slots), CAP))
        acceptance.learn_lengths(slots, full(len(slots), CAP), drafted)
        acceptance.learn(
            Outcomes(
                slots=slots,
                methods=methods,
                drafted=drafted,
                verified=verified,
                accepted=accepted,
                confidences=confidences,
            )
        )
        for survival in (
            acceptance.survival(np.arange(5)),
            acceptance.drafted_survival(slots, methods, drafted, confidences),
        ):
            assert np.isfinite(survival).all()
            assert (survival[:, 0] == 1).all()
            assert (np.diff(survival, axis=1) <= 0).all()
            assert (survival >= 0).all()


def test_text_that_seldom_has_a_match_is_expected_to_bring_little() -> None:
    acceptance = Acceptance(1, CAP, method="suffix", always_drafts=False)
    always = Acceptance(1, CAP, method="suffix", always_drafts=True)
    for step in range(300):
        drafted = 2 if step % 4 == 0 else 0
        acceptance.learn_lengths(full(1, 0), full(1, CAP), full(1, drafted))
    got = acceptance.survival(np.arange(1))[0]
    assert got[1] / always.survival(np.arange(1))[0, 1] == pytest.approx(0.25, abs=0.06)
    assert got[3] < 0.05


def test_confidence_is_learnt_to_mean_what_it_means() -> None:
    """Oracle: the logistic curve that acceptance was drawn from."""
    rng = np.random.default_rng(4)
    acceptance = model_acceptance(8)
    for _ in range(400):
        margins = rng.exponential(3.0, (8, CAP))
        chances = 1 / (1 + np.exp(-(-1.0 + 0.8 * margins)))
        acceptance.learn(outcome([*range(8)], run_lengths(rng, chances).tolist(), confidences=margins))
    intercept, slope = acceptance.calibration("draft_model")
    for margin in (0.0, 1.0, 3.0):
        expected = 1 / (1 + np.exp(1.0 - 0.8 * margin))
        assert 1 / (1 + np.exp(-intercept - slope * margin)) == pytest.approx(expected, abs=0.05)
    survival = acceptance.drafted_survival(full(1, 0), full(1, 0), full(1, 2), np.array([[3.0, 0.0, 0.0, 0.0]]))
    assert survival[0] == pytest.approx([1, 0.80, 0.80 * 0.27, 0, 0], abs=0.1)


def test_a_sequence_that_does_better_than_its_confidences_is_told_apart() -> None:
    rng = np.random.default_rng(5)
    acceptance = model_acceptance(2)
    for _ in range(300):
        chances = np.repeat([[0.95], [0.4]], CAP, axis=1)
        acceptance.learn(outcome([0, 1], run_lengths(rng, chances).tolist()))
    lengths, margins = full(2, 1), np.full((2, CAP), 2.0)
    good, bad = acceptance.drafted_survival(np.arange(2), full(2, 0), lengths, margins)[:, 1]
    assert good > 0.85
    assert bad < 0.6
    assert acceptance.calibration("draft_model", np.array([0]))[0] > acceptance.calibration("draft_model")[0]


def test_cut_tokens_count_with_their_predicted_acceptance() -> None:
    """Unlikely tokens are always cut. What is left does well, but a draft as such does not."""
    rng = np.random.default_rng(6)
    acceptance = model_acceptance(8)
    expected = []
    for step in range(600):
        margins = np.where(rng.random((8, CAP)) < 0.5, 0.0, 5.0)
        chances = np.where(margins > 0, 0.95, 0.2)
        verified = full(8, CAP) if step < 100 else (margins > 0).cumprod(axis=1).sum(axis=1)
        accepted = np.minimum(run_lengths(rng, chances), verified)
        acceptance.learn(
            Outcomes(
                slots=np.arange(8),
                methods=full(8, 0),
                drafted=full(8, CAP),
                verified=verified,
                accepted=accepted,
                confidences=margins,
            )
        )
        if step > 300:
            expected.append(acceptance.survival(np.arange(8))[:, 1].mean())
    assert np.mean(expected) == pytest.approx((0.95 + 0.2) / 2, abs=0.1)


def test_methods_do_not_learn_from_each_other() -> None:
    acceptance = model_acceptance(2)
    for _ in range(100):
        acceptance.learn(outcome([0], [0], method=SUFFIX, confidences=np.full((1, CAP), 0.9)))
    margins = np.full((1, CAP), 2.5)
    survival = acceptance.drafted_survival(full(1, 1), full(1, 0), full(1, 1), margins)
    assert survival[0, 1] == pytest.approx(0.7, abs=0.01)


def test_a_step_without_sequences_is_fine() -> None:
    acceptance = model_acceptance(1)
    acceptance.learn(outcome([], []))
    acceptance.learn_lengths(full(0, 0), full(0, 0), full(0, 0))
    assert acceptance.survival(full(0, 0)).shape == (0, CAP + 1)


def random_step(rng: np.random.Generator, num_slots: int) -> Outcomes:
    slots = rng.permutation(num_slots)[: rng.integers(1, num_slots + 1)]
    drafted = rng.integers(0, CAP + 1, len(slots))
    verified = np.minimum(drafted, rng.integers(0, CAP + 1, len(slots)))
    accepted = np.minimum(run_lengths(rng, np.full((len(slots), CAP), 0.7)), verified)
    margins = rng.exponential(3.0, (len(slots), CAP))
    return Outcomes(
        slots=slots,
        methods=slots % 2,
        drafted=drafted,
        verified=verified,
        accepted=accepted,
        confidences=margins,
    )


def test_several_steps_at_once_teach_what_they_teach_one_by_one() -> None:
    """All but how much is forgotten within them. Not every slot is in every step."""
    rng = np.random.default_rng(8)
    together, apart = model_acceptance(20), model_acceptance(20)
    for _ in range(60):
        steps = [random_step(rng, 20) for _ in range(4)]
        together.learn(*steps)
        for step in steps:
            apart.learn(step)
        all_slots = np.arange(20)
        assert together.survival(all_slots) == pytest.approx(apart.survival(all_slots), abs=0.05)
        assert together.calibration("draft_model") == pytest.approx(apart.calibration("draft_model"), abs=0.15)


def test_outcomes_without_a_slot_teach_nothing_about_it() -> None:
    some, none = model_acceptance(2), model_acceptance(2)
    both = outcome([1, 0], [0, CAP])
    some.learn(both.without(0))
    none.learn(outcome([1], [0]))
    for slots in (np.array([0]), np.array([1])):
        assert some.survival(slots) == pytest.approx(none.survival(slots))
    assert both.without(0).without(1).slots.shape == (0,)


def test_a_slots_last_sequence_leaves_its_next_one_no_offset() -> None:
    """Of thirty-two sequences every third step is read: what was noted before the change is another's."""
    found = []
    for luck in (0, CAP):
        acceptance = model_acceptance(32)
        accepted = [2] * 31
        acceptance.learn(outcome([*range(32)], [luck, *accepted]))
        acceptance.start(0)
        for _ in range(5):
            acceptance.learn(outcome([*range(32)], [2, *accepted]))
        own = acceptance.calibration("draft_model", np.array([0]))[0]
        found.append(own - acceptance.calibration("draft_model")[0])
    assert found[0] == pytest.approx(found[1], abs=0.02)


def test_outcomes_that_are_held_teach_nothing_until_they_are_learned() -> None:
    acceptance, alone = model_acceptance(2), model_acceptance(2)
    before = acceptance.survival(np.arange(2))
    acceptance.hold(outcome([0, 1], [0, 0]))
    assert (acceptance.survival(np.arange(2)) == before).all()
    acceptance.learn_held()
    alone.learn(outcome([0, 1], [0, 0]))
    assert (acceptance.survival(np.arange(2)) == alone.survival(np.arange(2))).all()


def test_held_outcomes_of_a_sequence_that_leaves_are_lost() -> None:
    acceptance, alone = model_acceptance(2), model_acceptance(2)
    acceptance.hold(outcome([0, 1], [0, 0]))
    acceptance.release(1)
    acceptance.learn_held()
    alone.learn(outcome([0], [0]))
    assert np.allclose(acceptance.survival(np.arange(2)), alone.survival(np.arange(2)))
