"""A campaign: every policy over every concurrency and temperature, in rounds, and what is kept of each run.

Within a cell (one concurrency, one temperature) policies take turns, each round beginning with another one, so
that a machine that slows down slows all of them. A policy that fell far behind in a cell's first round may be left
out of its others (drop_below): rounds are for those that might be the best. Policy off goes first, uncounted: it
fills the prefix cache, says how many jobs the cell needs, and gives the tokens that every other run is held
against. What is learned about acceptance is kept within a cell, as a server that has run for a while would have
it. Knows neither files nor models.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from faser.bench.policy_spec import PolicySpec
from faser.bench.runner import Conditions, Outcome, SteppedEngine, StepPoint, Tokens, run
from faser.bench.workload import Prompts, jobs_of

_FEWEST_JOBS = 4
_MOST_POINTS = 60  # of a run's steps are kept, evenly over it
_LONG_ENOUGH = 4.0  # times the wanted seconds: then the first run, prompts included, needs no second one
_OFF = "off"
_NOBODY = PolicySpec(text=_OFF, name=_OFF)
_ALWAYS = (_OFF, "faser")  # what a report compares with, and what it is about


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to measure. min_s: a run takes at least about so long without speculation.

    drop_below: a policy that reached less than this share of the best one's speed in the first round of a cell has
    no further rounds there; 0 leaves nobody out. Policies off and faser stay.
    """

    policies: tuple[PolicySpec, ...]
    concurrencies: tuple[int, ...]
    temperatures: tuple[float, ...]
    rounds: int
    output_tokens: int
    min_s: float = 3.0
    include_prefill: bool = False
    drop_below: float = 0.0

    @property
    def num_runs(self) -> int:
        return len(self.policies) * len(self.concurrencies) * len(self.temperatures) * self.rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is kept of an Outcome. mismatches: answers unlike those without speculation, of num_jobs.

    survivals[k - 1]: share of drafts of k or more tokens whose first k were accepted; None: there was none.
    points: as in Outcome, thinned out.
    """

    policy: str
    concurrency: int
    temperature: float
    round: int
    num_jobs: int
    num_tokens: int
    wall_s: float
    window_tokens: int
    window_s: float
    num_steps: int
    gamma_mean: float
    drafted: int
    verified: int
    accepted: int
    survivals: tuple[float | None, ...]
    decide_s: float
    mismatches: int
    points: tuple[StepPoint, ...] = ()

    @property
    def key(self) -> tuple[float, int, str, int]:
        return self.temperature, self.concurrency, self.policy, self.round

    @property
    def tokens_per_s(self) -> float:
        return self.window_tokens / self.window_s


@dataclass(slots=True)
class Campaign:
    """done: runs of an earlier try, not repeated; every new one is appended. now: seconds of a clock."""

    engine: SteppedEngine
    wanted: Wanted
    prompts: Prompts
    done: list[Run] = field(default_factory=list)
    now: Callable[[], float] = time.perf_counter
    _name: int = 0

    @property
    def num_done(self) -> int:
        """How many of the wanted runs are there already, or are not needed any more."""
        known = {each.key for each in self.done}
        return sum(
            (temperature, concurrency, spec.text, round_) in known
            or (round_ > 0 and self._is_dropped(temperature, concurrency, spec))
            for temperature in self.wanted.temperatures
            for concurrency in self.wanted.concurrencies
            for spec in self.wanted.policies
            for round_ in range(self.wanted.rounds)
        )

    def runs(self, announce: Callable[[str], None]) -> Iterator[Run]:
        """The runs that are missing. announce: told what begins now."""
        for temperature in self.wanted.temperatures:
            for concurrency in self.wanted.concurrencies:
                yield from self._cell(temperature, concurrency, announce)

    def _cell(self, temperature: float, concurrency: int, announce: Callable[[str], None]) -> Iterator[Run]:
        known = {each.key for each in self.done}
        of_cell = [
            each for each in self.done if (each.temperature, each.concurrency) == (temperature, concurrency)
        ]
        missing = [
            (round_, spec)
            for round_ in range(self.wanted.rounds)
            for spec in _rotated(self.wanted.policies, round_)
            if (temperature, concurrency, spec.text, round_) not in known
        ]
        if not missing:
            return
        conditions = Conditions(
            concurrency=concurrency,
            temperature=temperature,
            output_tokens=self.wanted.output_tokens,
            include_prefill=self.wanted.include_prefill,
        )
        announce(f"T={temperature:g} x{concurrency}: warming up")
        self.engine.use_policy(_OFF)  # nothing is known of another cell's drafts
        expected = self._reference(conditions, of_cell[0].num_jobs if of_cell else None)
        for round_, spec in missing:
            if round_ and self._is_dropped(temperature, concurrency, spec):
                continue
            announce(f"T={temperature:g} x{concurrency}: {spec.text}, round {round_ + 1}")
            outcome = self._run(spec, conditions, len(expected))
            kept = _kept(outcome, expected, spec.text, conditions, round_)
            self.done.append(kept)
            yield kept

    def _is_dropped(self, temperature: float, concurrency: int, spec: PolicySpec) -> bool:
        """It fell too far behind in the cell's first round, which is over."""
        first = {
            each.policy: each.tokens_per_s
            for each in self.done
            if (each.temperature, each.concurrency, each.round) == (temperature, concurrency, 0)
        }
        if spec.name in _ALWAYS or any(each.text not in first for each in self.wanted.policies):
            return False
        return first[spec.text] < self.wanted.drop_below * max(first[each.text] for each in self.wanted.policies)

    def _reference(self, conditions: Conditions, num_jobs: int | None) -> tuple[Tokens, ...]:
        """Answers without speculation. num_jobs: of an earlier try; None: so many that a run is long enough."""
        if num_jobs is not None:
            return self._run(_NOBODY, conditions, num_jobs).answers
        count = max(conditions.concurrency, _FEWEST_JOBS)
        outcome = self._run(_NOBODY, conditions, count)
        if outcome.wall_s < _LONG_ENOUGH * self.wanted.min_s:
            outcome = self._run(_NOBODY, conditions, count)
        if outcome.wall_s < self.wanted.min_s:
            count = math.ceil(count * self.wanted.min_s / outcome.wall_s / conditions.concurrency)
            count *= conditions.concurrency
            outcome = self._run(_NOBODY, conditions, count)
        return outcome.answers

    def _run(self, spec: PolicySpec, conditions: Conditions, num_jobs: int) -> Outcome:
        self.engine.use_policy(spec.name, spec.gamma, forget=False, overlap=spec.overlap)
        self._name += 1
        jobs = jobs_of(self.prompts, num_jobs)
        return run(self.engine, jobs, conditions, name=f"run-{self._name}", now=self.now)


