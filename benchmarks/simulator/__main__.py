"""Policies against each other on recorded acceptance and measured step times, simulated.

Three verbs: simulate a workload (needs --cost and --trace), --record a trace with a real engine, --check-live that
simulated and real times agree. Exit status: 0 done, 1 an engine failed, 2 the command line or a file is wrong.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.simulator.contest import Contest, Figures
from benchmarks.simulator.live import check_against_live, record_trace
from benchmarks.simulator.options import PROG, machine_of, simulate_parser, trace_of
from benchmarks.simulator.report import report_cells
from benchmarks.simulator.workload import parse_workload
from benchmarks.spec_bench.policy_spec import PolicySpec, parse_policy
from faser.cli.console import ProgressReporter
from faser.config.sources import UsageError
from faser.engine.contract.step_times import StepTimes
from faser.engine.control.step_cost import CostModel
from faser.errors import ConfigError, FaserError
from faser.types.request import Slo


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and print an error as one line; returns the exit status."""
    try:
        return simulate(arguments)
    except FaserError as error:
        problems = error.problems if isinstance(error, UsageError) else [str(error)]
        for problem in problems:
            print(f"{PROG}: {problem}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def simulate(arguments: Sequence[str] | None) -> int:
    """Run one verb; returns the exit status. Raises ConfigError for arguments and files that do not fit."""
    parser = simulate_parser(__doc__)
    asked = parser.parse_args(arguments)
    if asked.help:
        print(parser.format_help())
        return 0
    if asked.record is not None:
        return record_trace(asked)
    return check_against_live(asked) if asked.check_live else _simulate(asked)


def _simulate(asked: argparse.Namespace) -> int:
    if asked.trace is None or asked.cost is None:
        raise UsageError(
            ["--trace and --cost are needed (or --record TRACE, which makes a trace, and costs with --save-cost)"]
        )
    trace = trace_of(asked.trace)
    specs = [parse_policy(each, cap=trace.max_tokens) for each in asked.policies]
    workload = parse_workload(asked.arrivals, scale=asked.scale_tokens)
    if asked.duration is None and asked.num_requests is None and workload.azure is None:
        raise UsageError([f"--arrivals is {asked.arrivals}; it never ends: give --duration or --num-requests"])
    contest = Contest(
        trace=trace,
        machine=machine_of(asked, CostModel(StepTimes.load(Path(asked.cost)))),
        workload=workload,
        duration_s=asked.duration,
        limit=asked.num_requests,
        slo=Slo(ttft_ms=asked.slo_ttft_ms, tpot_ms=asked.slo_tpot_ms),
        seed=asked.seed,
    )
    cells = _run_all(contest, specs, asked.speed_up)
    report_cells(cells, asked, trace)
    return 0


def _run_all(contest: Contest, specs: list[PolicySpec], loads: list[float]) -> list[Figures]:
    """Every policy at every load, with a progress bar of the simulated time or of the answers."""
    cells = []
    with ProgressReporter() as report:
        for spec, load in contest.runs(specs, loads):
            stage = f"{spec.text} at {load:g}"

            def progress(now_s: float, served: int, stage: str = stage) -> None:
                if contest.duration_s is not None:
                    report(stage, min(round(now_s), round(contest.duration_s)), round(contest.duration_s))
                else:
                    report(stage, served, contest.limit or 0)

            cells.append(contest.run(spec, load, progress))
    return cells
