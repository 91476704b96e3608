"""Guard: whether drafts pay at the present load, from tokens and seconds alone, and what they can have cost.

What a policy expects of drafts is a prediction: of acceptance, of step times, of the host's work. Whatever of it
is wrong, the guard sees the outcome. It is an experiment that never ends. At every load steps come in groups:

    a group       | common steps | 4 rare steps | common steps |       the rare ones at a random place
    where drafts do not pay  | | |x| | | | | | |x| | | |x| | | ...     one rare step in each quarter
    its gain      tokens of a step with drafts x seconds without - seconds with, in steps without drafts

One side has drafts, the other has none. A step without drafts brings one token a sequence, so nothing but its time
has to be estimated. The common side's time is that of the 32 steps before and after the rare ones, so a machine
that slows down slows both. While the mean gain of the groups is not sure, a group has as many common steps as rare
ones. Once it is sure, the better side is the common one, and the rare one may cost 1/700 of the time: the greater
the difference, the rarer it is. Groups of long ago are forgotten: 50 of them count.

A rare side that contradicts the answer puts it in doubt; then only the group that follows counts. Tokens need no
group: those of every step with drafts are known exactly, and what a step with drafts takes has been measured. So a
cumulative likelihood ratio (Page 1954) watches them, and where they contradict the answer the gain becomes what
they are worth at that price. Rare steps with drafts stand alone, since each of them brings news; those without
drafts stand together, since their time depends on the step before.

The balance adds up what drafts have saved. Only the time without drafts is estimated in it, by steps at a random
place, so its error is a sum of martingale differences. The bound holds at all times at once, to the extent that
the central limit theorem does (asymptotic confidence sequence, arXiv 2103.06476).

A second guard decides, where there are lanes, whether drafts are made during steps or before them: then both sides
draft, and the tokens of a step without drafts are those of a step whose drafts were made before it.

The seconds are those from the beginning of a step to the beginning of the next one, so deciding, learning,
messages and whatever else runs on the machine are in them. They count in units of what a step without drafts takes
by the table, so that a batch that grows counts for neither side.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from math import isfinite

from faser.types.statistics import PaidRatio, SpeculationBalance

# Reasoned, not fitted: how throughput changes with each halved or doubled is in results/control-constants.json.
# What the guard costs and finds in long runs: results/guard-regret.json.
RARE_STEPS = 4
SHARE = 0.0015  # of the time that rare steps may cost
MOST_COMMON = 255  # common steps for each rare one
SURE, LEAST_GROUPS = 1.5, 1.9  # standard errors of the mean gain, and groups: two, the first of which has aged
_OBVIOUS = 3.0  # standard errors, from which on groups may grow eightfold at once, not twofold
_NEAR = 32  # steps before and after the rare ones
_FOLLOW = 0.1  # weight of a group in the tokens of a step without drafts, where these are not known
_LEAST_SEEN = 3  # steps of each side: a step or two are under way when a group begins
_KEPT = 0.98  # of the groups so far, with each further one
_OF_OTHER_LOAD = 1.5  # groups that the nearest load is worth at one without any
_OF_EARLIER_RUN = 8.0  # groups that an earlier run is worth at most
_PRIOR_GROUPS, _PRIOR_VARIANCE = 2.0, 0.15**2  # few groups may lie close together by chance
_CONTRADICTION, _LEAST_CONTRADICTION = 3.0, 0.05  # standard deviations of a group's gain, and the gain itself
_FAR = 8  # common steps for each rare one, from which on rare steps with drafts stand alone
_EVIDENCE = 7.0  # logarithm of a likelihood ratio: chance brings it once in thousands of steps with drafts
_LEAST_WATCHED = 8  # steps with drafts, until the variance of their tokens is known well enough
_OF_REVISION = 4.0  # groups that a gain by tokens alone is worth at most
_OUTLIER, _FIRST_OUTLIER = 2.0, 3.0  # times the usual length of a step; a longer one counts as this
_RISE, _FALL = 0.05, 0.3  # weight of a longer and of a shorter step in the usual length
_INTERVAL = 1.96  # standard errors on either side, in reports of a load
_ALPHA = 0.05  # chance that the bound is wrong at any time
_PRIOR_ERROR_S = 0.5  # standard error at which the bound is tightest for its size


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardedStep:
    """A step about which the guard was asked. num_sequences: that it brings tokens. drafts: they were allowed.

    plain_s: seconds of a step without drafts, by the table as it was measured. prompts: the step computes some.
    """

    num_sequences: int
    drafts: bool
    plain_s: float
    prompts: bool = False

    @property
    def level(self) -> int:
        return level_of(self.num_sequences, prompts=self.prompts)


@dataclass(slots=True)
class _Group:
    """Steps of a group, in the order in which they run. Times are in plain steps.

    places: of the rare steps. is_void: the answer has been revised meanwhile.
    """

    num_steps: int
    rare_drafts: bool
    places: tuple[int, ...]
    is_void: bool = False
    num_launched: int = 0
    num_seen: int = 0
    num_drafting: int = 0
    tokens: float = 0.0  # a sequence, over the steps with drafts
    plain_tokens: float = 0.0  # over the others
    drafting: float = 0.0  # time of these steps
    near: list[int] = field(default_factory=lambda: [0, 0])  # steps compared: without drafts, with drafts
    times: list[float] = field(default_factory=lambda: [0.0, 0.0])  # of these

    @property
    def drafts(self) -> bool:
        """Return whether the step that is launched next may have drafts.

        Where the seconds of too many steps have remained unknown, the group goes on with those it lacks.
        """
        if self.num_launched >= self.num_steps:
            return self.near[True] < self.near[False]
        return self.rare_drafts == (self.num_launched in self.places)

    @property
    def is_over(self) -> bool:
        return self.num_launched >= self.num_steps and min(self.near) >= _LEAST_SEEN

    def add(self, time: float, tokens: float, *, drafts: bool) -> None:
        at, self.num_seen = self.num_seen, self.num_seen + 1
        if drafts:
            self.num_drafting += 1
            self.tokens += tokens
            self.drafting += time
        else:
            self.plain_tokens += tokens
        if drafts == self.rare_drafts or min(abs(at - place) for place in self.places) <= _NEAR:
            self.near[drafts] += 1
            self.times[drafts] += time

    def cut_short(self) -> None:
        """The rare steps that have not come yet come now; after them the group is over, and teaches no gain."""
        launched, self.is_void = self.num_launched, True
        come = [place for place in self.places if place < launched]
        self.num_steps = launched + len(self.places) - len(come)
        self.places = (*come, *range(launched, self.num_steps))


@dataclass(slots=True)
class _Mean:
    """Discounted sums over groups: gains, their squares, times of a step without and with drafts."""

    groups: float = 0.0
    weights: float = 0.0  # sum of squared weights
    gains: float = 0.0
    squares: float = 0.0
    plain: float = 0.0
    drafting: float = 0.0

    @property
    def price(self) -> float:
        """Time of a step with drafts, in steps without."""
        return self.drafting / self.plain

    @property
    def gain(self) -> float:
        """Mean gain of a step with drafts, in steps without."""
        return self.gains / self.plain if self.groups else 0.0

    @property
    def deviation(self) -> float:
        """Standard deviation of a group's gain."""
        spread = max(self.squares - self.gains**2 / self.groups, 0.0) * self.groups / self.plain**2
        total = self.groups * spread + _PRIOR_GROUPS * _PRIOR_VARIANCE
        return math.sqrt(total / (self.groups + _PRIOR_GROUPS))

    @property
    def error(self) -> float:
        """Standard error of the gain."""
        return self.deviation * math.sqrt(self.weights) / self.groups if self.groups else math.inf

    def add(self, gain: float, plain: float, drafting: float) -> None:
        self.groups = self.groups * _KEPT + 1
        self.weights = self.weights * _KEPT**2 + 1
        self.gains = self.gains * _KEPT + gain
        self.squares = self.squares * _KEPT + gain**2
        self.plain = self.plain * _KEPT + plain
        self.drafting = self.drafting * _KEPT + drafting

    def scaled(self, most_groups: float, *, keeps_gain: bool) -> "_Mean":
        """Return the mean with the weight of most_groups at most. keeps_gain: else only the spread is kept."""
        if not self.groups:
            return _Mean()
        by = min(1.0, most_groups / self.groups)
        groups, gains, squares = self.groups * by, self.gains * by, self.squares * by
        if not keeps_gain:
            gains, squares = 0.0, squares - gains**2 / groups
        return _Mean(groups, groups, gains, squares, self.plain * by, self.drafting * by)


