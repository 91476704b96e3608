"""Guard: whether drafts pay at the present load, by tokens and seconds alone.

What a policy expects of drafts is a prediction: of acceptance, of steps, of the host's work. Whatever of it is
wrong, the guard sees the outcome. At every load it compares phases of steps with drafts and phases without:

    one pair      | 8 steps with drafts | 24 steps without |       the two in random order
    its gain      log(tokens per second with) - log(tokens per second without)
    decided       once the mean gain of the pairs is 2.6 standard errors away from 0, or obvious: a loss by one
                  pair, a gain by two, or by one if it is twice as much; after 600 pairs: no drafts

Where the policy expects clearly more of drafts, both phases have 8 steps. Otherwise a quarter of the steps have
drafts: so a test costs a quarter of what they lose.

The seconds are those from the beginning of a step to the beginning of the next one, so deciding, learning,
messages and whatever else runs on the machine are in them. They count in units of what a step without drafts takes
by the table, so that a batch that grows during a pair counts for neither side.

What is decided is tested again after 30 seconds, then after 1, 2, 4 … 10 minutes; what was found before counts as
two pairs, so two more confirm it. Where drafts do not pay, the policy is still asked once in 8 to 64 steps: so
rarely that what drafts lose there is a 500th of the time. Where it then expects clearly more than it did in the
test that failed, the texts are others, and the next test begins at once.
"""

import math
import random
from dataclasses import dataclass, field

from faser.engine.control.clock import Clock
from faser.types import PaidRatio

PHASE_STEPS, LONG_PHASE_STEPS = 8, 24
LIKELY = 1.1  # gain that the policy has to expect for phases of equal length; it expects the best of many
LEAST_PAIRS, MOST_PAIRS = 4, 600
OBVIOUS = 0.5  # mean gain, or loss, for which hardly any pairs are enough: two thirds more tokens, or a third less
SURE = 2.6  # standard errors
FIRST_WAIT_S, LONGEST_WAIT_S = 30.0, 600.0
LOOK_SHARE, LEAST_LOOK_STEPS, MOST_LOOK_STEPS = 0.002, 8, 64
HOPE = 1.15  # gain that the policy has to expect for a test before its time, corrected by how wrong it was before
_REMEMBERED = 2  # pairs that the last test counts as in the next one
_PRIOR_PAIRS, _PRIOR_VARIANCE = 3, 0.1**2  # of a pair's gain: few pairs may lie close together by chance
_INTERVAL = 1.96  # standard errors on either side, in reports
_FOLLOW, _FOLLOW_LOOK = 0.02, 0.3  # weight of the newest expectation in the mean
_OUTLIER = 3.0  # times the usual length of a step; a longer one counts as this
_RISE, _FALL = 0.05, 0.3  # weight of a longer and of a shorter step in the usual length


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardedStep:
    """A step about which the guard was asked. num_sequences: that it brings tokens. drafts: they were allowed.

    plain_s: seconds of a step without drafts, by the table as it was measured.
    """

    num_sequences: int
    drafts: bool
    plain_s: float


@dataclass(slots=True)
class _Phase:
    """Sums over the steps of a phase. time: in plain steps."""

    num_steps: int = 0
    tokens: int = 0
    sequences: int = 0
    time: float = 0.0

    @property
    def log_rate(self) -> float:
        return math.log(self.tokens * self.num_steps / (self.sequences * self.time))


@dataclass(slots=True)
class _Test:
    """Pairs of phases. drafts: in the phase that runs. mean, squares: of the gains, and of their deviations."""

    drafts: bool = True
    phase: _Phase = field(default_factory=_Phase)
    first: float | None = None  # log rate of the pair's first phase, once it is over
    num_pairs: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def error(self) -> float:
        """Standard error of the mean gain."""
        variance = (self.squares + _PRIOR_PAIRS * _PRIOR_VARIANCE) / (self.num_pairs - 1 + _PRIOR_PAIRS)
        return math.sqrt(variance / self.num_pairs)

    @property
    def pays(self) -> bool | None:
        """None: not known yet."""
        if self.mean < -OBVIOUS:
            return False
        if self.mean * min(self.num_pairs, 2) > 2 * OBVIOUS:  # other programs make a single pair look OBVIOUS
            return True
        if self.num_pairs < LEAST_PAIRS:
            return None
        if abs(self.mean) > SURE * self.error:
            return self.mean > 0
        return False if self.num_pairs >= MOST_PAIRS else None

    def end_phase(self, *, next_drafts: bool) -> bool:
        """Whether a pair is over. next_drafts: then the next one begins with drafts."""
        rate, self.phase = self.phase.log_rate, _Phase()
        if self.first is None:
            self.first, self.drafts = rate, not self.drafts
            return False
        gain = rate - self.first if self.drafts else self.first - rate
        self.first, self.drafts = None, next_drafts
        self.num_pairs += 1
        moved = gain - self.mean
        self.mean += moved / self.num_pairs
        self.squares += moved * (gain - self.mean)
        return True


