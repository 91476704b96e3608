"""Admission on an engine whose pace is known: what is predicted, what becomes of requests, and what it learns."""

import math
from dataclasses import replace

import pytest

from faser.engine.client.admission import Admission, Margin
from faser.engine.contract.latency_model import Pace
from faser.errors import TargetError
from faser.types.outlook import Decision, Target
from faser.types.request import NO_TARGETS, REFUSE, WAIT, Request, Slo, SpeculationParams
from faser.types.sampling import SamplingParams

STEP_S, ROW_S, SLOTS = 0.01, 0.001, 8
PACE = Pace(
    sequences=(1, SLOTS),
    step_s=(STEP_S, 2 * STEP_S),
    tokens=(1.0, 1.0),
    rows=(1, 1000),
    rows_s=(STEP_S, STEP_S + 999 * ROW_S),
    most_rows=100,
)
CLASSES = {
    "chat": SpeculationParams(class_name="chat", slo=Slo(ttft_ms=200), admission=REFUSE),
    "pace": SpeculationParams(class_name="pace", slo=Slo(tpot_ms=15), admission=REFUSE),
    "mild": SpeculationParams(class_name="mild", slo=Slo(ttft_ms=200), admission=WAIT),
    "slips": SpeculationParams(class_name="slips", slo=Slo(ttft_ms=200), admission="batch", max_tokens=4),
    "batch": SpeculationParams(class_name="batch", max_tokens=2),
}

Decisions = list[tuple[str, Decision, Target]]


def admission(*, knows_pace: bool = True) -> tuple[Admission, Decisions]:
    """With margins of 1: predictions are taken to be right."""
    decisions: Decisions = []
    made = Admission(CLASSES.__getitem__, lambda *each: decisions.append(each))
    made.first_margin.value = made.token_margin.value = 1.0
    made.pace = PACE if knows_pace else None
    return made, decisions


def asked(name: str, class_name: str = "batch", *, prompt: int = 10, at_s: float = 0.0, n: int = 1) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=(1,) * prompt,
        sampling=SamplingParams(n=n, max_tokens=100),
        arrival_s=at_s,
        speculation=CLASSES[class_name],
    )


def fill(made: Admission, prompts: int, *, count: int = 1) -> None:
    """Requests that wait for their first tokens."""
    for number in range(count):
        made.admit(asked(f"before-{number}", prompt=prompts), 0.0)


def test_a_request_without_targets_is_let_in_as_it_is_and_nothing_is_decided() -> None:
    made, decisions = admission()
    fill(made, 5000, count=20)
    request = asked("one", prompt=5000)
    assert made.admit(request, 0.0) is request
    assert decisions == []


def test_a_target_that_can_be_met_makes_the_request_due() -> None:
    made, decisions = admission()
    found = made.admit(asked("one", "chat", at_s=5.0), 5.0)
    assert found.due_s == pytest.approx(5.2)
    assert decisions == [("chat", Decision.MET, Target.NONE)]


def test_prompts_that_are_due_before_are_waited_for_and_later_ones_are_not() -> None:
    """A hundred rows take a step and .1 s; a batch's prompt has no due time, so a chat's goes first."""
    made, _ = admission()
    fill(made, 1000)
    alone = made.predict(asked("two", "chat"), 0.0).ttft_s
    for number in range(3):
        made.admit(asked(f"chat-{number}", "chat", prompt=20), 0.0)
    later = made.predict(asked("two", "chat", at_s=0.001), 0.001).ttft_s
    assert later - alone == pytest.approx(60 * ROW_S, abs=STEP_S)
    assert made.predict(asked("batch"), 0.0).ttft_s > 1.0


def test_a_first_token_that_has_come_is_not_waited_for() -> None:
    made, _ = admission()
    for number in range(3):
        made.admit(asked(f"chat-{number}", "chat", prompt=30), 0.0)
    before = made.predict(asked("late", "chat"), 0.0).ttft_s
    for number in range(3):
        made.first_token(f"chat-{number}", 0.05)
    assert made.predict(asked("late", "chat"), 0.0).ttft_s == pytest.approx(before - 90 * ROW_S, abs=2 * STEP_S)


