"""From runs to rows: medians over repeats, and what one arm is worth over another in the same repeat.

Pure functions of plain values. What one run came to is a Figures, as in the simulator.

What the ablation shows: a table a load, the published figures next to it, pictures, and the file of all runs.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.ablation.drive import BASE, KNOWN
from benchmarks.cells import Spread, Times, markdown, share
from benchmarks.simulator.contest import Figures
from benchmarks.spec_bench.chart import line_chart
from faser.cli.estimates import Estimate, difference, ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One arm over one stretch.

    ahead_steps: of cell.num_steps. different: answers unlike those of the first arm in this repeat and load.
    latencies_s, tpots_s: by request, in the order of arrival; no tpot where there is one token only.
    """

    arm: str
    repeat: int
    load: float
    cell: Figures
    ahead_steps: int
    different: int
    pace: float
    latencies_s: tuple[float, ...]
    tpots_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One arm at one load, medians over repeats. Times in milliseconds; shares of 1.

    throughput, latency: how many times as good as the base arm's in the same repeat: more tokens a second, a
    shorter mean latency. None without a base. gamma: verified through all layers, a sequence and step.
    against_base: by name of RATIOS, how many times
    as good as the base arm; empty for that arm itself and without one. slo_gain: share of requests that met their
    target, minus the base arm's; None likewise.
    """

    arm: str
    load: float
    repeats: int
    num_requests: int
    tokens_per_s: Spread
    throughput: Spread | None
    latency: Spread | None
    e2e: Times
    ttft: Times
    tpot: Times
    slo_share: float | None
    against_base: Mapping[str, Estimate]
    slo_gain: Estimate | None
    gamma: float
    accepted_share: float
    ahead_share: float
    different: int


# Each with 1 if more of it is better, -1 if less.
RATIOS: dict[str, tuple[Callable[[Figures], float], int]] = {
    "tokens/s": (lambda cell: cell.tokens_per_s, 1),
    "mean latency": (lambda cell: cell.e2e.mean_ms, -1),
    "p99 latency": (lambda cell: cell.e2e.p99_ms, -1),
    "mean TTFT": (lambda cell: cell.ttft.mean_ms, -1),
    "p99 TTFT": (lambda cell: cell.ttft.p99_ms, -1),
    "mean TPOT": (lambda cell: cell.tpot.mean_ms, -1),
    "p99 TPOT": (lambda cell: cell.tpot.p99_ms, -1),
}


def sorted_runs(runs: Sequence[Run], arms: Sequence[str]) -> list[Run]:
    """Sort by load, then by arm in this order, then by repeat."""
    return sorted(runs, key=lambda run: (run.load, arms.index(run.arm), run.repeat))


def rows_of(runs: Sequence[Run], *, base: str) -> list[Row]:
    """One a load and arm, in the order of the runs. base: the arm that others are compared with."""
    groups: dict[tuple[float, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.load, run.arm), []).append(run)
    bases = {(run.load, run.repeat): run for run in runs if run.arm == base}
    return [_row(group, bases) for group in groups.values()]


def _row(group: list[Run], bases: dict[tuple[float, int], Run]) -> Row:
    cells = [run.cell for run in group]
    pairs = [(run.cell, bases[run.load, run.repeat].cell) for run in group if (run.load, run.repeat) in bases]
    shares = [cell.slo_share for cell in cells if cell.slo_share is not None]
    return Row(
        arm=group[0].arm,
        load=group[0].load,
        repeats=len(group),
        num_requests=sum(cell.num_requests for cell in cells),
        tokens_per_s=Spread.of([cell.tokens_per_s for cell in cells]),
        throughput=_ratios([(mine.tokens_per_s, theirs.tokens_per_s) for mine, theirs in pairs]),
        latency=_ratios([(theirs.e2e.mean_ms, mine.e2e.mean_ms) for mine, theirs in pairs]),
        e2e=_times(cells, lambda cell: cell.e2e),
        ttft=_times(cells, lambda cell: cell.ttft),
        tpot=_times(cells, lambda cell: cell.tpot),
        slo_share=median(shares) if shares else None,
        against_base=_against([pair for pair in pairs if pair[0] is not pair[1]]),
        slo_gain=_slo_gain([pair for pair in pairs if pair[0] is not pair[1]]),
        gamma=median(cell.gamma for cell in cells),
        accepted_share=share(sum(cell.accepted for cell in cells), sum(cell.verified for cell in cells)),
        ahead_share=share(sum(run.ahead_steps for run in group), sum(cell.num_steps for cell in cells)),
        different=sum(run.different for run in group),
    )


def _against(pairs: Sequence[tuple[Figures, Figures]]) -> dict[str, Estimate]:
    """Return how many times as good the first of each pair is, but for pairs in which one took no time at all."""
    found = {}
    for name, (of, better) in RATIOS.items():
        values = [(of(mine), of(theirs)) for mine, theirs in pairs]
        whole = [pair for pair in values if min(pair) > 0]
        if whole:
            above, below = zip(*whole, strict=True) if better > 0 else reversed([*zip(*whole, strict=True)])
            found[name] = ratio(above, below)
    return found


def _slo_gain(pairs: Sequence[tuple[Figures, Figures]]) -> Estimate | None:
    shares = [
        (mine.slo_share, theirs.slo_share)
        for mine, theirs in pairs
        if mine.slo_share is not None and theirs.slo_share is not None
    ]
    return difference([mine for mine, _ in shares], [theirs for _, theirs in shares]) if shares else None


def _times(cells: Sequence[Figures], of: Callable[[Figures], Times]) -> Times:
    found = [of(cell) for cell in cells]
    return Times(
        mean_ms=median(each.mean_ms for each in found),
        p50_ms=median(each.p50_ms for each in found),
        p99_ms=median(each.p99_ms for each in found),
    )


def _ratios(pairs: Sequence[tuple[float, float]]) -> Spread | None:
    """Return the ratios of the first over the second of each pair; those over nothing are left out."""
    ratios = [above / below for above, below in pairs if below > 0]
    return Spread.of(ratios) if ratios else None


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
    "steps overlapped",
)
_PUBLISHED_COLUMNS = ("part", "FASER as published", "here, throughput", "here, latency")
_PUBLISHED = (
    ("+lengths", "lengths by request: throughput up to 1.35x"),
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
    unfinished = out / "ablation.tmp"
    unfinished.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")
    unfinished.replace(out / "ablation.json")
    for name, picture in drawn.items():
        (out / name).write_text(picture, encoding="utf-8")
    (out / "ablation.md").write_text(page(about, rows, list(drawn), base=base), encoding="utf-8")
    return rows


def page(about: dict[str, Any], rows: Sequence[Row], plots: Sequence[str], *, base: str = BASE) -> str:
    """The report to read. plots: file names of the pictures. base: as for write."""
    columns = [column.format(base=base) for column in _COLUMNS]
    lines = ["# What each part of speculation gains", "", f"`{about['command']}`", ""]
    lines += [f"- {name}: {value}" for name, value in about["conditions"].items()]
    lines += ["", _exactness(rows), ""]
    for load in dict.fromkeys(row.load for row in rows):
        of_load = [row for row in rows if row.load == load]
        lines += [f"## Load {load:g} of capacity", "", markdown(columns, [_cells(row) for row in of_load]), ""]
        lines += _report_ratios(of_load, base)
        if published := _beside_published(of_load):
            lines += [markdown(_PUBLISHED_COLUMNS, published), ""]
    if _beside_published(rows):
        lines += [_SETTING, ""]
    lines += [f"![{name}]({name})" for name in plots]
    return "\n".join(lines) + "\n"


def pictures(runs: Sequence[Run]) -> dict[str, str]:
    """Draw which share of the requests was done within a time, by load: latency, and time per output token."""
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
        f"{row.ahead_share:.0%}",
    )


def _report_ratios(rows: Sequence[Row], base: str) -> list[str]:
    """Report how many times as good as the base arm, on the same arrivals. Nothing without other arms."""
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
