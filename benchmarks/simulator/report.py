"""Reports of the simulator: tables for people, JSON for programs, charts, and their conditions."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.cells import markdown
from benchmarks.runner import write_json
from benchmarks.simulator.contest import Figures
from benchmarks.simulator.options import PROG
from benchmarks.simulator.trace import Trace
from benchmarks.spec_bench.chart import line_chart
from faser import __version__

Row = tuple[str, ...]
COLUMNS = (
    "load",
    "policy",
    "tokens/s",
    "TTFT ms mean/p50/p99",
    "TPOT ms mean/p50/p99",
    "E2E s mean/p50/p99",
    "γ",
    "tokens/turn",
    "accepted",
    "busy",
    "SLO",
)


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


def rows_of(cells: Sequence[Figures]) -> list[Row]:
    """One row a cell, under COLUMNS."""
    return [
        (
            f"{cell.load:g}",
            cell.policy,
            f"{cell.tokens_per_s:.1f}",
            _three(cell.ttft.mean_ms, cell.ttft.p50_ms, cell.ttft.p99_ms, 0),
            _three(cell.tpot.mean_ms, cell.tpot.p50_ms, cell.tpot.p99_ms, 1),
            _three(cell.e2e.mean_ms / 1000, cell.e2e.p50_ms / 1000, cell.e2e.p99_ms / 1000, 2),
            f"{cell.gamma:.2f}",
            f"{cell.tokens_per_turn:.2f}",
            f"{cell.accepted_share:.0%}" if cell.verified else "–",
            f"{cell.utilisation:.0%}",
            "–" if cell.slo_share is None else f"{cell.slo_share:.0%}",
        )
        for cell in cells
    ]


def write_report(out: Path, cells: Sequence[Figures], about: dict[str, Any], charts: dict[str, str]) -> None:
    """simulate.json, simulate.md and one SVG a chart, into the folder `out`, which is made."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "simulate.json", {"about": about, "cells": [asdict(cell) for cell in cells]})
    facts = "\n".join(f"- {key}: {value}" for key, value in about.items())
    pictures = "".join(f"\n![{name}]({name}.svg)\n" for name in charts)
    text = f"# Simulated\n\n{facts}\n\n{markdown(COLUMNS, rows_of(cells))}\n{pictures}"
    (out / "simulate.md").write_text(text, encoding="utf-8")
    for name, svg in charts.items():
        (out / f"{name}.svg").write_text(svg, encoding="utf-8")


def _three(mean: float, p50: float, p99: float, digits: int) -> str:
    return " / ".join(f"{each:.{digits}f}" for each in (mean, p50, p99))


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
_CHARTS: tuple[tuple[str, str, Callable[[Figures], float]], ...] = (
    ("tpot_mean", "mean time per output token, ms", lambda cell: cell.tpot.mean_ms),
    ("tpot_p99", "p99 time per output token, ms", lambda cell: cell.tpot.p99_ms),
    ("e2e_mean", "mean latency, s", lambda cell: cell.e2e.mean_ms / 1000),
    ("tokens_per_s", "output tokens per second", lambda cell: cell.tokens_per_s),
)


def report_cells(cells: list[Figures], asked: argparse.Namespace, trace: Trace) -> None:
    """Print all policies at all loads; write files if --out names a folder."""
    _show(COLUMNS, rows_of(cells))
    if asked.out is not None:
        write_report(Path(asked.out), cells, _about(asked, trace), _charts(cells))


def report_checks(checks: list[Check], asked: argparse.Namespace, trace: Trace) -> None:
    """Print simulated and real times side by side; write a file if --out names a folder."""
    _show(_CHECK_COLUMNS, [_check_row(each) for each in checks])
    if asked.out is not None:
        content = {"about": _about(asked, trace), "checks": [asdict(each) for each in checks]}
        write_json(Path(asked.out) / "check_live.json", content)


def _about(asked: argparse.Namespace, trace: Trace) -> dict[str, Any]:
    return {
        "command": f"{PROG} {' '.join(sys.argv[1:])}".strip(),
        "faser": __version__,
        "model": trace.model,
        "drafter": trace.drafter,
        "temperature": trace.temperature,
        "longest draft": trace.max_tokens,
        "recorded requests": len(trace.requests),
        "arrivals": asked.arrivals,
        "seed": asked.seed,
    }


def _charts(cells: Sequence[Figures]) -> dict[str, str]:
    """Charts with a line per policy over the load; none for a single load."""
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
    """A table on a terminal, Markdown in a file or a pipe."""
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
