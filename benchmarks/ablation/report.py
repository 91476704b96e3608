"""What the ablation shows: a table a load, the published figures beside it, pictures, and the file of all runs."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.ablation.arms import BASE, KNOWN
from benchmarks.ablation.summary import RATIOS, Row, Run, Spread, rows_of, sorted_runs
from benchmarks.simulator.contest import Times
from benchmarks.simulator.report import markdown
from benchmarks.spec_bench.chart import line_chart

_COLUMNS = (
    "arm",
    "tokens/s (slowest … fastest)",
    "throughput over {base}",
    "latency, times shorter than {base}",
    "latency s mean / p99",
    "TTFT s mean / p99",
    "TPOT ms mean / p99",
    "SLO met",
    "mean γ",
    "accepted",
    "rows pruned",
    "steps overlapped",
)
_PUBLISHED_COLUMNS = ("part", "FASER as published", "here, throughput", "here, latency")
_PUBLISHED = (
    ("+lengths", "lengths by request: throughput up to 1.35x"),
    ("+pruning", "early pruning: throughput up to 1.22x; 9 to 16 % of the drafted tokens pruned"),
    ("+overlap", "all together: 1.60x; up to 1.53x throughput and 1.92x latency over the best fixed length"),
)
_SETTING = (
    "Published: FASER, arXiv 2604.20503, against speculation of fixed length in vLLM 0.15.1 on H100 GPUs, "
    "Qwen3-0.6B for 32B and Llama-3.2-1B for 3.3-70B. On another machine with other models they are no bar."
)


def write(out: Path, about: dict[str, Any], runs: Sequence[Run], *, base: str = BASE) -> list[Row]:
    """ablation.json, ablation.md and the pictures, of the runs so far; a reader never sees half a result.

    base: the arm that others are compared with.
    """
    runs = sorted_runs(runs, [arm.name for arm in KNOWN])
    rows = rows_of(runs, base=base)
    drawn = pictures(runs)
    content = {
        "about": about,
        "rows": [asdict(row) for row in rows],
        "runs": [asdict(run) for run in runs],
    }
    beside = out / "ablation.tmp"
    beside.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")
    beside.replace(out / "ablation.json")
    for name, picture in drawn.items():
        (out / name).write_text(picture, encoding="utf-8")
    (out / "ablation.md").write_text(page(about, rows, list(drawn), base=base), encoding="utf-8")
    return rows


def page(about: dict[str, Any], rows: Sequence[Row], plots: Sequence[str], *, base: str = BASE) -> str:
    """The report to read. plots: file names of the pictures. base: as for write."""
    columns = [column.format(base=base) for column in _COLUMNS]
    lines = ["# What each part of speculation brings", "", f"`{about['command']}`", ""]
    lines += [f"- {name}: {value}" for name, value in about["conditions"].items()]
    lines += ["", _exactness(rows), ""]
    for load in dict.fromkeys(row.load for row in rows):
        of_load = [row for row in rows if row.load == load]
        lines += [f"## Load {load:g} of capacity", "", markdown(columns, [_cells(row) for row in of_load]), ""]
        lines += _ratios(of_load, base)
        if published := _beside_published(of_load):
            lines += [markdown(_PUBLISHED_COLUMNS, published), ""]
    if _beside_published(rows):
        lines += [_SETTING, ""]
    lines += [f"![{name}]({name})" for name in plots]
    return "\n".join(lines) + "\n"


def pictures(runs: Sequence[Run]) -> dict[str, str]:
    """Which share of the requests was done within a time, by load: whole latency, and time per output token."""
    made: dict[str, str | None] = {}
    for load in dict.fromkeys(run.load for run in runs):
        of_load = [run for run in runs if run.load == load]
        latencies = {arm: _shares([s for run in each for s in run.latencies_s]) for arm, each in _by_arm(of_load)}
        tpots = {arm: _shares([1000 * s for run in each for s in run.tpots_s]) for arm, each in _by_arm(of_load)}
        title = f"load {load:g}, all repeats"
        made[f"latency_{load:g}.svg"] = line_chart(
            f"Requests answered within a time: {title}", "seconds", "share", latencies, marks=False
        )
        made[f"tpot_{load:g}.svg"] = line_chart(
            f"Requests by their time per output token: {title}", "milliseconds", "share", tpots, marks=False
        )
    return {name: picture for name, picture in made.items() if picture is not None}


def _by_arm(runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    return [(arm, [run for run in runs if run.arm == arm]) for arm in dict.fromkeys(run.arm for run in runs)]


def _shares(values: Sequence[float]) -> list[tuple[float, float]]:
    """(value, share of the values up to it), ascending; from nothing at 0 to where the first value lies."""
    ordered = sorted(values)
    nothing = [(0.0, 0.0), (ordered[0], 0.0)] if ordered else []
    return [*nothing, *((value, (place + 1) / len(ordered)) for place, value in enumerate(ordered))]


def _exactness(rows: Sequence[Row]) -> str:
    different = sum(row.different for row in rows)
    total = sum(row.num_requests for row in rows)
    if different:
        return f"**{different} OF {total} ANSWERS DIFFER FROM THOSE OF THE FIRST ARM ON THE SAME REQUESTS.**"
    return f"All {total} answers are, token for token, those of the other arms to the same requests."


def _cells(row: Row) -> tuple[str, ...]:
    rate = row.tokens_per_s
    return (
        row.arm,
        f"{rate.median:.1f} ({rate.low:.1f} … {rate.high:.1f})",
        _times_as_good(row.throughput),
        _times_as_good(row.latency),
        _pair(row.e2e, 1000, 2),
        _pair(row.ttft, 1000, 2),
        _pair(row.tpot, 1, 0),
        "–" if row.slo_share is None else f"{row.slo_share:.0%}",
        f"{row.gamma:.2f}",
        f"{row.accepted_share:.0%}" if row.gamma else "–",
        f"{row.pruned_share:.1%}",
        f"{row.ahead_share:.0%}",
    )


def _ratios(rows: Sequence[Row], base: str) -> list[str]:
    """How many times as good as the base arm, over repeats on the same arrivals. Nothing without other arms."""
    compared = [row for row in rows if row.against_base]
    if not compared:
        return []
    cells = [
        (
            row.arm,
            *(row.against_base[name].text() if name in row.against_base else "–" for name in RATIOS),
            "–" if row.slo_gain is None else row.slo_gain.text(),
        )
        for row in compared
    ]
    columns = ("arm", *(f"{name}, times as good" for name in RATIOS), "SLO met, share more")
    return [
        f"Against {base}: geometric means over repeats, with 95 % intervals.",
        "",
        markdown(columns, cells),
        "",
    ]


def _beside_published(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    found = {row.arm: row for row in rows}
    return [
        (arm, said, _times_as_good(found[arm].throughput), _times_as_good(found[arm].latency))
        for arm, said in _PUBLISHED
        if arm in found
    ]


def _pair(times: Times, unit_ms: float, digits: int) -> str:
    return f"{times.mean_ms / unit_ms:.{digits}f} / {times.p99_ms / unit_ms:.{digits}f}"


def _times_as_good(ratio: Spread | None) -> str:
    return "–" if ratio is None else f"{ratio.median:.2f}x ({ratio.low:.2f} … {ratio.high:.2f})"
