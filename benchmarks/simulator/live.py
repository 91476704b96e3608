"""The verbs that need a real engine: --record a trace, and --check-live that simulated and real times agree.

A check serves the recorded prompts in a closed loop with the recorded lengths, simulated and live. With every
policy the live engine must also produce the recorded tokens, or the trace would not be exact. Imports torch only
when an engine is opened.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from benchmarks.engines import closed_loop
from benchmarks.simulator.contest import Contest, Figures
from benchmarks.simulator.options import engine_options, machine_of, trace_of
from benchmarks.simulator.record import RecordedEngine, RecordedSequence
from benchmarks.simulator.report import Check, report_checks
from benchmarks.simulator.simulation import Machine
from benchmarks.simulator.trace import Trace, mean_run, write_trace
from benchmarks.simulator.workload import Workload
from benchmarks.spec_bench.policy_spec import PolicySpec, parse_policy
from faser.cli.console import ProgressReporter
from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir
from faser.config.sources import UsageError
from faser.engine.checkpoints.source import resolve
from faser.engine.contract.step_times import StepTimes
from faser.engine.control.step_cost import CostModel
from faser.engine.text.tokenizer import Tokenizer, load_tokenizer
from faser.errors import ConfigError
from faser.types.request import Request
from faser.types.sampling import SamplingParams
from faser.types.statistics import EngineStats


class LiveEngine(RecordedEngine, Protocol):
    """The part of Engine that live runs use."""

    def stats(self) -> EngineStats: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """The result of a live run. different: requests whose tokens are not the recorded ones."""

    seconds: float
    num_steps: int
    output_tokens: int
    different: int


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


def _compare(cell: Figures, runs: list[LiveRun]) -> Check:
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


def record_trace(asked: argparse.Namespace) -> int:
    """Record how far drafts are accepted, and with --save-cost what steps take; returns the exit status."""
    from benchmarks.simulator.record import Session, record
    from benchmarks.spec_bench.prompts import evenly_spaced
    from faser.cli.bench.prompts import read_prompts

    with ProgressReporter() as report:
        real = open_engine(engine_options(asked), report, recorded=True)
        config = real.config.speculation
        prompts = evenly_spaced(read_prompts(asked.prompts, real.tokenizer), asked.num_prompts)
        session = Session(
            model=asked.MODEL or "embedded",
            drafter=config.method,
            max_tokens=config.cap,
            output_tokens=asked.output_tokens,
            temperature=asked.temperature,
            seed=asked.seed,
            clients=asked.concurrency,
        )
        trace = record(
            real.engine, real.recordings, prompts, session, lambda done, of: report("recording", done, of)
        )
        write_trace(trace, Path(asked.record))
        if asked.save_cost is not None:
            real.step_times.save(Path(asked.save_cost))
    positions, run = sum(each.output_len for each in trace.requests), mean_run(trace.requests)
    print(f"{asked.record}: {len(trace.requests)} requests, {positions} positions, mean run {run:.2f}")
    return 0


def check_against_live(asked: argparse.Namespace) -> int:
    """Run the policies simulated and live, and show how far both agree; returns the exit status."""
    if asked.trace is None:
        raise UsageError(["--check-live needs the --trace that this model and drafter were recorded to"])
    trace = trace_of(asked.trace)
    specs = [parse_policy(each, cap=trace.max_tokens) for each in asked.policies]
    with ProgressReporter() as report:
        real = open_engine(engine_options(asked), report, recorded=False)
        costs = real.costs if asked.cost is None else CostModel(StepTimes.load(Path(asked.cost)))
        checks = check_live(
            real.engine,
            trace,
            machine_of(asked, costs),
            specs,
            clients=asked.concurrency,
            rounds=asked.rounds,
            progress=lambda done, of: report("live runs", done, of),
        )
    report_checks(checks, asked, trace)
    return 0


Report = Callable[[str, int, int], None]
Recordings = Callable[[], Sequence[RecordedSequence]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RealEngine:
    """An engine, its cost model, and what its drafter proposed (nothing if it is not recorded).

    step_times: as measured; costs: corrected by the engine as it goes.
    """

    engine: LiveEngine
    config: EngineConfig
    tokenizer: Tokenizer
    step_times: StepTimes
    costs: CostModel
    recordings: Recordings


def open_engine(options: dict[str, Any], report: Report, *, recorded: bool) -> RealEngine:
    """options: fields of EngineConfig. recorded: its drafter is recorded, and never drafts for real.

    Raises ConfigError for what cannot be served, and for a configuration that does not draft, or not greedily.
    """
    from benchmarks.simulator.draft_recorder import DraftRecorder, make_recorder
    from faser.engine.build import build
    from faser.engine.execution.drafting.drafter import Drafter

    config = EngineConfig(**options)
    if config.speculation.policy == "off" or config.speculation.draft_sample_method == "probabilistic":
        raise ConfigError(
            f"the policy is {config.speculation.policy} and drafts are {config.speculation.draft_sample_method}; "
            "a trace needs a drafter, and greedy drafts, whose acceptance does not depend on their length"
        )
    directory = resolve(config.model, cache_dir(), revision=config.revision, progress=report)
    recorders: list[DraftRecorder] = []

    def recorder_of(drafter: Drafter) -> Drafter:
        if not recorded:
            return drafter
        recorders.append(make_recorder(drafter, config.speculation, num_slots=config.max_num_seqs))
        return recorders[0]

    built = build(config, directory, report, wrap_drafter=recorder_of)
    assert built.costs is not None, "an engine that speculates has a cost model"
    return RealEngine(
        engine=built.engine,
        config=config,
        tokenizer=load_tokenizer(Path(config.tokenizer or directory)),
        step_times=StepTimes(tables=built.costs.tables),
        costs=built.costs,
        recordings=lambda: recorders[0].recordings if recorders else (),
    )