@dataclass(slots=True)
class _Load:
    """What is known of a load.

    pays: None while a test runs. due_s: when the next one begins, wait_s after the last. since_look: steps since
    the policy was last asked, which it is after look_steps where drafts do not pay. usual: length of a step.
    expected: mean gain that the policy expects, of num_expected and of 1. failed: the same in the test that failed
    last, over the gain that it found.
    """

    test: _Test = field(default_factory=_Test)
    pays: bool | None = None
    due_s: float = 0.0
    wait_s: float = FIRST_WAIT_S / 2
    since_look: int = 0
    look_steps: float = 0.0
    usual: float = 0.0
    expected: float = 1.0
    num_expected: int = 0
    failed: float = 1.0
    found: tuple[float, float] | None = None  # mean gain of the last test that is over, and its standard error


class Guard:
    """See the module. A load is a number of sequences that decode, up to a factor of 2."""

    def __init__(self, clock: Clock, *, seed: int = 0) -> None:
        self._clock = clock
        self._random = random.Random(seed)
        self._loads: dict[int, _Load] = {}

    def allows(self, num_sequences: int) -> bool:
        """The next step, of num_sequences that decode, may have drafts."""
        load = self._load(num_sequences)
        if load.pays is not None and self._clock.now() >= load.due_s:
            mean, _ = load.found or (0.0, 0.0)
            load.test, load.pays = _Test(num_pairs=_REMEMBERED, mean=mean), None
        if load.pays is None:
            return load.test.drafts
        return load.pays or load.since_look >= load.look_steps

    def launched(self, step: GuardedStep) -> None:
        """The step begins."""
        load = self._load(step.num_sequences)
        load.since_look = 0 if step.drafts else load.since_look + 1

    def expect(self, num_sequences: int, gain: float) -> None:
        """The policy expects a step to bring gain times the tokens per second of one without drafts."""
        load = self._load(num_sequences)
        load.num_expected += 1
        weight = max(_FOLLOW, 1 / (1 + load.num_expected)) if load.pays is None else _FOLLOW_LOOK
        load.expected += weight * (gain - load.expected)
        if load.pays is False and load.expected > HOPE * load.failed:
            load.test, load.pays, load.wait_s = _Test(), None, FIRST_WAIT_S / 2

    def observe(self, step: GuardedStep, num_tokens: int, seconds: float) -> None:
        """The step has brought num_tokens, at least 1, and taken seconds, above 0."""
        load = self._load(step.num_sequences)
        time = seconds / step.plain_s
        if not load.usual:
            load.usual = time  # the first step of its kind takes longer than any other
            return
        time = min(time, _OUTLIER * load.usual)
        load.usual += (_FALL if time < load.usual else _RISE) * (time - load.usual)
        test = load.test
        if load.pays is not None or step.drafts != test.drafts:
            return  # a step or two of the phase before are still to come when the next one begins
        phase = test.phase
        phase.num_steps += 1
        phase.tokens += num_tokens
        phase.sequences += step.num_sequences
        phase.time += time
        is_long = not test.drafts and load.expected <= LIKELY
        if phase.num_steps < (LONG_PHASE_STEPS if is_long else PHASE_STEPS):
            return
        if test.end_phase(next_drafts=self._random.random() < 0.5):
            self._conclude(load, test)

    def paid(self) -> tuple[PaidRatio, ...]:
        """By load, lowest first; a load at which no pair of phases is over is left out."""
        found = []
        for level, load in sorted(self._loads.items()):
            mean, error = load.found or (load.test.mean, load.test.error if load.test.num_pairs else math.inf)
            if math.isfinite(error):
                low, high = (math.exp(mean + side * _INTERVAL * error) for side in (-1, 1))
                sequences = (1 << level - 1, (1 << level) - 1)
                found.append(PaidRatio(sequences, math.exp(mean), low, high, drafts=load.pays))
        return tuple(found)

    def _load(self, num_sequences: int) -> _Load:
        level = num_sequences.bit_length()
        if level not in self._loads:
            self._loads[level] = _Load()
        return self._loads[level]

    def _conclude(self, load: _Load, test: _Test) -> None:
        pays = test.pays
        if pays is None:
            return
        load.pays, load.found = pays, (test.mean, test.error)
        load.wait_s = min(2 * load.wait_s, LONGEST_WAIT_S)
        load.due_s = self._clock.now() + load.wait_s
        if not pays:
            loss = 1.0 - math.exp(test.mean)
            load.look_steps = min(max(loss / LOOK_SHARE, LEAST_LOOK_STEPS), MOST_LOOK_STEPS)
            load.failed = max(load.expected / math.exp(test.mean), 1.0)
