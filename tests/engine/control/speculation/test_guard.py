"""The guard: what it decides of drafts whose gain is given.

Planted bugs that these tests have caught: a gain with its sign turned; seconds that are not divided by those of a
plain step; long steps that count in full; a decision that is never tested again; a look that is not over once a
step has had it; hope that was disappointed before and is believed again; one pair of phases that is
enough for a gain.
"""

from collections.abc import Iterator
from itertools import pairwise
from statistics import fmean

import numpy as np
import pytest

from faser.engine.control.clock import SimulatedClock
from faser.engine.control.speculation.guard import (
    FIRST_WAIT_S,
    LIKELY,
    LONG_PHASE_STEPS,
    LONGEST_WAIT_S,
    LOOK_SHARE,
    MOST_LOOK_STEPS,
    PHASE_STEPS,
    Guard,
    GuardedStep,
)

PLAIN_S = 0.003
PAIR_STEPS = PHASE_STEPS + LONG_PHASE_STEPS


class World:
    """Steps of num_sequences. gain: tokens per second with drafts over those without.

    late: steps that begin before the first of them is observed.
    """

    def __init__(
        self, *, gain: float, num_sequences: int = 4, noise: float = 0.1, seed: int = 0, late: int = 0
    ) -> None:
        self.gain, self.num_sequences, self.noise, self.late = gain, num_sequences, noise, late
        self.clock = SimulatedClock()
        self.guard = Guard(self.clock, seed=seed)
        self.growth = 1.0  # of every step: a batch whose context grows
        self.slowed = 1.0  # of every step: other programs on the machine
        self.expected = 1.1  # gain, by the policy
        self._random = np.random.default_rng(seed)
        self._unseen: list[tuple[GuardedStep, int, float]] = []

    def steps(self, count: int) -> Iterator[bool]:
        """Whether the guard allowed drafts."""
        for _ in range(count):
            yield self.step()

    def step(self) -> bool:
        drafts = self.guard.allows(self.num_sequences)
        plain_s = PLAIN_S * self.growth
        step = GuardedStep(num_sequences=self.num_sequences, drafts=drafts, plain_s=plain_s)
        self.guard.launched(step)
        if drafts:
            self.guard.expect(self.num_sequences, self.expected)
        accepted = int(self._random.binomial(4 * self.num_sequences, 0.1)) if drafts else 0
        seconds = plain_s * self.slowed * (1.4 / self.gain if drafts else 1.0)
        seconds *= abs(1 + self.noise * self._random.normal())
        self.clock.advance(seconds)
        self._unseen.append((step, self.num_sequences + accepted, seconds))
        if len(self._unseen) > self.late:
            self.guard.observe(*self._unseen.pop(0))
        return drafts

    def decided(self) -> bool | None:
        (paid,) = self.guard.paid() or [None]
        return None if paid is None else paid.drafts


@pytest.mark.parametrize("gain, drafts", [(0.9, False), (0.96, False), (1.06, True), (1.3, True), (2.5, True)])
@pytest.mark.parametrize("num_sequences", [1, 4, 32])
@pytest.mark.parametrize("late", [0, 2])
def test_what_pays_is_found_and_nothing_else(gain: float, drafts: bool, num_sequences: int, late: int) -> None:
    """Of 12 engines at most one decides wrongly, and none of those with drafts that lose a tenth."""
    worlds = [World(gain=gain, num_sequences=num_sequences, seed=seed, late=late) for seed in range(12)]
    for world in worlds:
        for _ in world.steps(6000):
            if world.decided() is not None:
                break
    wrong = [world.decided() is not drafts for world in worlds]
    assert sum(wrong) <= (0 if abs(gain - 1) > 0.09 else 1)


@pytest.mark.parametrize("gain, drafts, pairs", [(2.5, True, 2), (4.0, True, 1), (0.4, False, 1)])
def test_what_is_obvious_takes_a_pair_or_two(gain: float, drafts: bool, pairs: int) -> None:
    world = World(gain=gain, num_sequences=16)
    for _ in world.steps(PAIR_STEPS + 3):  # the first step and one beside each phase do not count
        pass
    assert world.decided() is (drafts if pairs == 1 else None)
    for _ in world.steps(PAIR_STEPS + 3):
        pass
    assert world.decided() is drafts


def test_a_program_beside_this_one_makes_no_losing_drafts_look_obvious() -> None:
    """It takes half of the machine now and then, for as long as a phase or two."""
    gains = 0
    for seed in range(100):
        world, random = World(gain=0.9, num_sequences=16, seed=seed), np.random.default_rng(seed)
        for _ in range(50):
            world.slowed = random.choice([1.0, 2.0])
            for _ in world.steps(int(random.integers(4, LONG_PHASE_STEPS))):
                pass
            if world.decided():
                gains += 1
                break
    assert gains < 5


@pytest.mark.parametrize("expected, pair_steps", [(LIKELY - 0.05, PAIR_STEPS), (3.0, 2 * PHASE_STEPS)])
def test_drafts_take_half_of_a_test_if_the_policy_expects_much_else_a_quarter(
    expected: float, pair_steps: int
) -> None:
    """Either way a pair has one phase of them, and which one comes first is drawn."""
    world = World(gain=1.0, noise=0.0, num_sequences=64)
    world.expected = expected
    for _ in world.steps(
        1 + PAIR_STEPS
    ):  # the first step is long as a rule, and the first pair expects nothing yet
        pass
    allowed = list(world.steps(20 * pair_steps))
    pairs = [allowed[at : at + pair_steps] for at in range(0, len(allowed), pair_steps)]
    assert all(sum(pair) == PHASE_STEPS for pair in pairs)
    assert all(all(pair[:PHASE_STEPS]) or all(pair[-PHASE_STEPS:]) for pair in pairs)
    assert len({pair[0] for pair in pairs}) == 2


