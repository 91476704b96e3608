"""`faser bench simulate`: policies against each other on recorded acceptance and measured step times.

Three verbs: simulate a workload (needs --cost and --trace), --record a trace with a real engine, --check-live that
simulated and real times agree. Owns the command line and what is shown; the work is in faser.sim.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from faser import __version__
from faser.bench.chart import line_chart
from faser.cli.flags import CommandParser
from faser.cli.progress import ProgressReporter
from faser.cli.sources import UsageError
from faser.engine.cost_model import CostModel
from faser.errors import ConfigError
from faser.sim.contest import Cell, Contest
from faser.sim.live import Check, check_live
from faser.sim.policy_spec import PolicySpec, parse_policy
from faser.sim.report import COLUMNS, Row, markdown, rows_of, write_report
from faser.sim.simulation import Machine
from faser.sim.synthetic import iid_trace
from faser.sim.trace import Trace, mean_run, read_trace, write_trace
from faser.sim.workload import parse_workload
from faser.speculation import Slo

PROG = "faser bench simulate"
_SYNTHETIC = "iid:"
_NO_MEMORY = {"suffix_decoding_max_cached_requests": 0}
_CHECK_COLUMNS = (
    "policy",
    "tokens/s live / simulated",
    "error",
    "step ms live / simulated",
    "error",
    "speed-up live / simulated",
    "steps live / simulated",
    "answers that differ",
)
_CHARTS: tuple[tuple[str, str, Callable[[Cell], float]], ...] = (
    ("tpot_mean", "mean time per output token, ms", lambda cell: cell.tpot.mean_ms),
    ("tpot_p99", "p99 time per output token, ms", lambda cell: cell.tpot.p99_ms),
    ("e2e_mean", "mean latency, s", lambda cell: cell.e2e.mean_ms / 1000),
    ("tokens_per_s", "output tokens per second", lambda cell: cell.tokens_per_s),
)


def simulate(arguments: Sequence[str]) -> int:
    """Run one verb; returns the exit status. Raises ConfigError for what cannot be."""
    parser = _parser()
    asked = parser.parse_args(list(arguments))
    if asked.help:
        print(parser.format_help())
        return 0
    if asked.record is not None:
        return _record(asked)
    return _check_live(asked) if asked.check_live else _simulate(asked)


def _simulate(asked: argparse.Namespace) -> int:
    if asked.trace is None or asked.cost is None:
        raise UsageError(
            ["--trace and --cost are needed (or --record TRACE, which makes a trace, and costs with --save-cost)"]
        )
    trace = _trace(asked.trace)
    specs = [parse_policy(each, cap=trace.max_tokens) for each in asked.policies]
    workload = parse_workload(asked.arrivals, scale=asked.scale_tokens)
    if asked.duration is None and asked.num_requests is None and workload.azure is None:
        raise UsageError([f"--arrivals is {asked.arrivals}; it never ends: give --duration or --num-requests"])
    contest = Contest(
        trace=trace,
        machine=_machine(asked, CostModel.load(Path(asked.cost))),
        workload=workload,
        duration_s=asked.duration,
        limit=asked.num_requests,
        slo=Slo(ttft_ms=asked.slo_ttft_ms, tpot_ms=asked.slo_tpot_ms),
        seed=asked.seed,
    )
    cells = _run_all(contest, specs, asked.speed_up)
    _show(COLUMNS, rows_of(cells))
    if asked.out is not None:
        write_report(Path(asked.out), cells, _about(asked, trace), _charts(cells))
    return 0


def _run_all(contest: Contest, specs: list[PolicySpec], loads: list[float]) -> list[Cell]:
    """Every policy at every load, with a bar of the simulated time or of the answers."""
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


def _record(asked: argparse.Namespace) -> int:
    from faser.sim.real import open_engine, read_prompts
    from faser.sim.record import Session, record

    with ProgressReporter() as report:
        real = open_engine(_engine_options(asked), report, recorded=True)
        config = real.config.speculation
        prompts = read_prompts(asked.prompts, real.tokenizer, limit=asked.num_prompts)
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
            real.costs.save(Path(asked.save_cost))
    positions, run = sum(each.output_len for each in trace.requests), mean_run(trace.requests)
    print(f"{asked.record}: {len(trace.requests)} requests, {positions} positions, mean run {run:.2f}")
    return 0


def _check_live(asked: argparse.Namespace) -> int:
    from faser.sim.real import open_engine

    if asked.trace is None:
        raise UsageError(["--check-live needs the --trace that this model and drafter were recorded to"])
    trace = _trace(asked.trace)
    specs = [parse_policy(each, cap=trace.max_tokens) for each in asked.policies]
    with ProgressReporter() as report:
        real = open_engine(_engine_options(asked), report, recorded=False)
        costs = real.costs if asked.cost is None else CostModel.load(Path(asked.cost))
        checks = check_live(
            real.engine,
            trace,
            _machine(asked, costs),
            specs,
            clients=asked.concurrency,
            rounds=asked.rounds,
            progress=lambda done, of: report("live runs", done, of),
        )
    records = [asdict(each) for each in checks]
    _show(_CHECK_COLUMNS, [_check_row(each) for each in checks])
    if asked.out is not None:
        out = Path(asked.out)
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"about": _about(asked, trace), "checks": records}, indent=1)
        (out / "check_live.json").write_text(text + "\n", encoding="utf-8")
    return 0


def _trace(text: str) -> Trace:
    """A file, or iid:0.8: made up, with tokens that are right with this probability each."""
    if not text.startswith(_SYNTHETIC):
        return read_trace(Path(text))
    value = text.removeprefix(_SYNTHETIC)
    try:
        acceptance = float(value)
    except ValueError as error:
        raise ConfigError(f"--trace is {text}; iid:A needs an acceptance A of 0 … 1") from error
    return iid_trace(acceptance)


def _machine(asked: argparse.Namespace, costs: CostModel) -> Machine:
    return Machine(
        costs=costs,
        max_num_seqs=asked.max_num_seqs,
        max_num_batched_tokens=asked.max_num_batched_tokens,
        max_model_len=asked.max_model_len,
        kv_tokens=asked.kv_tokens,
        step_overhead_s=asked.step_overhead_ms / 1000,
        draft_overhead_s=asked.draft_overhead_ms / 1000,
        noise=asked.noise,
    )


def _engine_options(asked: argparse.Namespace) -> dict[str, Any]:
    """Of EngineConfig. Every run of a prompt must cost the same: no prefix is cached, no answer is remembered.

    Unless the caller says so; but then a trace holds for an engine with that very past.
    """
    try:
        speculative = {} if asked.speculative_config is None else json.loads(asked.speculative_config)
        if not isinstance(speculative, dict):
            raise ValueError("it must be an object")
    except ValueError as error:
        raise UsageError([f"--speculative-config is {asked.speculative_config}; not JSON: {error}"]) from error
    return {
        "model": asked.MODEL,
        "speculative_config": _NO_MEMORY | speculative,
        "max_num_seqs": asked.max_num_seqs,
        "max_num_batched_tokens": asked.max_num_batched_tokens,
        "enable_prefix_caching": False,
    }


def _about(asked: argparse.Namespace, trace: Trace) -> dict[str, Any]:
    return {
        "command": f"{PROG} {' '.join(sys.argv[3:])}".strip(),
        "faser": __version__,
        "model": trace.model,
        "drafter": trace.drafter,
        "temperature": trace.temperature,
        "longest draft": trace.max_tokens,
        "recorded requests": len(trace.requests),
        "arrivals": asked.arrivals,
        "seed": asked.seed,
    }


def _charts(cells: Sequence[Cell]) -> dict[str, str]:
    """One line a policy over load; nothing for a single load."""
    if len({cell.load for cell in cells}) < 2:
        return {}
    policies = list(dict.fromkeys(cell.policy for cell in cells))
    charts = {}
    for name, label, value in _CHARTS:
        lines = {
            policy: sorted((cell.load, value(cell)) for cell in cells if cell.policy == policy)
            for policy in policies
        }
        drawn = line_chart(label, "load (speed-up of the arrivals)", label, lines)
        if drawn is not None:
            charts[name] = drawn
    return charts


def _show(header: Row, rows: Sequence[Row]) -> None:
    """A table for whoever watches, Markdown for a file or a pipe."""
    if not sys.stdout.isatty():
        print(markdown(header, rows))
        return
    table = Table(*header, title=PROG)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _check_row(check: Check) -> Row:
    return (
        check.policy,
        f"{check.live_tokens_per_s:.1f} / {check.simulated_tokens_per_s:.1f}",
        f"{check.tokens_per_s_error:+.1%}",
        f"{check.live_step_ms:.2f} / {check.simulated_step_ms:.2f}",
        f"{check.step_error:+.1%}",
        f"{check.live_speedup:.3f} / {check.simulated_speedup:.3f}",
        f"{check.live_steps} / {check.simulated_steps}",
        str(check.different),
    )


def _list(text: str) -> list[str]:
    return [each for each in text.split(",") if each]


def _above_zero(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"it is {text}; it must be a number above 0")
    return value


def _at_least_zero(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"it is {text}; it must be a number from 0 on")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"it is {text}; it must be at least 1")
    return value


def _loads(text: str) -> list[float]:
    return [_above_zero(each) for each in _list(text)]


def _parser() -> CommandParser:
    parser = CommandParser(PROG, description=__doc__)
    add = parser.add_argument
    add("MODEL", nargs="?", help="of --record and --check-live: a directory, a GGUF file, a hub id; or embedded")
    add("--help", "-h", action="store_true")
    add("--trace", help="acceptance trace, or iid:A")
    add("--cost", help="cost model, JSON")
    add("--arrivals", default="closed:1", help="a CSV of Azure's kind, poisson:RATE or closed:CLIENTS")
    add("--speed-up", type=_loads, default=[1.0], help="arrivals so many times as fast; several: 1,2,4")
    add("--scale-tokens", type=_above_zero, default=1.0, help="multiplies the lengths of the CSV")
    add("--policies", type=_list, default=["off", "fixed:3", "goodput", "survival", "faser"])
    add("--duration", type=_above_zero, help="simulated seconds in which requests arrive")
    add("--num-requests", type=_count, help="most requests")
    add("--slo-ttft-ms", type=_above_zero)
    add("--slo-tpot-ms", type=_above_zero)
    add("--max-num-seqs", type=_count, default=64)
    add("--max-num-batched-tokens", type=_count, default=256)
    add("--max-model-len", type=_count, default=8192)
    add("--kv-tokens", type=_count, help="room of the KV cache; without it, enough")
    add("--step-overhead-ms", type=_at_least_zero, default=0.2)
    add("--draft-overhead-ms", type=_at_least_zero, default=0.2)
    add("--noise", type=_at_least_zero, default=0.0, help="sigma of the logarithm of times")
    add("--seed", type=int, default=0)
    add("--out", help="folder for JSON, Markdown and charts")
    add("--record", metavar="TRACE", help="record a trace with a real engine")
    add("--save-cost", metavar="COST", help="of --record: write the engine's cost model as well")
    add("--prompts", help="of --record: JSON lines with turns, or a text line each; without it, built-in ones")
    add("--num-prompts", type=_count, default=24)
    add("--output-tokens", type=_count, default=64)
    add("--temperature", type=_at_least_zero, default=0.0)
    add("--speculative-config", metavar="JSON", help="of --record and --check-live, as of faser serve")
    add("--check-live", action="store_true", help="compare with a real engine")
    add("--concurrency", type=_count, default=4, help="of --record and --check-live")
    add("--rounds", type=_count, default=3, help="of --check-live: live runs of each policy")
    return parser