def test_without_a_slot_it_waits_for_answers_to_end() -> None:
    made, _ = admission()
    fill(made, 1, count=SLOTS)
    for number in range(SLOTS):
        made.first_token(f"before-{number}", 0.01)
    full = made.predict(asked("late", "chat"), 0.0).ttft_s
    made.end("before-0", num_tokens=64, tpot_s=None)
    free = made.predict(asked("late", "chat"), 0.0).ttft_s
    assert full - free == pytest.approx(64 * 2 * STEP_S / SLOTS, rel=0.05)


def test_a_class_that_refuses_says_why_and_when_to_come_back() -> None:
    made, decisions = admission()
    hold_up(made)
    late = asked("chat", "chat", prompt=3000, at_s=0.1)
    with pytest.raises(
        TargetError, match=r"TTFT target of 200 ms cannot be met now.* retry after \d+ s"
    ) as raised:
        made.admit(late, 0.1)
    expected_s = made.predict(late, 0.1).ttft_s
    assert expected_s > 3
    assert raised.value.retry_after_s == max(1, math.ceil(expected_s - 0.2))
    assert decisions[-1] == ("chat", Decision.REFUSED, Target.TTFT)


def test_a_refused_request_leaves_nothing_behind() -> None:
    made, _ = admission()
    hold_up(made)
    before = made.predict(asked("chat", "chat"), 0.0)
    with pytest.raises(TargetError):
        made.admit(asked("chat", "chat", prompt=100), 0.0)
    assert made.predict(asked("chat", "chat"), 0.0) == before


def test_too_many_samples_make_a_target_per_token_unattainable() -> None:
    """Oracle: a step of n samples takes 10 ms and a seventh of that for each sample after the first."""
    made, decisions = admission()
    for number in range(4):
        made.admit(asked(f"{number}", "pace"), 0.0)
    with pytest.raises(TargetError, match="TPOT target of 15 ms"):
        made.admit(asked("fifth", "pace"), 0.0)
    assert [each[1] for each in decisions] == [*[Decision.MET] * 4, Decision.REFUSED]


def test_samples_without_a_target_per_token_count_as_far_as_the_engine_starts_them() -> None:
    """Of the three that fit within 13.5 ms two may be unpaced next to the first; four wait.

    Those that run must end before another one starts; those that wait, and are due later, start after it.
    """
    made, _ = admission()
    made.admit(asked("first", "pace"), 0.0)
    fill(made, 1, count=6)
    assert made.predict(asked("late", "chat"), 0.0).ttft_s < 4 * STEP_S
    made.begun({f"before-{number}": 1 for number in range(6)})
    assert made.predict(asked("second", "pace"), 0.0).tpot_s == pytest.approx(STEP_S * (1 + 2 / 7), rel=0.01)
    waits = made.predict(asked("late", "chat"), 0.0).ttft_s
    assert waits == pytest.approx(5 * 64 * STEP_S * (1 + 1 / 7) / 2 + 2 * STEP_S, rel=0.02)


def test_a_class_that_waits_is_let_in_without_being_due() -> None:
    """Deadlines that are lost already must not delay those that can be met."""
    made, decisions = admission()
    hold_up(made)
    found = made.admit(asked("late", "mild", prompt=100), 0.0)
    assert (found.due_s, found.is_patient) == (None, True)
    assert decisions[-1] == ("mild", Decision.WAITS, Target.TTFT)


def test_a_target_per_token_that_cannot_be_met_is_none_to_the_engine() -> None:
    """Two samples take 11.4 ms a token. Next to them a target of 11 ms would slow down others and be missed."""
    made, _ = admission()
    tight = replace(asked("one", "pace"), speculation=SpeculationParams(slo=Slo(tpot_ms=11), admission=WAIT))
    assert made.admit(replace(tight, request_id="alone"), 0.0).token_target_ms == 11
    fill(made, 1, count=3)
    late = made.admit(tight, 0.0)
    assert (late.is_patient, late.token_target_ms, late.speculation.slo.tpot_ms) == (True, None, 11)


