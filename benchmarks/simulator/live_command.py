"""The verbs that need a real engine: --record a trace, --check-live simulated times."""

import argparse
from pathlib import Path

from benchmarks.simulator.arguments import engine_options, machine_of, trace_of
from benchmarks.simulator.live import check_live
from benchmarks.simulator.tables import report_checks
from benchmarks.simulator.trace import mean_run, write_trace
from benchmarks.spec_bench.policy_spec import parse_policy
from faser.cli.console import ProgressReporter
from faser.config.sources import UsageError
from faser.engine.contract.step_times import StepTimes
from faser.engine.control.step_cost import CostModel


def record_trace(asked: argparse.Namespace) -> int:
    """Record how far drafts are accepted, and with --save-cost what steps take; returns the exit status."""
    from benchmarks.simulator.real_engine import open_engine
    from benchmarks.simulator.record import Session, record
    from benchmarks.spec_bench.prompts import evenly_spaced
    from faser.cli.bench_prompts import read_prompts

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
    from benchmarks.simulator.real_engine import open_engine

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
