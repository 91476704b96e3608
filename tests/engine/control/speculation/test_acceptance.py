"""What is learnt of acceptance. Oracles: the rates that outcomes were drawn with, and twins that were given less.

Planted bugs that these tests have caught: slots that do not teach move the curve; a release drops what is held of
all slots; what was held is learned twice; the prior loses weight with every draft, until nothing is left of it;
depths that no draft has reached keep their prior whatever other depths show; offsets forget nothing; a new
sequence inherits the offset of its slot; a token at which nothing was sampled is decided; a dropped token counts
where the drafts were ended together.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser.config.speculation import DRAFT_METHODS
from faser.engine.contract.drafts import METHOD_IDS, DraftTable, table_of
from faser.engine.control.speculation.acceptance import (
    Acceptance,
    DraftOutcomes,
    point_mass_outcomes,
    sampled_tokens,
    with_dropped,
)
from faser.types.arrays import Floats, Ints
from tests.engine.control.speculation.building import MODEL, SUFFIX, full, ints, note_nothing, outcomes, table
from tests.native_acceptance import native_acceptance

CAP = 4
PRIOR = 0.7


def drafts_of(
    slots: list[int] | Ints, *, length: int = CAP, method: int = MODEL, confidences: Floats | float = 2.0
) -> DraftTable:
    """Drafts of `length` tokens."""
    count = len(slots)
    sure = np.broadcast_to(confidences, (count, CAP)).astype(np.float64)
    return table(np.array(slots, dtype=np.int64), full(count, method), full(count, length), sure)


def lesson(
    slots: list[int],
    accepted: list[int],
    *,
    length: int = CAP,
    method: int = MODEL,
    confidences: Floats | float = 2.0,
) -> DraftOutcomes:
    """Of drafts of `length` tokens `accepted` were right."""
    return outcomes(drafts_of(slots, length=length, method=method, confidences=confidences), accepted)


def num_right(rng: np.random.Generator, chances: Floats) -> list[int]:
    """How many leading tokens are accepted, of each draft. chances: [S, K]."""
    found: list[int] = (rng.random(chances.shape) < chances).cumprod(axis=1).sum(axis=1).tolist()
    return found


def chance(acceptance: Acceptance, slot: int, *, margin: float = 2.0, method: int = MODEL) -> float:
    """Of the first token of a draft of the slot."""
    one_token = drafts_of([slot], length=1, method=method, confidences=margin)
    return acceptance.drafted_survival(one_token).item(0, 1)


def draft(acceptance: Acceptance, slots: list[int], *, by_model: bool = True, length: int = CAP) -> None:
    """Note drafts of `length` tokens, as likely as acceptance says."""
    drafts = drafts_of(
        slots, length=length, method=MODEL if by_model else SUFFIX, confidences=2.0 if by_model else 0.6
    )
    survival = acceptance.drafted_survival(drafts)
    acceptance.note_drafts(drafts.slots, full(len(slots), CAP), drafts.lengths, survival, by_model=by_model)


def test_before_any_draft_every_slot_has_the_prior() -> None:
    acceptance = native_acceptance(4, CAP)
    by_model = acceptance.survival(np.arange(2), by_model=True)
    by_text = acceptance.survival(np.arange(2), by_model=False)
    assert by_model == pytest.approx(np.tile(PRIOR ** np.arange(CAP + 1), (2, 1)))
    assert by_text == pytest.approx(np.tile(0.3 ** np.arange(CAP + 1), (2, 1)))


@pytest.mark.parametrize("by_model", [True, False])
def test_each_slot_finds_its_own_rate_though_all_confidences_are_equal(by_model: bool) -> None:
    rng = np.random.default_rng(0)
    acceptance, rates = native_acceptance(2, CAP), np.array([[0.9], [0.3]])
    method = MODEL if by_model else SUFFIX
    found = []
    for step in range(600):
        draft(acceptance, [0, 1], by_model=by_model)
        right = num_right(rng, np.repeat(rates, CAP, axis=1))
        acceptance.learn(lesson([0, 1], right, method=method, confidences=2.0 if by_model else 0.6))
        if step > 200:
            margin = 2.0 if by_model else 0.6
            drafted = [chance(acceptance, slot, margin=margin, method=method) for slot in (0, 1)]
            found.append([*drafted, *acceptance.survival(np.arange(2), by_model=by_model)[:, 1]])
    *drafted, usual_good, usual_bad = np.mean(found, axis=0)
    assert drafted == pytest.approx(rates[:, 0], abs=0.05)
    assert 0.75 < usual_good < 0.9  # before drafting a slot is taken to be a little like the others
    assert 0.3 < usual_bad < 0.45


def test_acceptance_that_falls_with_depth_is_seen_to_fall() -> None:
    """The curve has a term for depth, and it is a line: the depths are right on average and in their order."""
    rng = np.random.default_rng(1)
    acceptance, chances = native_acceptance(8, CAP), np.tile([0.95, 0.9, 0.8, 0.65], (8, 1))
    for _ in range(400):
        acceptance.learn(lesson([*range(8)], num_right(rng, chances)))
    survival = acceptance.drafted_survival(drafts_of(np.arange(8))).mean(axis=0)
    assert survival[1:] / survival[:-1] == pytest.approx(chances[0], abs=0.15)
    assert survival[1] > 0.9
    assert survival[4] / survival[3] < 0.8


def test_tokens_after_the_first_refused_one_teach_nothing() -> None:
    """All else equal: a long draft refused at its first token, and a draft of that token alone."""
    long, short = native_acceptance(1, CAP), native_acceptance(1, CAP)
    for _ in range(5):
        long.learn(lesson([0], [0], length=4))
        short.learn(lesson([0], [0], length=1))
    for margin in (0.0, 2.0, 5.0):
        assert chance(long, 0, margin=margin) == chance(short, 0, margin=margin)
    confidences = np.array([[2.0, 9.0, -9.0, 9.0]])
    long.learn(lesson([0], [0], confidences=confidences))
    short.learn(lesson([0], [0]))
    assert chance(long, 0) == chance(short, 0)


def test_a_new_sequence_starts_from_what_holds_for_all() -> None:
    acceptance = native_acceptance(3, CAP)
    for _ in range(200):
        draft(acceptance, [0, 1])
        acceptance.learn(lesson([0, 1], [0, 0]))
    fresh, drafted = acceptance.survival(np.array([2]), by_model=True)[0, 1], chance(acceptance, 2)
    assert fresh < 0.25
    assert drafted < 0.3
    acceptance.release(0)
    acceptance.start(0)
    assert acceptance.survival(ints(0), by_model=True)[0, 1] == pytest.approx(fresh)
    assert chance(acceptance, 0) == pytest.approx(drafted)


def test_forgetting_everything_leaves_the_prior() -> None:
    acceptance = native_acceptance(2, CAP)
    for _ in range(50):
        draft(acceptance, [0, 1])
        acceptance.learn(lesson([0, 1], [0, 0]))
    acceptance.forget()
    assert acceptance.survival(np.arange(2), by_model=True)[:, 1] == pytest.approx(PRIOR)
    assert chance(acceptance, 0, margin=2.5) == pytest.approx(PRIOR)


def test_a_slot_much_worse_than_the_others_is_recognised_within_fifteen_decided_tokens() -> None:
    rng = np.random.default_rng(4)
    acceptance, decided = native_acceptance(16, CAP), 0
    for _ in range(60):
        acceptance.learn(lesson([*range(15)], num_right(rng, np.full((15, CAP), 0.9))))
    assert chance(acceptance, 15) > 0.8
    while decided < 15:
        good = num_right(rng, np.full((16, CAP), 0.9))
        good[15] = 0
        acceptance.learn(lesson([*range(16)], good))
        decided += 1
    assert chance(acceptance, 15) < 0.55
    assert chance(acceptance, 0) > 0.8


@pytest.mark.parametrize("before, after", [(0.9, 0.1), (0.1, 0.9)])
@pytest.mark.parametrize("count", [1, 16])
def test_a_change_of_text_is_believed_within_sixty_steps(count: int, before: float, after: float) -> None:
    """Of one slot; the text of the others stays as it was. Half of the change is believed in before drafting."""
    rng, slots = np.random.default_rng(2), [*range(count)]
    acceptance, rates = native_acceptance(count, CAP), np.full((count, CAP), before)
    for step in range(360):
        rates[0] = before if step < 300 else after
        draft(acceptance, slots)
        acceptance.learn(lesson(slots, num_right(rng, rates)))
    assert chance(acceptance, 0) == pytest.approx(after, abs=0.3)
    usual = acceptance.survival(np.arange(1), by_model=True)[0, 1]
    assert abs(usual - after) < 0.6 * abs(before - after)


def test_an_offset_that_many_tokens_have_made_still_moves() -> None:
    """Two thousand good tokens are not to outweigh the fifty bad ones after them."""
    acceptance = native_acceptance(8, CAP)
    for step in range(650):
        good = [CAP if step < 600 else 0, *[2] * 7]
        acceptance.learn(lesson([*range(8)], good))
    assert chance(acceptance, 0) < 0.5


def test_survival_never_rises_and_stays_between_0_and_1() -> None:
    rng = np.random.default_rng(3)
    acceptance = native_acceptance(5, CAP)
    for _ in range(100):
        slots = rng.permutation(5)[: rng.integers(1, 6)]
        lengths = rng.integers(0, CAP + 1, len(slots))
        decided = (rng.random(len(slots)) * (lengths + 1)).astype(np.int64)
        accepted = np.maximum(decided - rng.integers(0, 2, len(slots)), 0)
        methods = rng.integers(0, len(DRAFT_METHODS), len(slots))
        drafts = table(slots, methods, lengths, rng.normal(0, 30, (len(slots), CAP)))
        drafted = acceptance.drafted_survival(drafts)
        acceptance.note_drafts(slots, full(len(slots), CAP), lengths, drafted, by_model=bool(rng.integers(2)))
        acceptance.learn(outcomes(drafts, accepted, decided))
        usual = [acceptance.survival(np.arange(5), by_model=each) for each in (True, False)]
        for survival in (*usual, drafted):
            assert np.isfinite(survival).all()
            assert (survival[:, 0] == 1).all()
            assert (np.diff(survival, axis=1) <= 0).all()
            assert (survival >= 0).all()


def test_text_that_seldom_has_a_match_is_expected_to_bring_little() -> None:
    acceptance = native_acceptance(1, CAP)
    for step in range(300):
        draft(acceptance, [0], by_model=False, length=2 if step % 4 == 0 else 0)
    mean = []
    for step in range(80):
        draft(acceptance, [0], by_model=False, length=2 if step % 4 == 0 else 0)
        mean.append(acceptance.survival(np.arange(1), by_model=False)[0])
    found = np.mean(mean, axis=0)
    assert found[1] == pytest.approx(0.25 * chance(acceptance, 0, margin=0.6, method=SUFFIX), abs=0.06)
    assert found[3] < 0.05


def test_no_number_of_drafts_uses_the_prior_up() -> None:
    """Half a million look-ups, none of which ever found a third token."""
    acceptance = native_acceptance(64, CAP)
    slots, lengths = np.arange(64), full(64, 2)
    survival = np.tile([1.0, 0.8, 0.6, 0.0, 0.0], (64, 1))
    for _ in range(4000):
        acceptance.note_drafts(slots, lengths, lengths, survival, by_model=True)
        note_nothing(acceptance, slots)
    for by_model in (True, False):
        assert np.isfinite(acceptance.survival(slots, by_model=by_model)).all()
    assert 0.6 < acceptance.survival(slots, by_model=True)[0, 3] / 0.6 < 0.9


@pytest.mark.parametrize("rate", [0.05, 0.97])
def test_depths_that_no_draft_has_reached_take_after_the_others(rate: float) -> None:
    """Else drafts of one token would stay so short, or seem worth a second token, for ever."""
    acceptance, one = native_acceptance(4, CAP), full(4, 1)
    survival = np.tile([1.0, rate, 0.0, 0.0, 0.0], (4, 1))
    for _ in range(100):
        acceptance.note_drafts(np.arange(4), one, one, survival, by_model=True)
    found = acceptance.survival(np.arange(4), by_model=True)[0]
    assert found[2] / found[1] == pytest.approx(rate, abs=0.05)


@pytest.mark.parametrize("method", ["draft_model", "suffix", "ngram"])
def test_drafts_survive_as_often_as_predicted(method: str) -> None:
    """Calibration: in every tenth of the predictions the mean prediction is the share that came true.

    The truth is a curve that differs from the prior, with confidences of the method's own kind and offsets by
    slot.
    """
    rng, number = np.random.default_rng(9), METHOD_IDS[method]
    acceptance, count = native_acceptance(16, CAP), 16
    offsets = rng.normal(0, 0.7, (count, 1))
    predicted, came_true = [], []
    for step in range(900):
        match method:
            case "draft_model":
                confidences = rng.exponential(3.0, (count, CAP))
                feature = confidences
            case "suffix":
                confidences = rng.uniform(0.05, 0.95, (count, CAP))
                feature = np.log(confidences / (1 - confidences))
            case _:
                confidences = rng.integers(1, 30, (count, CAP)).astype(np.float64)
                feature = np.log(confidences)
        chances = 1 / (1 + np.exp(-(-0.6 + 0.5 * feature + offsets)))
        right = num_right(rng, chances)
        if step > 200:
            survival = acceptance.drafted_survival(
                drafts_of(np.arange(count), method=number, confidences=confidences)
            )
            predicted.append(survival[:, 1:].ravel())
            came_true.append((np.array(right)[:, None] > np.arange(CAP)).ravel())
        acceptance.learn(lesson([*range(count)], right, method=number, confidences=confidences))
    order = np.concatenate(predicted).argsort()
    for part in np.array_split(order, 10):
        expected, share = np.concatenate(predicted)[part].mean(), np.concatenate(came_true)[part].mean()
        assert expected == pytest.approx(share, abs=0.035)


def test_the_line_of_the_stop_rule_is_the_curve_that_acceptance_was_drawn_from() -> None:
    rng = np.random.default_rng(4)
    acceptance = native_acceptance(8, CAP)
    for _ in range(400):
        margins = rng.exponential(3.0, (8, CAP))
        chances = 1 / (1 + np.exp(-(-1.0 + 0.8 * margins)))
        acceptance.learn(lesson([*range(8)], num_right(rng, chances), confidences=margins))
    intercept, slope = acceptance.calibration("draft_model")
    for margin in (0.0, 1.0, 3.0):
        expected = 1 / (1 + np.exp(1.0 - 0.8 * margin))
        assert 1 / (1 + np.exp(-intercept - slope * margin)) == pytest.approx(expected, abs=0.05)


def test_the_line_of_a_good_slot_lies_above_that_of_all() -> None:
    rng = np.random.default_rng(5)
    acceptance = native_acceptance(2, CAP)
    for _ in range(300):
        acceptance.learn(lesson([0, 1], num_right(rng, np.repeat([[0.95], [0.4]], CAP, axis=1))))
    assert chance(acceptance, 0) > 0.85
    assert chance(acceptance, 1) < 0.6
    of_all, of_good = (acceptance.calibration("draft_model", each)[0] for each in (None, np.array([0])))
    of_both = acceptance.calibration("draft_model", np.array([0, 1]))[0]
    assert of_good > max(of_all, of_both)


def test_tokens_that_are_always_cut_count_with_their_predicted_acceptance() -> None:
    """Unlikely tokens are never verified. What is left does well, but a draft as such does not."""
    rng = np.random.default_rng(6)
    acceptance, slots, expected = native_acceptance(8, CAP), np.arange(8), []
    for step in range(600):
        margins = np.where(rng.random((8, CAP)) < 0.5, 0.0, 5.0)
        kept = full(8, CAP) if step < 100 else (margins > 0).cumprod(axis=1).sum(axis=1)
        drafts = drafts_of(slots, confidences=margins)
        survival = acceptance.drafted_survival(drafts)
        acceptance.note_drafts(slots, full(8, CAP), full(8, CAP), survival, by_model=True)
        right = np.minimum(num_right(rng, np.where(margins > 0, 0.95, 0.2)), kept)
        acceptance.learn(outcomes(drafts, right, np.minimum(right + 1, kept)))
        if step > 300:
            expected.append(acceptance.survival(slots, by_model=True)[:, 1].mean())
    assert np.mean(expected) == pytest.approx((0.95 + 0.2) / 2, abs=0.1)


def test_methods_do_not_learn_from_each_other() -> None:
    acceptance = native_acceptance(2, CAP)
    for _ in range(100):
        draft(acceptance, [0], by_model=False)
        acceptance.learn(lesson([0], [0], method=SUFFIX, confidences=0.9))
    assert chance(acceptance, 0, margin=2.5) == pytest.approx(PRIOR)
    assert acceptance.survival(np.arange(1), by_model=True)[0, 1] == pytest.approx(PRIOR)


def test_a_step_without_sequences_is_fine() -> None:
    acceptance = native_acceptance(1, CAP)
    acceptance.learn(lesson([], []))
    note_nothing(acceptance, full(0, 0))
    assert acceptance.survival(full(0, 0), by_model=True).shape == (0, CAP + 1)


def test_several_steps_at_once_teach_what_they_teach_one_by_one() -> None:
    """All but how much is forgotten within them. Not every slot is in every step."""
    rng = np.random.default_rng(8)
    together, apart = native_acceptance(20, CAP), native_acceptance(20, CAP)
    for _ in range(60):
        steps = []
        for _ in range(4):
            slots: list[int] = rng.permutation(20)[: rng.integers(1, 21)].tolist()
            margins = rng.exponential(3.0, (len(slots), CAP))
            right = num_right(rng, np.full((len(slots), CAP), 0.7))
            steps.append(lesson(slots, right, confidences=margins))
        together.learn(*steps)
        for step in steps:
            apart.learn(step)
    for margin in (0.5, 2.0, 4.0):
        found, expected = ([chance(each, slot, margin=margin) for slot in range(20)] for each in (together, apart))
        assert found == pytest.approx(expected, abs=0.08)
        assert np.mean(found) == pytest.approx(np.mean(expected), abs=0.03)


def test_a_slot_that_does_not_teach_changes_nothing_but_its_own_estimates() -> None:
    """Twins: in one of them slot 3 drafts and is refused every token; the other one never hears of it."""
    rng = np.random.default_rng(11)
    some, none = native_acceptance(4, CAP), native_acceptance(4, CAP)
    some.start(3, teaches=False)
    none.start(3, teaches=False)
    for _ in range(30):
        right = num_right(rng, np.full((3, CAP), 0.8))
        for by_model in (True, False):
            draft(some, [0, 1, 2, 3], by_model=by_model)
            draft(none, [0, 1, 2], by_model=by_model)
        note_nothing(some, np.array([3]))
        some.learn(lesson([0, 1, 2, 3], [*right, 0]))
        none.learn(lesson([0, 1, 2], right))
    others = np.arange(3)
    for by_model in (True, False):
        found, expected = (each.survival(others, by_model=by_model) for each in (some, none))
        assert found == pytest.approx(expected, rel=1e-12)
    assert some.calibration("draft_model") == pytest.approx(none.calibration("draft_model"), rel=1e-12)
    assert [chance(some, slot) for slot in range(3)] == [chance(none, slot) for slot in range(3)]
    assert chance(some, 3) < 0.4 < 0.7 < chance(none, 3)
    assert some.survival(np.array([3]), by_model=True)[0, 1] < none.survival(np.array([3]), by_model=True)[0, 1]


def test_the_next_sequence_of_a_slot_teaches_again() -> None:
    acceptance = native_acceptance(2, CAP)
    acceptance.start(0, teaches=False)
    acceptance.release(0)
    acceptance.start(0)
    before = chance(acceptance, 1)
    acceptance.learn(lesson([0], [0]))
    assert chance(acceptance, 1) < before


def test_a_slots_last_sequence_leaves_its_next_one_nothing_of_its_own() -> None:
    acceptance = native_acceptance(4, CAP)
    for _ in range(20):
        draft(acceptance, [0, 1, 2, 3])
        acceptance.learn(lesson([0, 1, 2, 3], [0, CAP, CAP, CAP]))
    acceptance.release(0)
    acceptance.release(3)
    assert chance(acceptance, 0) == chance(acceptance, 3)
    fresh = acceptance.survival(np.array([0, 3]), by_model=True)
    assert fresh[0].tolist() == fresh[1].tolist()


def test_outcomes_that_are_held_teach_nothing_until_they_are_learned() -> None:
    acceptance, alone = native_acceptance(2, CAP), native_acceptance(2, CAP)
    before = [chance(acceptance, slot) for slot in range(2)]
    acceptance.hold(lesson([0, 1], [0, 2]))
    acceptance.hold(lesson([1], [3]))
    assert [chance(acceptance, slot) for slot in range(2)] == before
    acceptance.learn_held()
    alone.learn(lesson([0, 1], [0, 2]), lesson([1], [3]))
    assert [chance(acceptance, slot) for slot in range(2)] == [chance(alone, slot) for slot in range(2)]
    acceptance.learn_held()  # and only once
    assert [chance(acceptance, slot) for slot in range(2)] == [chance(alone, slot) for slot in range(2)]


def test_a_release_drops_what_is_held_of_its_slot_alone() -> None:
    acceptance, alone = native_acceptance(3, CAP), native_acceptance(3, CAP)
    acceptance.hold(lesson([0, 1, 2], [0, 0, 1]))
    acceptance.hold(lesson([1], [0]))
    acceptance.hold(lesson([2, 0], [0, 4]))
    acceptance.release(1)
    acceptance.learn_held()
    alone.learn(lesson([0, 2], [0, 1]), lesson([2, 0], [0, 4]))
    assert [chance(acceptance, slot) for slot in range(3)] == [chance(alone, slot) for slot in range(3)]


def test_requests_that_sample_and_requests_that_do_not_take_turns_without_misleading_each_other() -> None:
    """Sixteen requests that accept .7 of their tokens, then sixteen that sample and accept .25, and so on.

    Planted bug: no difference between the two; each kind then begins with what the other one taught.
    """
    rng = np.random.default_rng(0)
    acceptance = native_acceptance(1, CAP)
    drafts = drafts_of([0], method=SUFFIX, confidences=0.5)
    first: dict[bool, list[float]] = {False: [], True: []}
    for number in range(320):
        samples = number // 16 % 2 == 1
        acceptance.start(0, samples=samples)
        if number >= 160:
            first[samples].append(acceptance.drafted_survival(drafts)[0, 1])
        for _ in range(10):
            good = int((rng.random(CAP) < (0.25 if samples else 0.7)).cumprod().sum())
            acceptance.learn(outcomes(drafts, [good]))
    assert np.mean(first[False]) == pytest.approx(0.7, abs=0.07)
    assert np.mean(first[True]) == pytest.approx(0.25, abs=0.07)


def test_a_draft_for_which_no_token_was_sampled_is_not_decided() -> None:
    drafts = table_of([0, 1, 2], "suffix", [(1, 2), (), (3,)], [(0.5, 0.5), (), (0.5,)], width=CAP)
    found = point_mass_outcomes(drafts, sampled_tokens([(), (5,), (3, 4)], CAP))
    assert found.decided.tolist() == [0, 0, 1]
    assert found.accepted.tolist() == [0, 0, 1]


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), max_size=CAP), st.lists(st.integers(0, 1), max_size=CAP + 2)),
        min_size=1,
        max_size=5,
    )
)
def test_a_draft_that_was_not_verified_is_compared_with_the_tokens_at_its_place(
    each: list[tuple[list[int], list[int]]],
) -> None:
    """Oracle: a loop over the tokens of each sequence."""
    drafts = table_of(
        range(len(each)),
        "suffix",
        [tokens for tokens, _ in each],
        [[0.5] * len(tokens) for tokens, _ in each],
        width=CAP,
    )
    found = point_mass_outcomes(drafts, sampled_tokens([tuple(sampled) for _, sampled in each], CAP))
    for at, (tokens, sampled) in enumerate(each):
        decided = accepted = 0
        for token_id, own in zip(tokens, sampled, strict=False):
            decided += 1
            if token_id != own:
                break
            accepted += 1
        assert (found.decided.item(at), found.accepted.item(at)) == (decided, accepted)


def test_sampled_tokens_are_padded_and_cut_to_the_width() -> None:
    found = sampled_tokens([(1,), (), (2, 3, 4), (5, 6)], 2).tolist()
    assert found == [[1, -2], [-2, -2], [2, 3], [5, 6]]
    assert sampled_tokens([(), ()], 2).tolist() == [[-2, -2], [-2, -2]]


@given(
    price=st.floats(0.01, 0.9),
    pass_price=st.floats(0.0, 2.0),
    chances=st.lists(st.lists(st.floats(0.05, 0.99), min_size=CAP, max_size=CAP), min_size=1, max_size=4),
    data=st.data(),
)
def test_a_dropped_token_is_known_to_be_worth_no_more_than_its_row(
    price: float, pass_price: float, chances: list[list[float]], data: st.DataObject
) -> None:
    """Oracle: the passes of a drafter, in which it is seen which draft loses a token to the price of a row."""
    requested = [data.draw(st.integers(1, CAP)) for _ in chances]
    survival = np.zeros((len(chances), CAP + 1))
    survival[:, 0] = 1.0
    lengths, dropped, going, passes = [0] * len(chances), set(), [*range(len(chances))], 0
    while going:
        passes += 1
        staying = []
        for i in going:
            reached = survival.item(i, lengths[i]) * chances[i][lengths[i]]
            if reached <= price:
                dropped.add(i)
                continue
            lengths[i] += 1
            survival[i, lengths[i]] = reached
            if lengths[i] < requested[i]:
                staying.append(i)
        going = staying
        if sum(survival.item(i, lengths[i]) - price for i in going) <= pass_price:
            break
    before = survival.copy()
    tried, known = with_dropped(np.array(lengths), np.array(requested), survival, passes=passes, row_price=price)
    assert (survival == before).all()
    assert tried.tolist() == [length + (i in dropped) for i, length in enumerate(lengths)]
    for i, length in enumerate(lengths):
        assert known[i, : length + 1].tolist() == before[i, : length + 1].tolist()
        if i in dropped:
            assert known[i, length + 1] == pytest.approx(min(price, before[i, length]))
