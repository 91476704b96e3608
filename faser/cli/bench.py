"""`faser bench spec [MODEL]`: policies of speculation side by side, on one engine in this process.

At each concurrency every policy answers the same requests, that many at a time, once in each round. Each round
begins with another policy, so that a machine that slows down slows all of them. Before the rounds, a run without
drafts that is not counted fills the prefix cache, finds how many requests take long enough to measure, and gives
the tokens that every other answer must have. The table shows medians over the rounds.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from faser import __version__
from faser.cli.bench_prompts import BenchPrompt, read_prompts, read_questions
from faser.cli.console import ProgressReporter, runs_bar
from faser.config.declaration import did_you_mean
from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir
from faser.config.sources import (
    CommandParser,
    Given,
    UsageError,
    engine_config,
    engine_settings,
    number,
    whole_number,
)
from faser.config.speculation import POLICIES, SpeculationConfig
from faser.engine.checkpoints.source import resolve
from faser.engine.text.tokenizer import load_tokenizer
from faser.errors import ConfigError, EngineError
from faser.types import FinishReason, Request, SamplingParams, SpeculationStats

if TYPE_CHECKING:
    from faser.engine.engine import Engine

PROG = "faser bench spec"

_HELP = """usage: faser bench spec [MODEL] [flags]

Compare policies of speculation on this machine, with your prompts, and check that drafts change no answer.

  MODEL                   a directory, .gguf file or hub id [the embedded SmolLM2-135M-Instruct]
  --prompts FILE          JSON lines as in Spec-Bench, or one text per line [built-in prompts]
  --max-prompt-tokens N   leave out longer prompts
  --concurrency N,N       requests at a time [1,4,16]
  --policies NAME,NAME    off is always measured [off,fixed:3,faser]
  --temperature X         [0]
  --output-tokens N       length of every answer [64]
  --rounds N              the table has their medians [3]

