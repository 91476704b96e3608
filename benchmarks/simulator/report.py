"""The results of a contest: a table for people, JSON for programs."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.simulator.contest import Cell

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


def rows_of(cells: Sequence[Cell]) -> list[Row]:
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


def markdown(header: Sequence[str], rows: Sequence[Row]) -> str:
    """A table in Markdown, without a line break at its end."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_report(out: Path, cells: Sequence[Cell], about: dict[str, Any], charts: dict[str, str]) -> None:
    """simulate.json, simulate.md and one SVG a chart, into the folder `out`, which is made."""
    out.mkdir(parents=True, exist_ok=True)
    record = {"about": about, "cells": [asdict(cell) for cell in cells]}
    (out / "simulate.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    facts = "\n".join(f"- {key}: {value}" for key, value in about.items())
    pictures = "".join(f"\n![{name}]({name}.svg)\n" for name in charts)
    text = f"# Simulated\n\n{facts}\n\n{markdown(COLUMNS, rows_of(cells))}\n{pictures}"
    (out / "simulate.md").write_text(text, encoding="utf-8")
    for name, svg in charts.items():
        (out / f"{name}.svg").write_text(svg, encoding="utf-8")


def _three(mean: float, p50: float, p99: float, digits: int) -> str:
    return " / ".join(f"{each:.{digits}f}" for each in (mean, p50, p99))