def test_a_class_that_waits_is_due_while_the_prediction_itself_is_within_its_target() -> None:
    """150 ms are predicted, with the margin of 2 more than the 200 ms that it has."""
    made, decisions = admission()
    made.admit(asked("before", prompt=1), 0.0)
    made.first_margin.value = 2.0
    found = made.admit(asked("one", "mild", prompt=100), 0.0)
    assert found.due_s == pytest.approx(0.2)
    assert not found.is_patient
    assert decisions[-1] == ("mild", Decision.WAITS, Target.TTFT)


def test_a_request_that_waits_for_others_does_not_make_admission_stricter() -> None:
    made, _ = admission()
    hold_up(made)
    made.admit(asked("late", "mild", prompt=100), 0.0)
    assert made.admit(asked("later", "mild", prompt=100), 0.0).is_patient
    made.first_token("late", 60.0)
    assert made.first_margin.value == 1.0


def test_an_idle_engine_lets_in_what_it_can_meet_whatever_has_been_before() -> None:
    made, _ = admission()
    made.first_margin.value = 4.0
    assert made.admit(asked("one", "chat", prompt=100), 0.0).due_s is not None
    with pytest.raises(TargetError):
        made.admit(asked("two", "chat", prompt=100), 0.0)


def hold_up(made: Admission) -> None:
    """A prompt that takes more than half of the time that a chat has, and is due first."""
    made.admit(asked("first", "mild", prompt=120), 0.0)


def test_a_class_that_degrades_runs_as_another_one_with_its_targets_and_limits() -> None:
    made, decisions = admission()
    hold_up(made)
    found = made.admit(asked("late", "slips", prompt=100), 0.0)
    assert found.speculation.class_name == "batch"
    assert found.speculation.slo == NO_TARGETS
    assert found.speculation.max_tokens == 2
    assert found.due_s is None
    assert decisions[-1] == ("slips", Decision.DEGRADED, Target.TTFT)


def test_before_the_engine_has_a_pace_every_request_is_let_in_and_is_due() -> None:
    made, _ = admission(knows_pace=False)
    hold_up(made)
    assert made.admit(asked("chat", "chat", at_s=1.0), 1.0).due_s == pytest.approx(1.2)


def test_what_nine_in_ten_requests_needed_is_compared_with_the_target() -> None:
    """Oracle: the quantile of the ratios that were seen, where no time was within its target."""
    margin = Margin()
    for number in range(4000):
        margin.follow(1.0 + (number * 7919 % 1000) / 1000, 1.0, 0.5)
    assert margin.value == pytest.approx(1.9, rel=0.06)


def test_times_longer_than_predicted_make_admission_stricter_only_where_they_miss_targets() -> None:
    """The engine fills steps with prompts up to the targets, so times within them are no error."""
    for times, wanted in ((30.0, 1.5), (5.0, 1.0)):
        made, _ = admission()
        for number in range(200):
            request = asked(str(number), "chat", at_s=float(number))
            made.admit(request, float(number))
            made.first_token(str(number), number + times * made.predict(request, float(number)).ttft_s)
            made.end(str(number), num_tokens=10, tpot_s=0.01)
        assert (made.first_margin.value > wanted) == (wanted > 1)


def test_tokens_without_a_target_teach_nothing_of_those_with_one() -> None:
    """Sequences without a target per token are served as far as the others leave room."""
    made, _ = admission()
    for number in range(100):
        made.admit(asked(str(number), "chat", at_s=float(number)), float(number))
        made.first_token(str(number), number + 0.01)
        made.end(str(number), num_tokens=10, tpot_s=10.0)
    assert made.token_margin.value == 1.0


def test_of_a_prompt_that_has_begun_only_the_rest_is_waited_for() -> None:
    made, _ = admission()
    made.admit(asked("first", "mild", prompt=100), 0.0)
    whole = made.predict(asked("late", "chat", at_s=0.01), 0.01).ttft_s
    made.begun({"first": 10, "gone": 50})
    assert whole - made.predict(asked("late", "chat", at_s=0.01), 0.01).ttft_s == pytest.approx(
        90 * ROW_S, abs=2 * STEP_S
    )


