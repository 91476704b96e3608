"""Counters of speculation. Oracle: the same steps, counted one sequence at a time in plain Python."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from faser.config.drafters import DRAFT_METHODS
from faser.engine.control.speculation.acceptance.estimator import Outcomes
from faser.engine.control.speculation.request_statistics import RequestStatistics
from faser.types import SpeculationSummary

Floats = NDArray[np.float64]

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


def array(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def verdict(*, method: int, length: int, kept: int, accepted: int) -> tuple[Outcomes, Floats]:
    """On slot 0; and what was expected of it."""
    outcomes = Outcomes(
        slots=array(0),
        methods=array(method),
        drafted=array(length),
        verified=array(kept),
        accepted=array(accepted),
        confidences=np.zeros((1, CAP)),
    )
    return outcomes, np.zeros((1, CAP + 1))


@pytest.mark.parametrize("seed", range(5))
def test_a_request_and_the_engine_count_what_each_step_did(seed: int) -> None:
    random = np.random.default_rng(seed)
    tally = RequestStatistics(NUM_SLOTS, CAP, ("batch",))
    counted = [Counted() for _ in range(NUM_SLOTS)]
    gammas = {"default": [0] * (CAP + 1), "batch": [0] * (CAP + 1)}
    names = [str(random.choice(["default", "batch"])) for _ in range(NUM_SLOTS)]
    for slot, name in enumerate(names):
        tally.start(slot, name)
    by_method = {method: Counted() for method in DRAFT_METHODS}
    for step in range(100):
        drafting = random.permutation(NUM_SLOTS)[: random.integers(0, NUM_SLOTS)]
        plain = np.setdiff1d(np.arange(NUM_SLOTS), drafting)
        lengths = random.integers(0, CAP + 1, len(drafting))
        kept = random.integers(0, lengths + 1)
        accepted = random.integers(0, kept + 1)
        methods = random.integers(0, len(DRAFT_METHODS), len(drafting))
        tally.drafted(
            Outcomes(
                slots=drafting,
                methods=methods,
                drafted=lengths,
                verified=kept,
                accepted=accepted,
                confidences=np.zeros((len(drafting), CAP)),
            ),
            np.full((len(drafting), CAP + 1), 0.5),
        )
        tally.plain(plain)
        for slot, method, *three in zip(drafting, methods, lengths, kept, accepted, strict=True):
            counted[slot].add(*map(int, three))
            by_method[DRAFT_METHODS[method]].add(*map(int, three))
            gammas[names[slot]][three[1]] += 1
        for slot in plain:
            counted[slot].add(0, 0, 0)
            gammas[names[slot]][0] += 1
        if step == 30:
            assert tally.summary(0, None, "faser") == counted[0].summary("faser")

    stats = tally.stats("faser", "auto")
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
    for slot in range(NUM_SLOTS):
        assert tally.summary(slot, None, "faser") == counted[slot].summary("faser")


def test_a_preempted_sequence_keeps_its_counts() -> None:
    tally = RequestStatistics(2, CAP, ())
    tally.start(0, "default")
    tally.drafted(*verdict(method=2, length=4, kept=3, accepted=2))
    before = tally.summary(0, None, "fixed")
    tally.release(0)
    tally.start(1, "default")
    tally.plain(array(1))

    after = tally.summary(1, before, "fixed")

    assert (after.steps, after.drafted, after.verified, after.accepted) == (2, 4, 3, 2)
    assert after.accepted_per_position == (1, 1, 0, 0, 0)
    assert after.wasted == 1


def test_a_slot_starts_from_zero_in_the_class_of_its_new_sequence() -> None:
    tally = RequestStatistics(1, CAP, ("batch",))
    tally.start(0, "batch")
    tally.drafted(*verdict(method=0, length=2, kept=2, accepted=2))
    tally.release(0)
    tally.start(0, "default")

    assert tally.summary(0, None, "faser").steps == 0
    tally.plain(array(0))
    assert dict(tally.stats("faser", "auto").gammas)["default"][0] == 1


def test_details_list_every_draft_that_was_sent_across_a_preemption() -> None:
    tally = RequestStatistics(1, CAP, (), details=True)
    tally.start(0, "default")
    tally.drafted(*verdict(method=2, length=4, kept=3, accepted=2))
    tally.drafted(*verdict(method=2, length=4, kept=0, accepted=0))
    before = tally.summary(0, None, "fixed")
    tally.release(0)
    tally.start(0, "default")
    tally.drafted(*verdict(method=2, length=1, kept=1, accepted=1))

    assert before.per_step == ((3, 2),)
    assert tally.summary(0, before, "fixed").per_step == ((3, 2), (1, 1))