Flags of faser serve about the model, the engine and speculation may follow: faser serve --help=all.
The exit status is 1 if an answer differs from the one without drafts."""

_KINDS = {"spec": "a model and its drafter over concurrency and policies, on your prompts"}
_VLLM_KINDS = ("serve", "latency", "throughput", "sweep", "startup", "mm-processor")

_OFF = "off"
_MIN_REQUESTS = 4
_MIN_S = 3.0  # a run without speculation lasts about that long at least
_LONG_FIRST_RUN = (
    4.0  # one that takes this many times _MIN_S, prompts included, is not repeated with cached prompts
)
_MAX_ROWS = 1024
_PAST_ANSWERS = "suffix_decoding_max_cached_requests"

_concurrency = number(int, "numbers of at least 1, like 1,2,4", lambda found: found >= 1)
_temperature = number(float, "a number of at least 0 and at most 2", lambda found: 0 <= found <= 2)

Tokens = tuple[int, ...]


def bench(arguments: Sequence[str]) -> int:
    """Run one kind of measurement; returns its exit status. Raises UsageError for an unknown kind."""
    if not arguments or arguments[0] in ("-h", "--help"):
        lines = "\n".join(f"  {kind:<9} {what}" for kind, what in _KINDS.items())
        print(f"usage: faser bench WHAT …\n\n{lines}\n\nfaser bench WHAT --help says more.")
        return 0 if arguments else 2
    kind, rest = arguments[0], arguments[1:]
    if kind == "spec":
        return spec(rest)
    if kind in _VLLM_KINDS:
        raise UsageError([f"'bench {kind}' is known from vLLM but not supported by FASER {__version__}"])
    raise UsageError([f"unknown measurement '{kind}'.{did_you_mean(kind, _KINDS)} There are: {', '.join(_KINDS)}"])


def spec(arguments: Sequence[str]) -> int:
    """Measure, and print the table; returns the exit status. Raises ConfigError."""
    own, rest = _own_parser().parse_known_args(list(arguments))
    if own.help:
        print(_HELP)
        return 0
    config = bench_config(rest, max(own.concurrency))
    policies = policies_of(own.policies, config.speculation)
    if own.prompts is not None:
        read_questions(Path(own.prompts))  # a file that cannot be read is refused before a model is loaded
    measured = _measure(own, config, policies)
    print(table(measured))
    wrong, answers = sum(each.differing for each in measured), sum(each.num_answers for each in measured)
    if wrong:
        print(f"\n{wrong} OF {answers} ANSWERS DIFFER FROM THOSE WITHOUT DRAFTS.")
        return 1
    print(f"\nAll {answers} answers are token for token those without drafts.")
    return 0


def _own_parser() -> CommandParser:
    parser = CommandParser(PROG)
    add: Any = parser.add_argument
    add("--prompts")
    add("--max-prompt-tokens", type=whole_number)
    add("--concurrency", type=_counts, default=[1, 4, 16])
    add("--policies", type=_texts, default=[_OFF, "fixed:3", "faser"])
    add("--temperature", type=_temperature, default=0.0)
    add("--output-tokens", type=whole_number, default=64)
    add("--rounds", type=whole_number, default=3)
    add("--help", "-h", action="store_true")
    return parser


def bench_config(arguments: Sequence[str], concurrency: int) -> EngineConfig:
    """The engine's settings; those that are not given fit the highest concurrency and the longest drafts."""
    findings = engine_settings(PROG, arguments)
    findings.given.setdefault("max_num_seqs", Given(texts=(str(concurrency),), label="--concurrency"))
    config = engine_config(findings)
    speculation = config.speculation
    if speculation.policy == _OFF:
        raise UsageError([f"{findings.label('speculative_policy')} is off; then there are no drafts to measure"])
    keys = dict(config.speculative_config or {})
    if any(each.name == "suffix" for each in speculation.drafters):
        keys.setdefault(_PAST_ANSWERS, 0)  # every policy answers the same prompts
    rows = min(_MAX_ROWS, concurrency * (speculation.cap + 1))
    tokens = config.max_num_batched_tokens
    if "max_num_batched_tokens" not in findings.given:
        tokens = max(tokens, rows)
    return replace(config, speculative_config=keys, max_num_batched_tokens=tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPolicy:
    """text: as the command line spells it. gamma: of policy fixed."""

    text: str
    name: str
    gamma: int | None = None


def policies_of(texts: Sequence[str], speculation: SpeculationConfig) -> list[NamedPolicy]:
    """off first, then those asked for. Raises ConfigError for one that the engine does not have."""
    return [_policy(text, speculation) for text in dict.fromkeys((_OFF, *texts))]


def _policy(text: str, speculation: SpeculationConfig) -> NamedPolicy:
    name, colon, number = text.partition(":")
    if name not in POLICIES:
        raise ConfigError(f"--policies names {text!r}; it must be one of {', '.join(POLICIES)}")
    if name == "fixed":
        if not number.isdecimal() or not 1 <= int(number) <= speculation.cap:
            raise ConfigError(f"--policies names {text!r}; fixed:N needs an N of 1 … {speculation.cap}")
        return NamedPolicy(text=text, name=name, gamma=int(number))
    if colon:
        raise ConfigError(f"--policies names {text!r}; {name} takes no number")
    if name == "table" and not speculation.table:
        key = "num_speculative_tokens_per_batch_size"
        raise ConfigError(f"--policies names {text!r}; it needs '{key}' in --speculative-config")
    return NamedPolicy(text=text, name=name)


def _measure(own: argparse.Namespace, config: EngineConfig, policies: list[NamedPolicy]) -> list["Measured"]:
    from faser.engine.build import build_engine  # imports torch

    with ProgressReporter() as report:
        directory = resolve(config.model, cache_dir(), revision=config.revision, progress=report)
        engine, _ = build_engine(config, directory, report)
    prompts = read_prompts(own.prompts, load_tokenizer(Path(config.tokenizer or directory)))
    fitting = [each for each in prompts if len(each.token_ids) <= (own.max_prompt_tokens or math.inf)]
    if not fitting:
        shortest = min(len(each.token_ids) for each in prompts)
        raise ConfigError(
            f"--max-prompt-tokens is {own.max_prompt_tokens}; the shortest prompt has {shortest} tokens"
        )
    comparison = PolicyComparison(
        engine=engine,
        prompts=fitting,
        policies=policies,
        temperature=own.temperature,
        output_tokens=own.output_tokens,
        rounds=own.rounds,
    )
    measured: list[Measured] = []
    with runs_bar() as bar:
        task = bar.add_task("", total=len(policies) * own.rounds * len(own.concurrency))
        for concurrency in own.concurrency:
            measured += comparison.at(concurrency, lambda run: bar.update(task, description=run, advance=1))
    return measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All requests answered once with one policy.

    tokens_per_s: at full concurrency. After that it would depend on which answers happen to end last.
    """

    answers: tuple[Tokens, ...]
    seconds: float
    tokens_per_s: float
    gamma_mean: float
    verified: int
    accepted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A policy at one concurrency: a line of the table. speed_up: over off in the same round, median."""

    concurrency: int
    policy: str
    runs: tuple[Run, ...]
    speed_up: float
    differing: int

    @property
    def num_answers(self) -> int:
        return sum(len(each.answers) for each in self.runs)


@dataclass(slots=True, kw_only=True)
class PolicyComparison:
    """Measures policies on one engine. now: a clock in seconds. min_s: as _MIN_S."""

    engine: "Engine"
    prompts: Sequence[BenchPrompt]
    policies: list[NamedPolicy]
    temperature: float
    output_tokens: int
    rounds: int
    now: Callable[[], float] = time.perf_counter
    min_s: float = _MIN_S
    _num_runs: int = 0

    def at(self, concurrency: int, on_run: Callable[[str], None]) -> list[Measured]:
        """Every policy at one concurrency, off first. on_run: is called after each run with its name."""
        self.engine.use_policy(_OFF)  # forgets what the last concurrency taught about acceptance
        expected = self._expected_answers(concurrency)
        runs: dict[str, list[Run]] = {each.text: [] for each in self.policies}
        for round_ in range(self.rounds):
            first = round_ % len(self.policies)
            for policy in self.policies[first:] + self.policies[:first]:
                runs[policy.text].append(self._run(policy, concurrency, len(expected)))
                on_run(f"{concurrency} at once, {policy.text}")
        off = runs[_OFF]
        return [
            Measured(
                concurrency=concurrency,
                policy=text,
                runs=tuple(own),
                speed_up=median(
                    one.tokens_per_s / other.tokens_per_s for one, other in zip(own, off, strict=True)
                ),
                differing=sum(
                    answer != right for each in own for answer, right in zip(each.answers, expected, strict=True)
                ),
            )
            for text, own in runs.items()
        ]

    def _expected_answers(self, concurrency: int) -> tuple[Tokens, ...]:
        """The answers without drafts, of as many requests as take min_s."""
        off = NamedPolicy(text=_OFF, name=_OFF)
        count = max(concurrency, _MIN_REQUESTS)
        found = self._run(off, concurrency, count)
        if found.seconds < _LONG_FIRST_RUN * self.min_s:
            found = self._run(off, concurrency, count)
        if found.seconds < self.min_s:
            count = concurrency * math.ceil(count * self.min_s / found.seconds / concurrency)
            found = self._run(off, concurrency, count)
        return found.answers

    def _run(self, policy: NamedPolicy, concurrency: int, num_requests: int) -> Run:
        """Answer the requests, `concurrency` at a time. Raises EngineError if an answer fails."""
        self.engine.use_policy(policy.name, policy.gamma, forget=False)
        self._num_runs += 1
        waiting = self._requests(f"run-{self._num_runs}", num_requests)
        answers: dict[str, list[int]] = {}

        def admit(count: int) -> None:
            for request in islice(waiting, count):
                answers[request.request_id] = []
                self.engine.add(request)

        before, began_s = self._stats(), self.now()
        num_left, window_tokens, window_s = num_requests, 0, 0.0
        admit(concurrency)
        while self.engine.has_work():
            full = num_left >= min(concurrency, num_requests)
            deltas = self.engine.step()
            for delta in deltas:
                answers[delta.request_id] += delta.token_ids
                if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                    raise EngineError(f"{delta.request_id} ended with {delta.finish_reason}: {delta.error}")
            if full:
                window_tokens += sum(len(delta.token_ids) for delta in deltas)
                window_s = self.now() - began_s
            ended = sum(delta.finish_reason is not None for delta in deltas)
            num_left -= ended
            admit(ended)
        after = self._stats()
        gammas = [now - then for now, then in zip_longest(_gammas(after), _gammas(before), fillvalue=0)]
        return Run(
            answers=tuple(map(tuple, answers.values())),
            seconds=self.now() - began_s,
            tokens_per_s=window_tokens / window_s,
            gamma_mean=sum(gamma * times for gamma, times in enumerate(gammas)) / max(sum(gammas), 1),
            verified=_total(after, "verified") - _total(before, "verified"),
            accepted=_total(after, "accepted") - _total(before, "accepted"),
        )

    def _requests(self, name: str, count: int) -> Iterator[Request]:
        """The same for every policy. All answers have one length, so that no work depends on their text."""
        for index in range(count):
            yield Request(
                request_id=f"{name}/{index}",
                prompt_token_ids=self.prompts[index % len(self.prompts)].token_ids,
                sampling=SamplingParams(
                    temperature=self.temperature, seed=index, max_tokens=self.output_tokens, ignore_eos=True
                ),
                arrival_s=time.monotonic(),
            )

    def _stats(self) -> SpeculationStats:
        stats = self.engine.stats().speculation
        assert stats is not None, "bench_config refuses an engine without a drafter"
        return stats


def _total(stats: SpeculationStats, counter: str) -> int:
    return sum(getattr(each, counter) for each in stats.methods)


def _gammas(stats: SpeculationStats) -> list[int]:
    """[cap + 1] how often each gamma was verified, in all classes."""
    return [sum(counts) for counts in zip(*(counts for _, counts in stats.gammas), strict=True)]


def table(measured: Sequence[Measured]) -> str:
    """Aligned columns, one line a concurrency and policy."""
    rows = [
        ("at once", "policy", "tokens/s", "slowest", "fastest", "over off", "mean γ", "accepted", "differing"),
        *map(_row, measured),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at == 1 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def _row(each: Measured) -> tuple[str, ...]:
    speeds = [run.tokens_per_s for run in each.runs]
    verified, accepted = sum(run.verified for run in each.runs), sum(run.accepted for run in each.runs)
    return (
        str(each.concurrency),
        each.policy,
        *(f"{speed:.1f}" for speed in (median(speeds), min(speeds), max(speeds))),
        f"{each.speed_up:.2f}x",
        f"{median(run.gamma_mean for run in each.runs):.2f}",
        f"{accepted / verified:.0%}" if verified else "",
        f"{each.differing} of {each.num_answers}",
    )


def _texts(text: str) -> list[str]:
    return [each for each in text.split(",") if each]


def _counts(text: str) -> list[int]:
    values = [_concurrency(each) for each in _texts(text)]
    if not values:
        raise argparse.ArgumentTypeError(f"it is {text!r}; it must be numbers of at least 1, like 1,2,4")
    return values
