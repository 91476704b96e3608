"""Counters of speculation. Oracle: the same steps, counted one sequence at a time in plain Python.

Planted bugs that these tests have caught: the first token of a chunk counts again; what is expected of a draft is
summed over its accepted tokens, not over the verified ones.
"""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from faser.config.speculation import DRAFT_METHODS
from faser.engine.control.speculation.statistics import GAIN, LOAD, PLAIN, SERIAL, SpeculationStatistics
from faser.types.answer import SpeculationSummary
from faser.types.statistics import RoleStats, SpeculationStats
from tests.engine.control.speculation.building import ints, table

CAP, NUM_SLOTS = 5, 6


class Counted:
    """One slot's counts, kept the slow way."""

    def __init__(self) -> None:
        self.sums: Counter[str] = Counter()
        self.depths = [0] * CAP

    def add(self, length: int, kept: int, accepted: int) -> None:
        self.sums.update(
            steps=1,
            gamma_sum=kept,
            drafts=int(kept > 0),
            drafted=length,
            pruned=length - kept,
            verified=kept,
            accepted=accepted,
        )
        for depth in range(accepted):
            self.depths[depth] += 1

    def summary(self, policy: str) -> SpeculationSummary:
        sums: dict[str, Any] = dict(self.sums)
        return SpeculationSummary(policy=policy, accepted_per_position=tuple(self.depths), **sums)


def verified(statistics: SpeculationStatistics, *, method: int, length: int, kept: int, accepted: int) -> None:
    """A step verified a draft of slot 0."""
    drafts = table(ints(0), ints(method), ints(length), np.zeros((1, CAP)))
    statistics.count_drafts(drafts, ints(kept), np.zeros((1, CAP + 1)), ints(accepted))


def snapshot(
    statistics: SpeculationStatistics, *, roles: tuple[RoleStats, ...] = (), cycle: RoleStats | None = None
) -> SpeculationStats:
    return statistics.snapshot(
        policy="faser",
        method="auto",
        roles=roles,
        cycle=cycle,
        draft_share=0.0,
        partition_fallback="",
        paid=(),
        balance=None,
    )


@pytest.mark.parametrize("seed", range(5))
def test_a_request_and_the_engine_count_what_each_step_did(seed: int) -> None:
    random = np.random.default_rng(seed)
    statistics = SpeculationStatistics(NUM_SLOTS, CAP, ("batch",))
    counted = [Counted() for _ in range(NUM_SLOTS)]
    gammas = {"default": [0] * (CAP + 1), "batch": [0] * (CAP + 1)}
    names = [str(random.choice(["default", "batch"])) for _ in range(NUM_SLOTS)]
    for slot, name in enumerate(names):
        statistics.start(slot, name)
    by_method = {method: Counted() for method in DRAFT_METHODS}
    for step in range(100):
        drafting = random.permutation(NUM_SLOTS)[: random.integers(0, NUM_SLOTS)]
        plain = np.setdiff1d(np.arange(NUM_SLOTS), drafting)
        lengths = random.integers(0, CAP + 1, len(drafting))
        kept = random.integers(0, lengths + 1)
        accepted = random.integers(0, kept + 1)
        methods = random.integers(0, len(DRAFT_METHODS), len(drafting))
        num_decided = int(step % 3 == 0)  # 1: chunks of overlapped drafts, with a token before them
        drafts = table(drafting, methods, lengths + num_decided, np.zeros((len(drafting), CAP + 1)))
        survival = np.full((len(drafting), CAP + 1), 0.5)
        statistics.count_drafts(drafts, kept, survival, accepted, num_decided=num_decided)
        statistics.count_undrafted(plain.tolist())
        for slot, method, *three in zip(drafting, methods, lengths, kept, accepted, strict=True):
            counted[slot].add(*map(int, three))
            by_method[DRAFT_METHODS[method]].add(*map(int, three))
            gammas[names[slot]][three[1]] += 1
        for slot in plain:
            counted[slot].add(0, 0, 0)
            gammas[names[slot]][0] += 1
        if step == 30:
            assert statistics.summary(0, None, "faser") == counted[0].summary("faser")

    stats = snapshot(statistics)
    assert stats.gammas == tuple((name, tuple(counts)) for name, counts in gammas.items())
    for each in stats.methods:
        sums = by_method[each.method].sums
        assert (each.drafted, each.pruned, each.verified, each.accepted) == (
            sums["drafted"],
            sums["pruned"],
            sums["verified"],
            sums["accepted"],
        )
        assert each.drafted == each.pruned + each.verified
        assert each.expected == pytest.approx(0.5 * each.verified)
    assert stats.num_drafts == sum(each.sums["drafts"] for each in counted)
    assert stats.accepted_per_position == tuple(
        sum(depths) for depths in zip(*(c.depths for c in counted), strict=True)
    )
    for name, depths in stats.accepted_at:
        own = [each.depths for each, its_class in zip(counted, names, strict=True) if its_class == name]
        assert depths == tuple(sum(each[at] for each in own) for at in range(CAP))
    for slot in range(NUM_SLOTS):
        assert statistics.summary(slot, None, "faser") == counted[slot].summary("faser")