@dataclass(slots=True)
class _Load:
    """Statistics of a load.

    ratio: common steps for each rare one. reference: tokens a sequence of a step without drafts. usual: time of
    such a step, in plain steps. tokens, variance: a sequence, of the last num_drafting steps with drafts. against:
    sum of the tokens that speak against the answer, of num_against steps. quotient: time without drafts over time
    with them, of the last group, and the variance of its error.
    """

    mean: _Mean
    group: _Group
    ratio: int = 1
    reference: float = 1.0
    usual: float = 0.0
    tokens: float = 0.0
    variance: float = 0.0
    num_drafting: int = 0
    against: float = 0.0
    num_against: int = 0
    quotient: float | None = None
    quotient_variance: float = 0.0
    num_quotients: int = 0

    @property
    def pays(self) -> bool | None:
        """None: both sides are as common."""
        return None if self.ratio == 1 else self.mean.gain > 0


def level_of(num_sequences: int, *, prompts: bool) -> int:
    """Number of the load: 0 with prompts, 1 of one sequence, 2 of two and three, 3 of 4 to 7, and so on."""
    return 0 if prompts else num_sequences.bit_length()


class Guard:
    """Guard of one decision, by load: how many sequences decode, up to a factor of 2, or steps with prompts."""

    def __init__(self, *, seed: int = 0, rare_steps: int = RARE_STEPS, plain_is_known: bool = True) -> None:
        """plain_is_known: the other side brings one token a sequence; else it drafts as well, in another way."""
        self._random, self._rare_steps, self._plain_is_known = random.Random(seed), rare_steps, plain_is_known
        self._loads: dict[int, _Load] = {}
        self._saved_s = self._variance = 0.0

    def allows(self, num_sequences: int, *, prompts: bool = False) -> bool:
        """The next step, of num_sequences that decode, may have drafts. prompts: it computes some as well."""
        return self._load(level_of(num_sequences, prompts=prompts)).group.drafts

    def launched(self, step: GuardedStep) -> None:
        """The step begins."""
        self._load(step.level).group.num_launched += 1

    def observe(self, step: GuardedStep, num_tokens: int, seconds: float) -> None:
        """The step has brought num_tokens, at least 1, and taken seconds, above 0."""
        load = self._load(step.level)
        time, tokens = seconds / step.plain_s, num_tokens / step.num_sequences
        if not load.usual:
            load.usual = time  # the first step of its kind takes longer than any other
            return
        is_known = load.mean.groups >= 2
        price = load.mean.price if step.drafts and is_known else 1.0
        usual = load.usual * price
        time = min(time, (_OUTLIER if is_known else _FIRST_OUTLIER) * usual)
        load.usual += (_FALL if time < usual else _RISE) * (time / price - load.usual)
        load.group.add(time, tokens, drafts=step.drafts)
        if step.drafts and self._plain_is_known:
            self._watch(load, tokens)
        if load.group.is_over:
            self._conclude(load, step.plain_s)

    def paid(self) -> tuple[PaidRatio, ...]:
        """Return the measured gain by load, lowest first; a load at which no group is over is left out."""
        found = []
        for level, load in sorted(self._loads.items()):
            mean = load.mean
            if load.num_quotients:
                ratio, error = mean.gains / mean.drafting, mean.error * mean.plain / mean.drafting
                low, high = (max(1 + ratio + side * _INTERVAL * error, 0.0) for side in (-1, 1))
                sequences = (1 << level - 1, (1 << level) - 1) if level else None
                found.append(PaidRatio(sequences, 1 + ratio, low, high, drafts=load.pays))
        return tuple(found)

    def balance(self) -> SpeculationBalance:
        """Return what drafts have saved so far in the groups that are over."""
        prior = _PRIOR_ERROR_S**2
        total = self._variance + prior
        error_s = math.sqrt(total * (2 * math.log(1 / _ALPHA) + math.log(total / prior)))
        return SpeculationBalance(self._saved_s, error_s)

    def saved(self) -> dict[str, list[float]]:
        """Return what a later run on the same machine may begin with, by level."""
        return {str(level): [*astuple(load.mean)] for level, load in self._loads.items() if load.mean.groups}

    def restore(self, saved: Mapping[str, Sequence[float]]) -> None:
        """Begin with what an earlier run has saved, as if in a few groups. Raises ValueError and TypeError."""
        loads = {}
        for level, sums in saved.items():
            mean = _Mean(*(float(each) for each in sums))
            if not all(map(isfinite, astuple(mean))) or min(mean.groups, mean.plain, mean.drafting) <= 0:
                raise ValueError(f"load {level} has the sums {sums}; six finite ones are needed, above 0")
            mean = mean.scaled(_OF_EARLIER_RUN, keeps_gain=True)
            loads[int(level)] = load = _Load(mean, self._new_group(mean, 1))
            self._choose(load)
            load.group = self._new_group(mean, load.ratio)
        self._loads = loads

    def _load(self, level: int) -> _Load:
        if level not in self._loads:
            known = [other for other, each in self._loads.items() if each.mean.groups and other and level]
            mean = _Mean()
            if known:
                nearest = min(known, key=lambda other: (abs(other - level), other))
                mean = self._loads[nearest].mean.scaled(_OF_OTHER_LOAD, keeps_gain=True)
            self._loads[level] = _Load(mean, self._new_group(mean, 1))
        return self._loads[level]

    def _new_group(self, mean: _Mean, ratio: int) -> _Group:
        rare, random = self._rare_steps, self._random
        if ratio == 1:
            rare_drafts, first = random.random() < 0.5, random.choice((0, rare))
        else:
            rare_drafts, first = mean.gain <= 0, random.randint(0, ratio * rare)
        places = range(first, first + rare)
        every = 1 + ratio
        if rare_drafts and ratio >= _FAR and self._plain_is_known:
            return _Group(every * rare, True, tuple(at * every + random.randrange(every) for at in range(rare)))
        return _Group(every * rare, rare_drafts, tuple(places))

    def _watch(self, load: _Load, tokens: float) -> None:
        """Revise the answer once the tokens of steps with drafts contradict it.

        While drafts pay every step has them, so it is tested whether tokens have fallen half the way to the price.
        Otherwise few steps have drafts, and the test is whether their tokens are worth the price.
        """
        load.num_drafting += 1
        weight, moved = max(0.01, 1 / load.num_drafting), tokens - load.tokens
        load.tokens += weight * moved
        load.variance += weight * ((1 - weight) * moved**2 - load.variance)
        pays, mean = load.pays, load.mean
        if pays is None or load.num_drafting < _LEAST_WATCHED:
            return
        margin = abs(mean.gain - mean.error)  # drafts are taken to gain a standard error less than measured
        border, margin = (mean.price + margin / 2, margin / 2) if pays else (mean.price, margin)
        side = 1.0 if pays else -1.0
        load.against += side * (border - tokens)
        load.num_against += 1
        if load.against <= 0:
            load.against, load.num_against = 0.0, 0
        elif load.against * 2 * margin > _EVIDENCE * load.variance:
            self._revise(load, border - side * load.against / load.num_against - mean.price)
            load.group.cut_short()

    def _revise(self, load: _Load, gain: float) -> None:
        """The gain has become another one, by tokens; what a step with drafts takes has not."""
        mean = load.mean.scaled(_OF_REVISION, keeps_gain=False)
        mean.gains = gain * mean.plain
        mean.squares += mean.gains**2 / mean.groups
        load.mean, load.ratio, load.num_drafting, load.against, load.num_against = mean, 1, 0, 0.0, 0
        self._choose(load)

    def _conclude(self, load: _Load, plain_s: float) -> None:
        group, mean = load.group, load.mean
        plain, drafting = (time / steps for time, steps in zip(group.times, group.near, strict=True))
        if not self._plain_is_known:
            weight = max(_FOLLOW, 1 / (1 + load.num_quotients))
            load.reference += weight * (
                group.plain_tokens / (group.num_seen - group.num_drafting) - load.reference
            )
        tokens = group.tokens / group.num_drafting / load.reference
        gain = tokens * plain - drafting
        self._account(load, plain / drafting, plain_s)
        if not group.is_void:
            if mean.groups >= 2 and gain * mean.gain < 0:
                moved = abs(gain * mean.groups / mean.plain - mean.gain)
                if moved > max(_CONTRADICTION * mean.deviation, _LEAST_CONTRADICTION):
                    load.mean, load.ratio = mean.scaled(1.0, keeps_gain=False), 1
            load.mean.add(gain, plain, drafting)
            self._choose(load)
        load.group = self._new_group(load.mean, load.ratio)

    def _choose(self, load: _Load) -> None:
        """Decide how rare the worse side is from now on."""
        mean, sure = load.mean, abs(load.mean.gain) / load.mean.error
        if sure < SURE or mean.groups < LEAST_GROUPS:
            load.ratio = 1
            return
        relative = mean.gains / mean.drafting  # tokens per second with drafts over those without, less 1
        wanted = abs(relative) / (1 + max(relative, 0.0)) / SHARE
        longer = load.ratio * (2 if sure < _OBVIOUS else 8)
        load.ratio = max(1, min(longer, int(wanted), MOST_COMMON))

    def _account(self, load: _Load, quotient: float, plain_s: float) -> None:
        """Add what the group's drafts have saved, and the variance of that."""
        group = load.group
        load.num_quotients += 1
        if load.quotient is not None:
            weight = max(1 / 16, 1 / (load.num_quotients - 1))
            squared = (quotient - load.quotient) ** 2 / 2
            load.quotient_variance += weight * (squared - load.quotient_variance)
        load.quotient = quotient
        spent_s = plain_s * group.drafting
        tokens = group.tokens / group.num_drafting
        self._saved_s += spent_s * (tokens * quotient - 1)
        self._variance += (spent_s * tokens) ** 2 * load.quotient_variance