def test_drafts_that_lose_a_tenth_cost_next_to_nothing() -> None:
    """Oracle: the same steps without drafts. Half a minute of one request."""
    world = World(gain=0.9, num_sequences=1)
    allowed = list(world.steps(10_000))
    assert sum(allowed) / len(allowed) < 0.1
    late = allowed[5000:]
    assert sum(late) == pytest.approx(len(late) * LOOK_SHARE / 0.1, abs=40)  # and a test after half a minute


def test_a_batch_that_grows_counts_for_neither_side() -> None:
    """Steps become an eighth longer from phase to phase, with drafts and without."""
    world = World(gain=1.0, num_sequences=64, noise=0.02)
    for _ in range(800):
        world.growth *= 1.008
        world.step()
    (paid,) = world.guard.paid()
    assert paid.ratio == pytest.approx(1.0, abs=0.02)
    assert paid.high - paid.low < 0.04


def test_rare_long_steps_decide_nothing() -> None:
    """One step in 16 waits for a second, by chance only in phases with drafts, which bring twice the tokens."""
    world = World(gain=2.0, num_sequences=16)
    for number in range(400):
        step = GuardedStep(num_sequences=16, drafts=world.guard.allows(16), plain_s=PLAIN_S)
        stalls = step.drafts and number % 16 == 8
        world.guard.observe(step, 32 if step.drafts else 16, 1.0 if stalls else PLAIN_S)
    assert world.decided() is True


def test_what_was_decided_is_tested_again_later_and_later() -> None:
    world = World(gain=0.8)
    for _ in world.steps(2000):
        pass
    assert world.decided() is False
    began = []
    for _ in range(4):
        before_s = world.clock.now()
        while world.decided() is False and world.clock.now() < before_s + 1000:
            world.clock.advance(1.0)
            world.guard.allows(world.num_sequences)
        began.append(world.clock.now() - before_s)
        assert any(world.decided() is False for _ in world.steps(2000))
    assert began[0] <= FIRST_WAIT_S + 1
    assert all(1.8 < later / sooner < 2.2 for sooner, later in pairwise(began[1:]))


@pytest.mark.parametrize("gain, drafts", [(1.5, True), (0.8, False)])
def test_what_was_found_before_is_confirmed_by_half_a_test(gain: float, drafts: bool) -> None:
    world = World(gain=gain, num_sequences=32)
    for _ in world.steps(1000):
        pass
    assert world.decided() is drafts
    world.clock.advance(LONGEST_WAIT_S)
    world.step()
    assert world.decided() is None
    test = list(world.steps(2 * PAIR_STEPS + 4))  # a step beside each phase does not count
    assert world.decided() is drafts
    assert 0.2 < fmean(test) < 0.5


@pytest.mark.parametrize("before, after", [(1.5, 0.9), (0.9, 1.5)])
def test_what_was_found_before_gives_way(before: float, after: float) -> None:
    world = World(gain=before)
    for _ in world.steps(2000):
        pass
    world.gain = after
    world.clock.advance(LONGEST_WAIT_S)
    for _ in world.steps(3000):
        pass
    assert world.decided() is (after > 1)


def test_drafts_that_begin_to_pay_are_found_without_waiting() -> None:
    """The policy, asked now and then, sees that the texts are others."""
    world = World(gain=0.9)
    for _ in world.steps(3000):
        pass
    assert world.decided() is False
    world.gain, world.expected = 2.0, 2.2
    began_s = world.clock.now()
    allowed = list(world.steps(8 * MOST_LOOK_STEPS))
    assert world.clock.now() - began_s < FIRST_WAIT_S / 4
    assert all(allowed[-MOST_LOOK_STEPS:])


def test_a_policy_that_always_hopes_is_not_believed_twice() -> None:
    """It expects half as much again, and the test finds less than nothing."""
    world = World(gain=0.93)
    world.expected = 1.5
    allowed = list(world.steps(9000))
    assert world.clock.now() < FIRST_WAIT_S
    assert fmean(allowed[3000:]) < 1.5 * LOOK_SHARE / 0.07


def test_every_load_is_decided_by_itself() -> None:
    clock = SimulatedClock()
    guard = Guard(clock)
    for number in range(4000):
        count = (1, 30)[number % 2]
        step = GuardedStep(num_sequences=count, drafts=guard.allows(count), plain_s=PLAIN_S)
        guard.launched(step)
        seconds = PLAIN_S * (1.5 if step.drafts and count == 30 else 1.0)
        clock.advance(seconds)
        guard.observe(step, count + (count // 3 or 1) * step.drafts, seconds)
    few, many = guard.paid()
    assert (few.sequences, many.sequences) == ((1, 1), (16, 31))
    assert (few.drafts, many.drafts) == (True, False)
    assert few.ratio == pytest.approx(2.0)
    assert many.ratio == pytest.approx(40 / 30 / 1.5)
    assert few.low <= few.ratio <= few.high
