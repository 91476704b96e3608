"""Which overlapped drafts stand, and when drafting overlaps at all.

Oracle: every run of tokens that a step can sample, tried one by one; worlds whose faster way is known.
Planted bugs that these tests have caught: the way that is faster is the other one; the first steps after a change,
which have nothing to verify, decide; the tokens of drafts made before steps count as one.
"""

import numpy as np
import pytest

from faser.engine.contract.drafts import DraftTable, joined, table_of
from faser.engine.contract.step_times import StepTimes
from faser.engine.control.speculation.overlap import Frontiers, OverlapControl, OverlapOptions
from faser.engine.control.step_cost import CostModel
from tests.engine.control.speculation.building import candidates, constant, ints
from tests.native_acceptance import native_acceptance

COUNT, CAP = 16, 4
PLAIN_S = 0.005


def control(mode: str = "auto", *, pass_s: float = 0.002, share: float = 0.5) -> OverlapControl:
    costs = CostModel(StepTimes.proportional(step_s=PLAIN_S, pass_s=pass_s))
    options = OverlapOptions(name="lanes", share=share, mode=mode)
    return OverlapControl(costs, native_acceptance(COUNT, CAP), Frontiers(COUNT), options)


def share_during(
    *, before: tuple[float, float], during: tuple[float, float], steps: int = 4000, seed: int = 0
) -> float:
    """Part of the last half of the steps whose drafts are made during them.

    before, during: tokens of a sequence and times PLAIN_S of such steps. The first step after a change of the way
    has no draft that was made during the step before it, so it brings one token.
    """
    random, found = np.random.default_rng(seed), control()
    state, was, ways = candidates(constant(0.8, COUNT, CAP)), False, []
    for _ in range(steps):
        wanted = found.wants(COUNT, measured=True, prompts=False)
        if found.is_due(1) and wanted:
            found.choose(state, None)
        elif not wanted:
            found.stop()
        step = found.launched(COUNT, PLAIN_S)
        assert (step is None) == (wanted != was)
        assert found.is_on == wanted
        tokens, time = during if wanted else before
        tokens = 1.0 if wanted and not was else tokens
        drawn = COUNT + int(random.poisson(COUNT * (tokens - 1)))
        if step is not None:
            assert step.drafts == wanted
            found.observe(step, drawn, PLAIN_S * time * float(random.lognormal(0.0, 0.05)))
        was = wanted
        ways.append(wanted)
    return float(np.mean(ways[steps // 2 :]))


@pytest.mark.parametrize(
    ("before", "during", "pays"),
    [
        ((3.0, 1.6), (2.6, 1.1), True),  # fewer tokens in much less time
        ((3.0, 1.6), (2.6, 1.6), False),  # lanes that slow each other down
        ((3.0, 1.2), (2.9, 1.1), True),
        ((2.0, 1.3), (1.5, 1.1), False),
    ],
)
def test_drafts_are_made_during_steps_where_that_is_faster(
    before: tuple[float, float], during: tuple[float, float], pays: bool
) -> None:
    found = np.mean([share_during(before=before, during=during, seed=seed) for seed in range(3)])
    assert found > 0.85 if pays else found < 0.15


@pytest.mark.parametrize(
    ("mode", "share", "overlaps"), [("on", 0.5, True), ("on", 0.0, False), ("off", 0.5, False)]
)
def test_other_modes_measure_nothing(mode: str, share: float, overlaps: bool) -> None:
    found = control(mode, share=share)
    for _ in range(50):
        assert found.wants(COUNT, measured=True, prompts=False) is overlaps
        assert found.launched(COUNT, PLAIN_S) is None


def test_another_policy_overlaps_only_where_it_is_forced_to() -> None:
    auto = control("auto")
    assert not any(auto.wants(COUNT, measured=False, prompts=False) for _ in range(100))
    assert control("on").wants(COUNT, measured=False, prompts=False)


def test_steps_with_prompts_keep_the_way_and_are_no_example_of_it() -> None:
    found = control()
    while not found.wants(COUNT, measured=True, prompts=False):
        step = found.launched(COUNT, PLAIN_S)
        assert step is not None
        found.observe(step, COUNT, PLAIN_S)
    found.choose(candidates(constant(0.8, COUNT, CAP)), None)
    for _ in range(20):
        assert found.wants(COUNT, measured=True, prompts=True)
        assert found.launched(COUNT, PLAIN_S) is None


@pytest.mark.parametrize(("pass_s", "length"), [(0.002, 2), (0.001, 4), (0.0001, 4), (0.02, 2)])
def test_a_draft_is_as_long_as_a_step_leaves_time_for(pass_s: float, length: int) -> None:
    found = control("on", pass_s=pass_s)
    found.choose(candidates(constant(0.8, COUNT, CAP)), None)
    slots = np.arange(COUNT)
    assert found.lengths(slots, np.full(COUNT, CAP)).tolist() == [length] * COUNT


@pytest.mark.parametrize("limit", [0, 1])
def test_no_draft_is_made_during_a_step_that_leaves_no_chunk_to_verify(limit: int) -> None:
    """The first token of a draft says whether it stands, and only those after it are verified."""
    found, slots = control("on"), np.arange(COUNT)
    state = constant(0.8, COUNT, CAP)
    found.choose(candidates(state), None)
    assert not found.lengths(slots, np.full(COUNT, limit)).any()
    found.choose(candidates(state, limit=ints(*[limit] * COUNT)), None)
    assert not found.is_on
    found.choose(candidates(state), ints(*[limit] * COUNT))
    assert not found.is_on


SLOT, NUM_SLOTS = 3, 5


def draft(*token_ids: int, slot: int = SLOT) -> DraftTable:
    return table_of([slot], "draft_model", [token_ids], [[0.5] * len(token_ids)], width=4)


def learned(
    frontiers: Frontiers, unverified: tuple[int, ...], overlapped: DraftTable, token_ids: tuple[int, ...]
) -> tuple[bool, bool]:
    """Whether the draft stands, and whether it is wrong, after a step that sampled token_ids in each slot."""
    slots = overlapped.slots.tolist()
    stand, wrong = frontiers.learn(overlapped, dict.fromkeys(slots, unverified), dict.fromkeys(slots, token_ids))
    return bool(stand.all()), bool(wrong.all())


def ready(frontiers: Frontiers, *slots: int) -> list[tuple[int, tuple[int, ...]]]:
    """Positions of the slots whose draft stands, and its tokens."""
    positions, drafts = frontiers.standing(ints(*slots))
    return [(at, drafts.tokens(i)) for i, at in enumerate(positions.tolist())]


@pytest.mark.parametrize("unverified", [(), (1,), (1, 2)])
@pytest.mark.parametrize("drafted", [(), (1,), (2, 1), (1, 1, 2)])
def test_a_draft_stands_exactly_if_the_targets_tokens_are_those_assumed(
    unverified: tuple[int, ...], drafted: tuple[int, ...]
) -> None:
    """Oracle: every run of tokens that a step over `unverified` can sample. A draft of one token has no chunk."""
    for right in range(len(unverified) + 1):
        for own in (1, 2):
            if right < len(unverified) and own == unverified[right]:
                continue  # then it would have been accepted
            frontiers, sampled = Frontiers(NUM_SLOTS), (*unverified[:right], own)
            stands, is_wrong = learned(frontiers, unverified, draft(*drafted), sampled)
            assert stands == (bool(drafted) and sampled == (*unverified, *drafted[:1]))
            assert is_wrong == (bool(drafted) and right == len(unverified) and not stands)
            assert ready(frontiers, SLOT) == ([(0, drafted)] if stands and len(drafted) > 1 else [])


@pytest.mark.parametrize("token_ids", [(7, 8), (7,), ()])
def test_a_step_that_sampled_fewer_tokens_than_were_assumed_decides_nothing(token_ids: tuple[int, ...]) -> None:
    assert learned(Frontiers(NUM_SLOTS), (7, 8), draft(9), token_ids) == (False, False)


def test_chunks_are_found_in_the_order_of_the_slots_that_are_asked_for() -> None:
    """Of four slots one was not drafted for, and one draft is wrong."""
    frontiers = Frontiers(NUM_SLOTS)
    drafts = joined([draft(1, 2, slot=0), draft(2, 2, slot=1), draft(1, 3, 4, slot=4)])
    stand, wrong = frontiers.learn(drafts, {}, {0: (1,), 1: (1,), 4: (1,)})
    assert (stand.tolist(), wrong.tolist()) == ([True, False, True], [False, True, False])
    assert ready(frontiers, 4, 1, 2, 0) == [(0, (1, 3, 4)), (3, (1, 2))]


def test_no_draft_stands_in_a_slot_that_was_released() -> None:
    frontiers = Frontiers(NUM_SLOTS)
    learned(frontiers, (), joined([draft(1, 2), draft(1, 5, slot=SLOT + 1)]), (1,))
    frontiers.release(SLOT)
    assert ready(frontiers, SLOT, SLOT + 1) == [(1, (1, 5))]


def test_what_was_taken_stands_no_more() -> None:
    frontiers = Frontiers(NUM_SLOTS)
    learned(frontiers, (), draft(1, 2), (1,))
    frontiers.clear()
    assert ready(frontiers, SLOT) == []


def test_only_chosen_slots_draft_and_a_sequence_that_starts_drafts() -> None:
    frontiers, slots = Frontiers(4), ints(3, 0, 2)
    frontiers.choose(slots, ints(1))
    assert frontiers.drafts(np.arange(4)).tolist() == [True, True, False, False]
    frontiers.start(2)
    assert frontiers.drafts(slots).tolist() == [False, True, True]