def test_an_idle_engine_takes_a_request_every_few_seconds_so_that_a_slow_pace_does_not_last() -> None:
    made, decisions = admission()
    made.admit(asked("slow"), 0.0)
    made.first_token("slow", 1.0)
    made.end("slow", num_tokens=9, tpot_s=STEP_S)
    made.pace = replace(PACE, step_s=tuple(10 * each for each in PACE.step_s))
    with pytest.raises(TargetError):
        made.admit(asked("soon", "pace", at_s=5.9), 5.9)
    found = made.admit(asked("probe", "pace", at_s=6.0), 6.0)
    assert found.token_target_ms == 15
    with pytest.raises(TargetError):
        made.admit(asked("beside", "pace", at_s=6.1), 6.1)
    assert [decision for _, decision, _ in decisions] == [Decision.REFUSED, Decision.WAITS, Decision.REFUSED]
    made.first_token("probe", 6.2)
    made.end("probe", num_tokens=9, tpot_s=STEP_S)
    with pytest.raises(TargetError):
        made.admit(asked("after", "pace", at_s=6.3), 6.3)
    made.pace = PACE
    made.admit(asked("again", "pace", at_s=6.4), 6.4)
    assert decisions[-1] == ("pace", Decision.MET, Target.NONE)


def test_the_cached_part_of_a_prompt_is_known_by_its_first_block() -> None:
    """Ninety of a hundred tokens are a system prompt; another one, and another salt, are as good as new."""
    made, _ = admission()
    made.admit(asked("first", "chat", prompt=100), 0.0)
    made.first_token("first", 0.1, num_cached=90)
    made.end("first", num_tokens=10, tpot_s=None)
    alike = asked("second", "chat", prompt=100, at_s=60.0)
    salted = replace(alike, cache_salt="other")
    other = replace(alike, prompt_token_ids=(2,) * 100)
    first = [made.predict(each, 60.0).ttft_s for each in (alike, salted, other)]
    assert first[1] == first[2]
    assert first[1] - first[0] == pytest.approx(90 * ROW_S, abs=STEP_S)


# Targets that were given up, and come back


def degraded(made: Admission, name: str = "late", class_name: str = "slips", *, prompt: int = 100) -> Request:
    """A request that its class could not keep when it came; it would alone."""
    hold_up(made)
    found = made.admit(asked(name, class_name, prompt=prompt), 0.0)
    assert found.due_s is None
    return found


def test_a_degraded_request_gets_its_class_back_when_the_line_has_become_shorter() -> None:
    made, decisions = admission()
    degraded(made)
    assert made.restore(0.01) == []
    made.end("first", num_tokens=0, tpot_s=None)
    (found,) = made.restore(0.07)
    assert found.request_id == "late"
    assert found.due_s == pytest.approx(0.2)
    assert found.speculation == CLASSES["slips"]
    assert decisions[-1] == ("slips", Decision.RESTORED, Target.NONE)
    assert made.restore(0.13) == []


def test_a_patient_request_gets_its_targets_back_too() -> None:
    made, decisions = admission()
    assert degraded(made, class_name="mild").is_patient
    made.end("first", num_tokens=0, tpot_s=None)
    (found,) = made.restore(0.05)
    assert not found.is_patient
    assert found.due_s == pytest.approx(0.2)
    assert decisions[-1] == ("mild", Decision.RESTORED, Target.NONE)


def test_requests_that_wait_behind_it_keep_no_degraded_request_from_its_class() -> None:
    """Thirty requests of a batch wait for their turn, which comes twenty seconds after they came."""
    made, decisions = admission()
    made.admit(asked("held", "pace"), 0.0)
    made.first_token("held", 0.0)
    fill(made, 1, count=30)
    degraded(made)
    made.end("first", num_tokens=0, tpot_s=None)
    (found,) = made.restore(0.05)
    assert (found.request_id, decisions[-1][1]) == ("late", Decision.RESTORED)


@pytest.mark.parametrize("now_s", [0.12, 0.25])
def test_a_first_token_that_would_come_too_late_gives_nothing_back(now_s: float) -> None:
    """At .12 s its prompt takes longer than what is left; at .25 s nothing is, and it is looked at no more."""
    made, decisions = admission()
    degraded(made)
    made.end("first", num_tokens=0, tpot_s=None)
    count = len(decisions)
    assert made.restore(now_s) == []
    assert len(decisions) == count
    made.pace = replace(PACE, rows_s=(STEP_S, STEP_S + ROW_S))  # prompts cost nothing any more
    assert len(made.restore(now_s + 0.06)) == (now_s == 0.12)


