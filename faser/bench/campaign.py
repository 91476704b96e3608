"""Campaign: runs every policy at every concurrency and temperature, in rounds, and keeps a Run of each.

A cell is one concurrency at one temperature. Within a cell the policies alternate, and each round begins with
another policy, so that a machine that slows down slows all policies. A policy that is far slower than the best
in a cell's first round can be left out of the cell's other rounds (drop_below). Each cell begins with a run of
policy off that is not counted: it fills the prefix cache, determines the number of requests in the cell, and
gives the reference tokens for all other runs. Acceptance estimates are kept within a cell, as on a server that
has been running for a while. Knows neither files nor models.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from faser.bench.policy_spec import PolicySpec
from faser.bench.prompts import BenchPrompt
from faser.bench.runner import Conditions, RunResult, SteppedEngine, StepPoint, Tokens, run
from faser.bench.workload import bench_requests

_MIN_REQUESTS = 4
_MAX_POINTS = 60  # steps of a run that are kept, evenly spaced
# A first run this many times longer than min_s, prompts included, is not repeated with cached prompts.
_LONG_FIRST_RUN = 4.0
_OFF = "off"
_REFERENCE_POLICY = PolicySpec(text=_OFF, name=_OFF)
_NEVER_DROPPED = (_OFF, "faser")  # the report compares faser with off


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignPlan:
    """What to measure. min_s: the approximate minimum duration of a run without speculation.

    drop_below: a policy slower than this share of the best speed in the first round of a cell has no further
    rounds in the cell; 0 drops none. Policies off and faser are never dropped.
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
    """What is kept of a RunResult. num_jobs: requests. mismatches: answers that differ from those without drafts.

    survivals[k - 1]: share of the drafts of k or more tokens whose first k were accepted; None: no such draft.
    points: a sample of those in RunResult.
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
    """done: finished runs, also of an earlier campaign; new ones are appended. now: a clock, in seconds."""

    engine: SteppedEngine
    plan: CampaignPlan
    prompts: Sequence[BenchPrompt]
    done: list[Run] = field(default_factory=list)
    now: Callable[[], float] = time.perf_counter
    _name: int = 0

    @property
    def num_done(self) -> int:
        """Number of planned runs that are finished or dropped."""
        finished = {each.key for each in self.done}
        return sum(
            (temperature, concurrency, spec.text, round_) in finished
            or (round_ > 0 and self._is_dropped(temperature, concurrency, spec))
            for temperature in self.plan.temperatures
            for concurrency in self.plan.concurrencies
            for spec in self.plan.policies
            for round_ in range(self.plan.rounds)
        )

    def runs(self, announce: Callable[[str], None]) -> Iterator[Run]:
        """Measure the missing runs. announce: is called with a description of each stage."""
        for temperature in self.plan.temperatures:
            for concurrency in self.plan.concurrencies:
                yield from self._cell(temperature, concurrency, announce)

    def _cell(self, temperature: float, concurrency: int, announce: Callable[[str], None]) -> Iterator[Run]:
        finished = {each.key for each in self.done}
        of_cell = [
            each for each in self.done if (each.temperature, each.concurrency) == (temperature, concurrency)
        ]
        missing = [
            (round_, spec)
            for round_ in range(self.plan.rounds)
            for spec in _rotated(self.plan.policies, round_)
            if (temperature, concurrency, spec.text, round_) not in finished
        ]
        if not missing:
            return
        conditions = Conditions(
            concurrency=concurrency,
            temperature=temperature,
            output_tokens=self.plan.output_tokens,
            include_prefill=self.plan.include_prefill,
        )
        announce(f"T={temperature:g} x{concurrency}: warming up")
        self.engine.use_policy(_OFF)  # forgets the acceptance of the previous cell
        reference = self._reference_answers(conditions, of_cell[0].num_jobs if of_cell else None)
        for round_, spec in missing:
            if round_ and self._is_dropped(temperature, concurrency, spec):
                continue
            announce(f"T={temperature:g} x{concurrency}: {spec.text}, round {round_ + 1}")
            result = self._run(spec, conditions, len(reference))
            kept = _kept(result, reference, spec.text, conditions, round_)
            self.done.append(kept)
            yield kept

    def _is_dropped(self, temperature: float, concurrency: int, spec: PolicySpec) -> bool:
        """Whether the cell's first round is complete and the policy was too slow in it."""
        first = {
            each.policy: each.tokens_per_s
            for each in self.done
            if (each.temperature, each.concurrency, each.round) == (temperature, concurrency, 0)
        }
        if spec.name in _NEVER_DROPPED or any(each.text not in first for each in self.plan.policies):
            return False
        return first[spec.text] < self.plan.drop_below * max(first[each.text] for each in self.plan.policies)

    def _reference_answers(self, conditions: Conditions, num_requests: int | None) -> tuple[Tokens, ...]:
        """Answers without speculation. num_requests: None: enough for a run of min_s."""
        if num_requests is not None:
            return self._run(_REFERENCE_POLICY, conditions, num_requests).answers
        count = max(conditions.concurrency, _MIN_REQUESTS)
        result = self._run(_REFERENCE_POLICY, conditions, count)
        if result.wall_s < _LONG_FIRST_RUN * self.plan.min_s:
            result = self._run(_REFERENCE_POLICY, conditions, count)
        if result.wall_s < self.plan.min_s:
            count = math.ceil(count * self.plan.min_s / result.wall_s / conditions.concurrency)
            count *= conditions.concurrency
            result = self._run(_REFERENCE_POLICY, conditions, count)
        return result.answers

    def _run(self, spec: PolicySpec, conditions: Conditions, num_requests: int) -> RunResult:
        self.engine.use_policy(spec.name, spec.gamma, forget=False, overlap=spec.overlap)
        self._name += 1
        requests = bench_requests(self.prompts, num_requests)
        return run(self.engine, requests, conditions, name=f"run-{self._name}", now=self.now)


def _rotated(policies: tuple[PolicySpec, ...], round_: int) -> tuple[PolicySpec, ...]:
    first = round_ % len(policies)
    return policies[first:] + policies[:first]


def _kept(
    result: RunResult, reference: tuple[Tokens, ...], policy: str, conditions: Conditions, round_: int
) -> Run:
    return Run(
        policy=policy,
        concurrency=conditions.concurrency,
        temperature=conditions.temperature,
        round=round_,
        num_jobs=len(result.answers),
        num_tokens=result.num_tokens,
        wall_s=result.wall_s,
        window_tokens=result.window_tokens,
        window_s=result.window_s,
        num_steps=result.num_steps,
        gamma_mean=result.gamma_mean,
        drafted=result.drafted,
        verified=result.verified,
        accepted=result.accepted,
        survivals=tuple(
            accepted / drafts if drafts else None
            for accepted, drafts in zip(result.accepted_counts, result.draft_counts, strict=True)
        ),
        decide_s=result.decide_s,
        mismatches=sum(answer != expected for answer, expected in zip(result.answers, reference, strict=True)),
        points=_sampled(result.points),
    )


def _sampled(points: tuple[StepPoint, ...]) -> tuple[StepPoint, ...]:
    return points[:: max(1, -(-len(points) // _MAX_POINTS))]