def _rotated(policies: tuple[PolicySpec, ...], round_: int) -> tuple[PolicySpec, ...]:
    first = round_ % len(policies)
    return policies[first:] + policies[:first]


def _kept(outcome: Outcome, expected: tuple[Tokens, ...], policy: str, conditions: Conditions, round_: int) -> Run:
    return Run(
        policy=policy,
        concurrency=conditions.concurrency,
        temperature=conditions.temperature,
        round=round_,
        num_jobs=len(outcome.answers),
        num_tokens=outcome.num_tokens,
        wall_s=outcome.wall_s,
        window_tokens=outcome.window_tokens,
        window_s=outcome.window_s,
        num_steps=outcome.num_steps,
        gamma_mean=outcome.gamma_mean,
        drafted=outcome.drafted,
        verified=outcome.verified,
        accepted=outcome.accepted,
        survivals=tuple(
            accepted / drafts if drafts else None
            for accepted, drafts in zip(outcome.accepted_counts, outcome.draft_counts, strict=True)
        ),
        decide_s=outcome.decide_s,
        mismatches=sum(found != want for found, want in zip(outcome.answers, expected, strict=True)),
        points=_thinned(outcome.points),
    )


def _thinned(points: tuple[StepPoint, ...]) -> tuple[StepPoint, ...]:
    return points[:: max(1, -(-len(points) // _MOST_POINTS))]
