"""Drafters side by side: the same requests, answered by each of them in turn, under one load.

Every drafter has an engine of its own in this process, as `faser serve` would start it; the others are idle
meanwhile. Every run has a cache salt of its own, so prompts are read and past answers are those of the run, as for
a new client. Before the rounds that count, a run without drafts finds how many requests take long enough and
records their answers, and every other drafter has one run to learn what its drafts gain under this load.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from typing import TYPE_CHECKING

import numpy as np

from faser.cli.bench.estimates import Estimate, ratio
from faser.cli.bench.prompts import BenchPrompt
from faser.errors import EngineError
from faser.optional import present
from faser.types.answer import FinishReason
from faser.types.request import Request
from faser.types.sampling import SamplingParams
from faser.types.statistics import NO_SPECULATION, SpeculationStats

if TYPE_CHECKING:
    from faser.engine.engine import Engine

OFF = "off"
MIN_REQUESTS = 6  # one of each kind of the built-in prompts
MIN_ROUNDS_OF_REQUESTS = 2  # times as many requests as run at once
MIN_S = 3.0  # a run without speculation lasts about that long at least

Tokens = tuple[int, ...]
AnswerKey = tuple[int, Tokens]  # seed and prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """text: as the command line spells it. gamma: of policy fixed."""

    text: str
    name: str
    gamma: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One line of the table: a drafter under a policy. policy: None for the engine that never drafts.

    expect: told the answers of the coming runs, by seed and prompt, where drafts are made of them.
    """

    name: str
    engine: "Engine"
    policy: Policy | None = None
    expect: Callable[[Mapping[AnswerKey, Tokens]], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """temperature: of all requests. concurrency: requests at a time."""

    temperature: float
    concurrency: int

    def __str__(self) -> str:
        return f"{self.concurrency} at once, temperature {self.temperature:g}"


@dataclass(slots=True, kw_only=True)
class Answer:
    """One request. decode_s: from its first tokens to its last ones. decoded: tokens that came in that time."""

    token_ids: list[int] = field(default_factory=list)
    decoded: int = 0
    first_s: float | None = None
    last_s: float = 0.0
    verified: int = 0
    accepted: int = 0

    @property
    def decode_s(self) -> float:
        return 0.0 if self.first_s is None else self.last_s - self.first_s

    def add(self, token_ids: Sequence[int], now_s: float) -> None:
        if not token_ids:
            return
        if self.first_s is None:
            self.first_s = now_s
        else:
            self.decoded += len(token_ids)
        self.last_s = now_s
        self.token_ids += token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All requests answered once. gamma_mean: draft tokens verified in a step of a sequence."""

    answers: tuple[Answer, ...]
    seconds: float
    gamma_mean: float
    verified: int
    accepted: int

    @property
    def tokens(self) -> int:
        return sum(len(each.token_ids) for each in self.answers)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second, prefill included."""
        return self.tokens / self.seconds

    @property
    def decode_per_s(self) -> float | None:
        """Tokens a second of one request after its first ones; None: no answer has any.

        The inverse of the mean time per output token.
        """
        seconds = sum(each.decode_s for each in self.answers)
        return sum(each.decoded for each in self.answers) / seconds if seconds else None

    @property
    def answers_hash(self) -> str:
        tokens = np.concatenate([[len(each.token_ids), *each.token_ids] for each in self.answers])
        return hashlib.sha256(tokens.astype("<i8").tobytes()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """An arm under one load. whole, decoding: rates over those of off in the same rounds.

    runs, off: one for each round. differing: answers that are not token for token those without drafts.
    """

    load: Load
    arm: str
    runs: tuple[Run, ...]
    off: tuple[Run, ...]

    @property
    def whole(self) -> Estimate:
        return ratio([run.tokens_per_s for run in self.runs], [run.tokens_per_s for run in self.off])

    @property
    def decoding(self) -> Estimate | None:
        """None: answers are too short."""
        mine = present(run.decode_per_s for run in self.runs)
        theirs = present(run.decode_per_s for run in self.off)
        return ratio(mine, theirs) if len(mine) == len(theirs) == len(self.runs) else None

    @property
    def differing(self) -> int:
        right = self.off[0].answers
        return sum(
            one.token_ids != other.token_ids
            for run in self.runs
            for one, other in zip(run.answers, right, strict=True)
        )

    @property
    def num_answers(self) -> int:
        return sum(len(run.answers) for run in self.runs)


@dataclass(slots=True, kw_only=True)
class Comparison:
    """Measures arms; the first one is off. now: a clock in seconds. min_s: as MIN_S. ignore_eos: answers go on."""

    arms: Sequence[Arm]
    prompts: Sequence[BenchPrompt]
    output_tokens: int
    rounds: int
    ignore_eos: bool = False
    now: Callable[[], float] = time.perf_counter
    min_s: float = MIN_S
    _num_runs: int = 0

    def __post_init__(self) -> None:
        assert self.arms[0].policy is None, "the first arm never drafts"
        for arm in self.arms:
            if arm.policy is not None:  # what an earlier process has learned is not known to all of them
                arm.engine.use_policy(arm.policy.name, arm.policy.gamma)

    @property
    def runs_per_load(self) -> int:
        return len(self.arms) * (self.rounds + 1)

    def under(self, load: Load, on_run: Callable[[str], None]) -> list[Measured]:
        """All arms under one load. on_run: is told before each run what it is."""
        off, *others = self.arms
        on_run(f"{load}: {off.name}")
        first = self._long_enough(off, load)
        answers = {
            (seed, prompt.token_ids): tuple(answer.token_ids)
            for seed, (prompt, answer) in enumerate(
                zip(self._asked(len(first.answers)), first.answers, strict=True)
            )
        }
        for arm in others:
            if arm.expect is not None:
                arm.expect(answers)
            on_run(f"{load}: {arm.name}, learning")
            self._run(arm, load, len(answers))
        runs: dict[str, list[Run]] = {each.name: [] for each in self.arms}
        for round_ in range(self.rounds):
            begin = round_ % len(self.arms)
            for arm in (*self.arms[begin:], *self.arms[:begin]):
                on_run(f"{load}: {arm.name}, round {round_ + 1}")
                runs[arm.name].append(self._run(arm, load, len(answers)))
        return [
            Measured(load=load, arm=name, runs=tuple(own), off=tuple(runs[off.name])) for name, own in runs.items()
        ]

    def _long_enough(self, off: Arm, load: Load) -> Run:
        count = max(MIN_ROUNDS_OF_REQUESTS * load.concurrency, MIN_REQUESTS)
        found = self._run(off, load, count)
        if found.seconds < self.min_s:
            count = load.concurrency * math.ceil(count * self.min_s / found.seconds / load.concurrency)
            found = self._run(off, load, count)
        return found

    def _asked(self, count: int) -> list[BenchPrompt]:
        return [self.prompts[seed % len(self.prompts)] for seed in range(count)]

    def _run(self, arm: Arm, load: Load, num_requests: int) -> Run:
        """Answer the requests, as many at a time as the load says. Raises EngineError if an answer fails."""
        engine = arm.engine
        if arm.policy is not None:
            engine.use_policy(arm.policy.name, arm.policy.gamma, forget=False)
        self._num_runs += 1
        waiting = self._requests(f"run-{self._num_runs}", load, num_requests)
        answers: dict[str, Answer] = {}

        def admit(count: int) -> None:
            for request in islice(waiting, count):
                answers[request.request_id] = Answer()
                engine.add(request)

        before, began_s = engine.stats().speculation or NO_SPECULATION, self.now()
        admit(load.concurrency)
        while engine.has_work():
            deltas = engine.step()
            now_s, ended = self.now(), 0
            for delta in deltas:
                answer = answers[delta.request_id]
                answer.add(delta.token_ids, now_s)
                if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                    raise EngineError(f"{delta.request_id} ended with {delta.finish_reason}: {delta.error}")
                ended += delta.finish_reason is not None
                if (drafts := delta.speculation) is not None:
                    answer.verified, answer.accepted = drafts.verified, drafts.accepted
            admit(ended)
        seconds, after = self.now() - began_s, engine.stats().speculation or NO_SPECULATION
        gammas = [now - then for now, then in zip_longest(_gammas(after), _gammas(before), fillvalue=0)]
        return Run(
            answers=tuple(answers.values()),
            seconds=seconds,
            gamma_mean=sum(gamma * times for gamma, times in enumerate(gammas)) / max(sum(gammas), 1),
            verified=_total(after, "verified") - _total(before, "verified"),
            accepted=_total(after, "accepted") - _total(before, "accepted"),
        )

    def _requests(self, run: str, load: Load, count: int) -> Iterator[Request]:
        """Make the requests of a run, the same for every arm but for their salt."""
        for seed, prompt in enumerate(self._asked(count)):
            yield Request(
                request_id=f"{run}/{seed}",
                prompt_token_ids=prompt.token_ids,
                sampling=SamplingParams(
                    temperature=load.temperature,
                    seed=seed,
                    max_tokens=self.output_tokens,
                    ignore_eos=self.ignore_eos,
                ),
                arrival_s=time.monotonic(),
                cache_salt=run,
            )


def _total(stats: SpeculationStats, counter: str) -> int:
    return sum(getattr(each, counter) for each in stats.methods)


def _gammas(stats: SpeculationStats) -> list[int]:
    """Return the number of times [cap + 1] that each gamma was verified, in all classes."""
    return [sum(counts) for counts in zip(*(each for _, each in stats.gammas), strict=True)]