def test_a_preempted_sequence_keeps_its_counts() -> None:
    statistics = SpeculationStatistics(2, CAP, ())
    statistics.start(0, "default")
    verified(statistics, method=2, length=4, kept=3, accepted=2)
    before = statistics.summary(0, None, "fixed")
    statistics.release(0)
    statistics.start(1, "default")
    statistics.count_undrafted([1])

    after = statistics.summary(1, before, "fixed")

    assert (after.steps, after.drafted, after.verified, after.accepted) == (2, 4, 3, 2)
    assert after.accepted_per_position == (1, 1, 0, 0, 0)
    assert after.wasted == 1


def test_a_slot_starts_from_zero_in_the_class_of_its_new_sequence() -> None:
    statistics = SpeculationStatistics(1, CAP, ("batch",))
    statistics.start(0, "batch")
    verified(statistics, method=0, length=2, kept=2, accepted=2)
    statistics.release(0)
    statistics.start(0, "default")

    assert statistics.summary(0, None, "faser").steps == 0
    statistics.count_undrafted([0])
    assert dict(snapshot(statistics).gammas)["default"][0] == 1


def test_details_list_every_draft_that_was_sent_across_a_preemption() -> None:
    statistics = SpeculationStatistics(1, CAP, (), details=True)
    statistics.start(0, "default")
    verified(statistics, method=2, length=4, kept=3, accepted=2)
    verified(statistics, method=2, length=4, kept=0, accepted=0)
    before = statistics.summary(0, None, "fixed")
    statistics.release(0)
    statistics.start(0, "default")
    verified(statistics, method=2, length=1, kept=1, accepted=1)

    assert before.per_step == ((3, 2),)
    assert statistics.summary(0, before, "fixed").per_step == ((3, 2), (1, 1))


def test_tokens_that_are_dropped_count_as_drafted_and_pruned() -> None:
    statistics = SpeculationStatistics(3, CAP, ())
    statistics.start(1, "default")
    statistics.start(2, "default")
    statistics.count_dropped(ints(1, 2), ints(0, 0), ints(3, 1))

    (method, *_) = snapshot(statistics).methods
    assert (method.drafted, method.pruned, method.dropped, method.verified) == (4, 4, 4, 0)
    assert [statistics.summary(slot, None, "faser").pruned for slot in (1, 2)] == [3, 1]


def test_rows_that_left_between_layers_are_counted_by_method() -> None:
    statistics = SpeculationStatistics(1, CAP, ())
    statistics.count_pruned_rows(ints(2, 3, 2), ints(1, 2, 4))
    assert [each.cut for each in snapshot(statistics).methods] == [0, 0, 5, 2, *[0] * (len(DRAFT_METHODS) - 4)]


def test_a_step_has_the_mode_that_it_was_launched_in_and_a_change_of_mode_is_a_switch() -> None:
    statistics = SpeculationStatistics(1, CAP, (), partition="sm")
    for drafts, overlapped in ((False, False), (True, False), (True, True), (False, True), (False, False)):
        statistics.launch(drafts=drafts)
        if overlapped:
            statistics.launch_overlapped()
        statistics.count_mode()

    stats = snapshot(statistics)
    assert dict(stats.mode_steps) == {PLAIN: 2, SERIAL: 1, "sm": 2}
    assert stats.switches == ((PLAIN, SERIAL, 1), (SERIAL, "sm", 1), ("sm", PLAIN, 1))
    assert stats.mode == PLAIN


def test_bypasses_are_counted_by_reason() -> None:
    statistics = SpeculationStatistics(1, CAP, ())
    statistics.count_bypasses(GAIN, 3)
    statistics.count_bypassed(LOAD, np.array([True, False, True]))
    assert dict(snapshot(statistics).bypasses) == {"load": 2, "gain": 3, "memory": 0, "request": 0}


def test_the_time_of_a_step_includes_its_drafting_once() -> None:
    statistics = SpeculationStatistics(1, CAP, ())
    statistics.time_drafting(0.5, 0.25)
    statistics.time_step(2.0, 4.0)
    statistics.time_step(2.0, 4.0)
    (step,) = snapshot(statistics).roles
    assert (step.role, step.predicted_s, step.measured_s) == ("step", 4.5, 8.25)


def test_lanes_are_reported_where_there_are_any_and_forwards_of_the_target_are_called_verify() -> None:
    statistics = SpeculationStatistics(1, CAP, ())
    statistics.time_lanes((1.0, 2.0), (0.5, 0.5), 0.25)
    roles = (RoleStats(role="step", measured_s=7.0), RoleStats(role="pass"))
    cycle = RoleStats(role="step", measured_s=3.0)

    assert [each.role for each in snapshot(statistics, roles=roles).roles] == ["step", "verify", "pass"]
    found = snapshot(statistics, roles=roles, cycle=cycle)
    assert [(each.role, each.measured_s) for each in found.roles] == [
        ("step", 0.0),
        ("verify", 7.0),
        ("pass", 0.0),
        ("step", 3.0),
        ("verify", 2.0),
        ("draft", 0.5),
    ]
    assert found.overlap_s == 0.25
