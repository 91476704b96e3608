"""Compares the simulator with a real engine: the same requests and policies, simulated and live.

Both serve the recorded prompts in a closed loop with the recorded lengths. The live engine must also bring the
recorded tokens with every policy, or the trace would not be exact.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from benchmarks.simulator.contest import Cell, Contest
from benchmarks.simulator.record import StepEngine, closed_loop
from benchmarks.simulator.simulation import Machine
from benchmarks.simulator.trace import Trace
from benchmarks.simulator.workload import Workload
from benchmarks.spec_bench.policy_spec import PolicySpec
from faser.errors import ConfigError
from faser.types import EngineStats, Request, SamplingParams


class LiveEngine(StepEngine, Protocol):
    """The part of Engine that live runs use."""

    def stats(self) -> EngineStats: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """The result of a live run. different: requests whose tokens are not the recorded ones."""

    seconds: float
    num_steps: int
    output_tokens: int
    different: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One policy. Errors are simulated / live - 1. *_speedup: tokens per second over those of the first policy.

    On a machine with other load, absolute errors show that load; speed-ups can still be compared.
    """

    policy: str
    live_tokens_per_s: float
    simulated_tokens_per_s: float
    tokens_per_s_error: float
    live_step_ms: float
    simulated_step_ms: float
    step_error: float
    live_steps: int
    simulated_steps: int
    different: int
    live_speedup: float = 1.0
    simulated_speedup: float = 1.0


def check_live(
    engine: LiveEngine,
    trace: Trace,
    machine: Machine,
    specs: Sequence[PolicySpec],
    *,
    clients: int,
    rounds: int = 3,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[Check]:
    """Run every policy on both. Policies take turns for `rounds` live runs, of which the median counts.

    progress: called with (live runs done, all). Raises ConfigError for a trace without prompts.
    """
    if not all(each.prompt_token_ids for each in trace.requests):
        raise ConfigError("the trace has no prompts, so it cannot be run live; record it with --record")
    runs: dict[str, list[LiveRun]] = {spec.text: [] for spec in specs}
    for turn in range(rounds):
        for place, spec in enumerate(specs):
            engine.use_policy(spec.name, spec.gamma, overlap=spec.overlap)
            runs[spec.text].append(run_live(engine, trace, clients, label=f"{turn}-{spec.text}"))
            progress(turn * len(specs) + place + 1, rounds * len(specs))
    contest = Contest(
        trace=trace,
        machine=machine,
        workload=Workload(clients=clients, in_order=True),
        duration_s=None,
        limit=len(trace.requests),
    )
    checks = [_compare(contest.run(spec), runs[spec.text]) for spec in specs]
    return [
        replace(
            each,
            live_speedup=each.live_tokens_per_s / checks[0].live_tokens_per_s,
            simulated_speedup=each.simulated_tokens_per_s / checks[0].simulated_tokens_per_s,
        )
        for each in checks
    ]


def run_live(engine: LiveEngine, trace: Trace, clients: int, *, label: str) -> LiveRun:
    """Serve the recorded prompts, `clients` at a time, each to its recorded length. label: prefix of the ids."""
    recorded = {f"{label}-{number}": each for number, each in enumerate(trace.requests)}
    requests = [
        Request(
            request_id=request_id,
            prompt_token_ids=each.prompt_token_ids,
            sampling=SamplingParams(
                temperature=trace.temperature, seed=each.seed, max_tokens=each.output_len, ignore_eos=True
            ),
            arrival_s=time.monotonic(),
        )
        for request_id, each in recorded.items()
    ]
    steps_before = engine.stats().num_steps
    began_s = time.perf_counter()
    answers = dict(closed_loop(engine, requests, clients))
    seconds = time.perf_counter() - began_s
    return LiveRun(
        seconds=seconds,
        num_steps=engine.stats().num_steps - steps_before,
        output_tokens=sum(map(len, answers.values())),
        different=sum(tuple(answers[name]) != each.output_token_ids for name, each in recorded.items()),
    )


def _compare(cell: Cell, runs: list[LiveRun]) -> Check:
    run = sorted(runs, key=lambda each: each.seconds)[len(runs) // 2]
    live_tokens_per_s = run.output_tokens / run.seconds
    live_step_ms = 1000 * run.seconds / run.num_steps
    return Check(
        policy=cell.policy,
        live_tokens_per_s=live_tokens_per_s,
        simulated_tokens_per_s=cell.tokens_per_s,
        tokens_per_s_error=cell.tokens_per_s / live_tokens_per_s - 1,
        live_step_ms=live_step_ms,
        simulated_step_ms=cell.mean_step_ms,
        step_error=cell.mean_step_ms / live_step_ms - 1,
        live_steps=run.num_steps,
        simulated_steps=cell.num_steps,
        different=max(each.different for each in runs),
    )