def test_who_has_a_first_token_or_has_left_is_looked_at_no_more() -> None:
    made, _ = admission()
    degraded(made, "begun")
    made.admit(asked("gone", "slips", prompt=100), 0.0)
    made.end("first", num_tokens=0, tpot_s=None)
    made.first_token("begun", 0.04)
    made.end("gone", num_tokens=0, tpot_s=None)
    assert made.restore(0.05) == []


def test_a_request_that_fell_through_several_classes_gets_back_the_best_that_can_be_kept() -> None:
    """Of 100 rows the first class has 50 ms for, the second 200."""
    first = SpeculationParams(class_name="first", slo=Slo(ttft_ms=50), admission="slips")
    decisions: Decisions = []
    made = Admission({**CLASSES, "first": first}.__getitem__, lambda *each: decisions.append(each))
    made.pace = PACE
    hold_up(made)
    fell = made.admit(replace(asked("late", prompt=100), speculation=first), 0.0)
    assert fell.speculation.class_name == "batch"
    made.end("first", num_tokens=0, tpot_s=None)
    (found,) = made.restore(0.02)
    assert found.speculation.class_name == "slips"
    assert found.due_s == pytest.approx(0.2)


def test_what_is_given_back_counts_and_leaves_as_if_it_had_come_so() -> None:
    made, _ = admission()
    before = made.predict(asked("probe", "pace"), 0.0)
    for number in range(4):
        made.admit(asked(f"{number}", "pace"), 0.0)
    tight = replace(asked("tight"), speculation=SpeculationParams(slo=Slo(tpot_ms=15), admission="batch"))
    assert made.admit(tight, 0.0).token_target_ms is None
    made.end("0", num_tokens=0, tpot_s=None)
    (found,) = made.restore(0.05)
    assert found.token_target_ms == 15
    with pytest.raises(TargetError):
        made.admit(asked("sixth", "pace"), 0.05)
    for name in ("1", "2", "3", "tight"):
        made.end(name, num_tokens=0, tpot_s=None)
    assert made.predict(asked("probe", "pace"), 0.0) == before


def test_few_predictions_are_made_at_a_time_and_nobody_is_forgotten() -> None:
    """Forty in line, of which the last one alone could be served in time now."""
    made, _ = admission()
    made.pace = replace(PACE, sequences=(1, 64))
    slow = SpeculationParams(slo=Slo(ttft_ms=2000), admission="batch")
    assert made.admit(replace(asked("first", prompt=1700), speculation=slow), 0.0).due_s == 2.0
    for number in range(40):
        request = asked(f"{number}", prompt=200 if number == 39 else 1950)
        assert made.admit(replace(request, speculation=slow), 0.0).due_s is None
    made.end("first", num_tokens=0, tpot_s=None)
    found: list[Request] = []
    calls = 0
    while not found and calls < 20:
        calls += 1
        found = made.restore(0.05 + 0.06 * calls)
        assert made.restore(0.05 + 0.06 * calls + 0.01) == []  # too soon to look again
    assert [each.request_id for each in found] == ["39"]
    assert calls == 10


def test_the_shortfall_says_how_far_a_newcomer_would_fall_and_changes_nothing() -> None:
    made, decisions = admission()
    assert made.shortfall(asked("one", "slips", prompt=100), 0.0) == 0
    hold_up(made)
    count, before = len(decisions), made.predict(asked("probe", "chat"), 0.0)
    for class_name, expected in (("batch", 0), ("chat", 1), ("mild", 1), ("slips", 2)):
        assert made.shortfall(asked("one", class_name, prompt=100), 0.0) == expected
    tight = replace(asked("tight"), speculation=SpeculationParams(slo=Slo(tpot_ms=1), admission="batch"))
    assert made.shortfall(tight, 0.0) == 2
    assert made.predict(asked("probe", "chat"), 0.0) == before
    assert len(decisions) == count
