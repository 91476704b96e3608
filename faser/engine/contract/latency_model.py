"""The latency model: what TTFT, TPOT and whole answers take at a rate of requests, in closed form.

A Pace says how fast an engine computes, Lengths what it is asked for; a Forecast is what follows for one rate:
means, quantiles, and the share of requests that meets its targets. `highest_rate` is its inverse. Pure functions
of numbers, no clock: the engine fits a Pace while it runs (control/pace.py), and `faser plan` reads that fit.

Running sequences share the steps alike, so this is processor sharing with a speed that depends on how many share:
with n of them a request that takes D(n) seconds by itself leaves at the rate 1 / D(n). Then

    P(n) = P(0) · Π λ D(k) / k, k = 1 … n          beyond the slots D stays, and the rest waits
    D(n) = prompt steps + (answer - 1) · seconds per token, over 1 - λ · seconds of a prompt's rows

and P(n) is also what a newcomer finds (Poisson arrivals). It depends on the mean of D alone, not on its
distribution (Kelly, "Reversibility and Stochastic Networks", 1979, section 3.3: symmetric queues). A first token
takes the rest of a step, the prompts ahead (M/G/1, Pollaczek and Khinchine), a slot, its own prompt and what fills
the step in which that ends. A request's time per token averages the states of its life: its variance falls with
the life's length over the time in which the number of sequences forgets itself.

The seed is the closed form of arXiv 2605.15051, L = ((S + 1.5) F + W) / (1 - λ W), with S steps of F seconds and
W seconds of rows: this is it where a step takes F + W's share for every sequence, and more than its mean.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from faser.types.arrays import Floats
from faser.types.request import Slo

KNOWN_UTILISATION = 0.8  # beyond it a forecast says that it does not know: benchmarks/results/latency-model.json
_MOST_WAITING = 400  # requests without a slot that a forecast reckons with
_NEGLIGIBLE = 1e-7  # probability of a state
_MOST_KINDS, _PROMPT_GROUPS = 48, 12  # kinds of requests that a forecast tells apart
_CROSSOVER_STEPS = 32  # rates up to the capacity that are compared
_LEAST_RATE = 1e-6  # requests a second: an idle engine is forecast as an almost idle one


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Speed of an engine. Tuples belong together by place, sequences and rows ascend from 1.

    step_s: seconds from one step to the next, drafts and host gaps included, by how many `sequences` decode in it.
    tokens: that such a step brings each of them. rows_s: seconds of a step by its number of `rows`, of any kind.
    row_token_s: seconds for each earlier token that a prompt's row attends to. most_rows: of a step.
    The last of `sequences` is the number of slots.
    """

    sequences: tuple[int, ...]
    step_s: tuple[float, ...]
    tokens: tuple[float, ...]
    rows: tuple[int, ...]
    rows_s: tuple[float, ...]
    most_rows: int
    row_token_s: float = 0.0

    @property
    def num_slots(self) -> int:
        return self.sequences[-1]

    def decoding_s(self, num_sequences: float | Floats) -> Floats:
        """Seconds of a step in which this number of sequences decode; beyond the slots as at the slots."""
        return np.asarray(np.interp(num_sequences, self.sequences, self.step_s), dtype=np.float64)

    def token_s(self, num_sequences: float | Floats) -> Floats:
        """Seconds per token of each of the sequences that decode, without prompts between."""
        return self.decoding_s(num_sequences) / np.interp(num_sequences, self.sequences, self.tokens)

    def prompt_steps(self, num_sequences: float | Floats, prompt: float | Floats) -> Floats:
        """Return how many steps compute a prompt of this number of tokens next to these sequences."""
        return np.ceil(prompt / self._room(num_sequences))

    def prompt_s(self, num_sequences: float | Floats, prompt: float | Floats) -> Floats:
        """Seconds by which a prompt's rows lengthen the steps of these sequences, which would run anyway."""
        most = self._room(num_sequences)
        whole = np.floor(prompt / most)
        before = np.maximum(num_sequences, 1)
        begun_s = self._rows_s(before)
        seconds = whole * (self._rows_s(before + most) - begun_s)
        seconds = seconds + self._rows_s(before + prompt - whole * most) - begun_s
        return np.asarray(seconds + self.row_token_s * prompt * prompt / 2)

    def _room(self, num_sequences: float | Floats) -> Floats:
        """Prompt rows of a step; a newcomer takes one of the sequences' places, so it has one at least."""
        left = self.most_rows - np.minimum(num_sequences, self.num_slots)
        return np.asarray(np.maximum(left, 1.0), dtype=np.float64)

    def _rows_s(self, rows: float | Floats) -> Floats:
        """Rising on beyond the last row count as between the last two."""
        found = np.interp(rows, self.rows, self.rows_s)
        if len(self.rows) > 1:
            slope = (self.rows_s[-1] - self.rows_s[-2]) / (self.rows[-1] - self.rows[-2])
            found = found + slope * np.maximum(np.asarray(rows) - self.rows[-1], 0)
        return np.asarray(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Prompts and answers, in tokens, of kinds of requests, and the share that each kind has: [N] each."""

    prompts: Floats
    answers: Floats
    shares: Floats

    @classmethod
    def of(cls, pairs: Sequence[tuple[int, int]]) -> "Lengths":
        """(prompt, answer) of requests, at least one.

        Many are put together by prompts, into groups that weigh alike in tokens and in number, so that few long
        prompts stay apart; and each group by answers. A kind of request is the mean of its group.
        """
        asked = np.maximum(np.array(pairs, dtype=np.float64).reshape(-1, 2), 1.0)
        if len(asked) <= _MOST_KINDS:
            return cls(prompts=asked[:, 0], answers=asked[:, 1], shares=np.full(len(asked), 1 / len(asked)))
        groups = [
            part
            for by_prompt in _divided(asked, 0, _PROMPT_GROUPS)
            for part in _divided(by_prompt, 1, _MOST_KINDS // _PROMPT_GROUPS)
        ]
        prompts, answers = np.array([group.mean(axis=0) for group in groups]).T
        shares = np.array([len(group) for group in groups]) / len(asked)
        return cls(prompts=prompts, answers=answers, shares=shares)

    def mean(self, values: Floats) -> Floats:
        """Over the kinds, of values [..., N]."""
        return np.asarray(values @ self.shares)

    @property
    def mean_context(self) -> float:
        """Mean tokens in the cache of a sequence that decodes: long answers are found decoding more often."""
        return float(np.average(self.prompts + self.answers / 2, weights=self.shares * self.answers))


def _divided(asked: Floats, column: int, most: int) -> list[Floats]:
    """Requests in order of one of their lengths, in at most this number of groups."""
    ordered = asked[asked[:, column].argsort(kind="stable")]
    place = np.cumsum(ordered[:, column] / ordered[:, column].sum() + 1 / len(ordered)) / 2
    group = np.minimum((place * most - 1e-9).astype(int), most - 1)
    return [part for number in range(most) if len(part := ordered[group == number])]


def capacity(pace: Pace, lengths: Lengths) -> float:
    """Requests a second beyond which the queue grows without end."""
    return 1.0 / float(_request_s(pace, lengths, np.array([float(pace.num_slots)]))[0])


def _request_s(pace: Pace, lengths: Lengths, states: Floats) -> Floats:
    """Return the engine's seconds [states] that a request takes, by how many sequences are always in it."""
    own_s, prompt_s = _lone_s(pace, lengths, states), pace.prompt_s(states[:, None], lengths.prompts)
    return lengths.mean(own_s / states[:, None] + prompt_s)


def _lone_s(pace: Pace, lengths: Lengths, states: Floats) -> Floats:
    """Return the seconds [states, N] of the steps that each request is in, by how many sequences share them."""
    prompt_steps = pace.prompt_steps(states[:, None], lengths.prompts)
    return prompt_steps * pace.decoding_s(states)[:, None] + (lengths.answers - 1) * pace.token_s(states)[:, None]


class Forecast:
    """Forecast for requests of these lengths at a rate, in requests a second. Times are in seconds.

    utilisation: rate over capacity. chances: of 0, 1, … requests in the engine. is_known: below KNOWN_UTILISATION;
    beyond, the numbers are a lower bound at best, and from 1 on they are infinite.
    """

    def __init__(self, pace: Pace, lengths: Lengths, rate: float) -> None:
        self._pace, self._lengths = pace, lengths
        self.rate = max(rate, _LEAST_RATE)
        self.utilisation = rate / capacity(pace, lengths)
        self.is_stable = self.utilisation < 1.0
        if self.is_stable:
            self._solve()

    @property
    def is_known(self) -> bool:
        return self.utilisation <= KNOWN_UTILISATION

    def _solve(self) -> None:
        pace, lengths, rate = self._pace, self._lengths, self.rate
        slots = pace.num_slots
        states = np.arange(1.0, slots + 1)
        prompt_s = pace.prompt_s(states[:, None], lengths.prompts)  # [M, N]
        stretch = 1.0 / np.maximum(1.0 - rate * lengths.mean(prompt_s), 1e-6)
        own_s = lengths.mean(_lone_s(pace, lengths, states) + prompt_s) * stretch  # [M]: D(n)
        self.chances = _chances(rate * own_s / states, most=slots + _MOST_WAITING)
        found = np.arange(len(self.chances))
        self.mean_sequences = float(self.chances @ np.minimum(found, slots))
        # What a newcomer finds: how many decode next to it, and how many must end before it has a slot.
        self._beside = np.minimum(found, slots - 1)
        self._slot_wait_s = np.maximum(found - slots + 1, 0) * own_s[-1] / slots
        at = np.minimum(self._beside, slots - 1)  # its own D is that of one sequence more
        self._step_s = np.where(found > 0, pace.decoding_s(np.maximum(self._beside, 1)), 0.0)
        self._token_s = pace.token_s(self._beside + 1.0) * stretch[at]  # between two tokens
        self._own_prompt_s = (
            pace.prompt_steps(self._beside[:, None], lengths.prompts)
            * pace.decoding_s(self._beside + 1.0)[:, None]
            + prompt_s[at]
        )
        self._prompts_ahead(prompt_s)
        self._vary(own_s, prompt_s, stretch)

    def _prompts_ahead(self, prompt_s: Floats) -> None:
        """The prompts that are being computed, as an M/G/1 queue whose server is the rows of steps."""
        pace, lengths, n = self._pace, self._lengths, max(round(self.mean_sequences), 1)
        room = np.minimum(lengths.prompts / pace.prompt_steps(n, lengths.prompts), pace.most_rows)
        share = lengths.prompts / np.maximum(room, pace.most_rows - n)
        work_s = prompt_s[min(n, pace.num_slots) - 1] + share * pace.decoding_s(n)
        self._ahead_busy = min(self.rate * float(lengths.mean(work_s)), 0.999)
        wait_s = self.rate * float(lengths.mean(work_s**2)) / (2 * (1 - self._ahead_busy))
        self._ahead_s = wait_s / self._ahead_busy if self._ahead_busy else 0.0  # of a newcomer that waits at all
        # What has come meanwhile fills the step in which a prompt ends.
        most = max(pace.most_rows - n, 1)
        left_s = pace.prompt_s(n, most - 1 - (lengths.prompts - 1) % most)
        before_s = self._mean_first_s() - pace.decoding_s(n)
        behind_s = (
            self.rate * np.maximum(before_s, 0.0) * float(lengths.mean(prompt_s[min(n, pace.num_slots) - 1]))
        )
        self._own_prompt_s = self._own_prompt_s + left_s * -np.expm1(-behind_s / np.maximum(left_s, 1e-9))

    def _mean_first_s(self) -> Floats:
        """Return the mean seconds [N] to the first token of each request."""
        wait_s = float(self.chances @ (self._slot_wait_s + self._step_s / 2)) + self._ahead_busy * self._ahead_s
        return np.asarray(wait_s + self.chances @ self._own_prompt_s)

    def _vary(self, own_s: Floats, prompt_s: Floats, stretch: Floats) -> None:
        """Set how far a request's time per token is from the mean of all: [states, N] means, [N] deviations."""
        chances, tokens = self.chances, np.maximum(self._lengths.answers - 1, 1)
        mean_s = float(chances @ self._token_s)
        variance = float(chances @ (self._token_s - mean_s) ** 2)
        states = np.arange(1.0, len(own_s) + 1)
        leaving = np.gradient(states / own_s) if len(own_s) > 1 else 1 / own_s
        at = int(np.clip(round(self.mean_sequences), 1, len(own_s))) - 1
        memory_s = 1.0 / max(float(leaving[at]), 1e-9)
        life = np.maximum(tokens * mean_s / memory_s, 1e-6)  # [N]
        fades = -np.expm1(-life) / life
        averages = 2 * (life - 1 + np.exp(-life)) / life**2
        # Prompts that come while this one waits or is computed are computed behind it, so in its first steps.
        stretched = stretch.item(at)
        first_s = self._mean_first_s()
        behind_s = self.rate * first_s * float(self._lengths.mean(prompt_s[at])) * stretched
        most_s = tokens * float(self._pace.prompt_s(at + 1.0, self._pace.most_rows - at - 1.0))
        behind_s = most_s * -np.expm1(-behind_s / np.maximum(most_s, 1e-9))
        self._life_token_s = mean_s + (self._token_s - mean_s)[:, None] * fades + behind_s / tokens
        # Prompts that come during a life lengthen it for further ones to come; they bring sequences with them, so
        # both deviations go the same way.
        prompts = self.rate * float(self._lengths.mean(prompt_s[at] ** 2)) * stretched**2
        between_s = np.sqrt(prompts * (tokens * mean_s + first_s)) / tokens
        self._token_spread_s = np.sqrt(np.maximum(variance * (averages - fades**2), 0.0)) + between_s

    @cached_property
    def tpot_s(self) -> float:
        """Mean of the requests' times per token after the first."""
        if not self.is_stable:
            return math.inf
        shares = self._lengths.shares * (self._lengths.answers > 1)
        return float(self.chances @ self._life_token_s @ shares / shares.sum()) if shares.any() else 0.0

    @cached_property
    def ttft_s(self) -> float:
        """Mean."""
        if not self.is_stable:
            return math.inf
        return float(self._lengths.mean(self._mean_first_s()))

    @cached_property
    def latency_s(self) -> float:
        """Mean, of whole answers."""
        if not self.is_stable:
            return math.inf
        rest = self._lengths.answers - 1
        return self.ttft_s + float(self._lengths.mean(self.chances @ (rest * self._life_token_s)))

    def ttft_quantile_s(self, share: float) -> float:
        return self._quantile_s(self._first_within, share)

    def latency_quantile_s(self, share: float) -> float:
        """Return the quantile of end-to-end latency at this share."""
        rest = self._lengths.answers - 1
        if not self.is_stable:
            return math.inf
        means = (self._slot_wait_s + self._step_s / 2)[:, None] + self._own_prompt_s + rest * self._life_token_s
        means = means + self._ahead_busy * self._ahead_s
        first_var = (self._step_s**2 / 12)[:, None] + self._ahead_busy * (2 - self._ahead_busy) * self._ahead_s**2
        spread = np.sqrt(first_var + (rest * self._token_spread_s) ** 2)
        return self._quantile_s(lambda seconds: _within(seconds, means, spread), share)

    def attainment(self, slo: Slo) -> float:
        """Share of requests that meet every target; 1 without targets."""
        if not self.is_stable:
            return 0.0 if slo != Slo() else 1.0
        met = np.ones((len(self.chances), len(self._lengths.answers)))
        if slo.ttft_ms is not None:
            met = met * self._first_within(slo.ttft_ms / 1000)
        if slo.tpot_ms is not None:
            paced = _within(slo.tpot_ms / 1000, self._life_token_s, self._token_spread_s)
            met = met * np.where(self._lengths.answers > 1, paced, 1.0)
        return float(self.chances @ self._lengths.mean(met))

    def _first_within(self, seconds: float) -> Floats:
        """Return the probability [states, N] that the first token takes at most so long."""
        left = seconds - self._slot_wait_s[:, None] - self._own_prompt_s
        step_s = np.maximum(self._step_s, 1e-9)[:, None]
        within = np.clip(left / step_s, 0.0, 1.0)
        if self._ahead_s:
            in_step = np.clip(left, 0.0, step_s)
            late = np.exp(-np.maximum(left - in_step, 0.0) / self._ahead_s)
            later = np.exp(-np.maximum(left, 0.0) / self._ahead_s)
            waited = np.maximum(in_step / step_s - self._ahead_s / step_s * (late - later), 0.0)
            within = within + self._ahead_busy * (waited - within)
        return np.where(left < 0, 0.0, within)

    def _quantile_s(self, within: Callable[[float], Floats], share: float) -> float:
        """within: [states, N] probability of at most these seconds."""
        if not self.is_stable:
            return math.inf
        low, high = 0.0, 1e-3
        while self.chances @ self._lengths.mean(within(high)) < share and high < 1e6:
            low, high = high, 2 * high
        for _ in range(40):
            middle = (low + high) / 2
            if self.chances @ self._lengths.mean(within(middle)) < share:
                low = middle
            else:
                high = middle
        return high


def highest_rate(pace: Pace, lengths: Lengths, slo: Slo, share: float) -> float:
    """Requests a second at which this share of them still meets its targets; 0: not even a single request does."""
    low, high = 0.0, capacity(pace, lengths)
    if Forecast(pace, lengths, high * 1e-3).attainment(slo) < share:
        return 0.0
    for _ in range(16):
        middle = (low + high) / 2
        if Forecast(pace, lengths, middle).attainment(slo) >= share:
            low = middle
        else:
            high = middle
    return low


def crossovers_by_sequences(
    paces: Mapping[int, Pace], adaptive: Pace, lengths: Lengths
) -> tuple[tuple[int, int], ...]:
    """(sequences, γ): from how many sequences on which draft length serves the most requests a second, prompts
    included; the first from 1 on.

    paces: by γ, 0 among them, all with as many slots. adaptive: with lengths that are chosen; where it is slower
    than no drafts, no length is advised.
    """
    gammas = sorted(paces)
    sequences = np.arange(1.0, paces[0].num_slots + 1)
    by_gamma = [_request_s(paces[gamma], lengths, sequences) for gamma in gammas]
    best = np.argmin(by_gamma, axis=0)
    best[_request_s(adaptive, lengths, sequences) > by_gamma[0]] = 0  # the first of gammas
    changes = [0, *(np.flatnonzero(np.diff(best)) + 1).tolist()]
    return tuple((at + 1, gammas[best.item(at)]) for at in changes)


def crossovers(paces: Mapping[int, Pace], adaptive: Pace, lengths: Lengths) -> tuple[tuple[float, int], ...]:
    """(rate, γ): from which rate on which draft length has the shortest mean latency; the first from 0 on.

    paces: by γ, 0 among them. adaptive: as of crossovers_by_sequences.
    """
    most = max(capacity(each, lengths) for each in paces.values())

    def best(rate: float) -> int:
        latencies = {gamma: Forecast(pace, lengths, rate).latency_s for gamma, pace in paces.items()}
        if Forecast(adaptive, lengths, rate).latency_s >= latencies[0]:  # beyond both capacities, too
            return 0
        return min(latencies, key=lambda gamma: (latencies[gamma], gamma))

    rates = [share / _CROSSOVER_STEPS * most for share in range(_CROSSOVER_STEPS)]
    found = [(0.0, best(0.0))]
    for before, rate in pairwise(rates):
        if (then := best(rate)) != found[-1][1]:
            low, high = before, rate
            for _ in range(8):
                middle = (low + high) / 2
                low, high = (middle, high) if best(middle) == found[-1][1] else (low, middle)
            found.append((high, then))
    return tuple(found)


def _chances(ratios: Floats, *, most: int) -> Floats:
    """P(0), P(1), … of a birth-death process with P(n) / P(n - 1) = ratios[n - 1], the last one from there on."""
    further = np.full(most - len(ratios), ratios[-1])
    logs = np.concatenate(([0.0], np.cumsum(np.log(np.concatenate((ratios, further))))))
    weights = np.exp(logs - logs.max())
    weights /= weights.sum()
    kept = int(np.flatnonzero(weights > _NEGLIGIBLE)[-1]) + 1
    return np.asarray(weights[:kept] / weights[:kept].sum())


def _within(seconds: float, mean_s: Floats, deviation_s: Floats) -> Floats:
    """Probability of at most these seconds where their logarithm is normal; by mean and deviation."""
    variance = np.log1p((np.maximum(deviation_s, 1e-9) / mean_s) ** 2)
    above = (math.log(seconds) - np.log(mean_s) + variance / 2) / np.sqrt(variance)
    # The normal distribution function within 2e-4: Page, Applied Statistics 26 (1977) 75.
    return np.asarray(1.0 / (1.0 + np.exp(-np.clip(above * (1.5976 + 0.070566 * above * above), -500, 500))))
