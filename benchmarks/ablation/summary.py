"""From runs to rows: medians over repeats, and what one arm is worth beside another in the same repeat.

Pure functions of plain values. What one run came to is a Cell, as in the simulator.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.paired import Estimate, difference, ratio
from benchmarks.simulator.contest import Cell, Times


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One arm over one stretch. pruned_rows: drafted rows that left before the last layer, beside cell.verified.

    ahead_steps: of cell.num_steps. different: answers unlike those of the first arm in this repeat and load.
    latencies_s, tpots_s: by request, in the order of arrival; no tpot where there is one token only.
    """

    arm: str
    repeat: int
    load: float
    cell: Cell
    pruned_rows: int
    ahead_steps: int
    different: int
    pace: float
    latencies_s: tuple[float, ...]
    tpots_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Over the repeats."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One arm at one load, medians over repeats. Times in milliseconds; shares of 1.

    throughput, latency: how many times as good as the base arm's in the same repeat: more tokens a second, a
    shorter mean latency. None without a base. gamma: verified through all layers, a sequence and step.
    pruned_share: of the drafted tokens that the target was given. against_base: by name of RATIOS, how many times
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
    pruned_share: float
    ahead_share: float
    different: int


# Each with 1 if more of it is better, -1 if less.
RATIOS: dict[str, tuple[Callable[[Cell], float], int]] = {
    "tokens/s": (lambda cell: cell.tokens_per_s, 1),
    "mean latency": (lambda cell: cell.e2e.mean_ms, -1),
    "p99 latency": (lambda cell: cell.e2e.p99_ms, -1),
    "mean TTFT": (lambda cell: cell.ttft.mean_ms, -1),
    "p99 TTFT": (lambda cell: cell.ttft.p99_ms, -1),
    "mean TPOT": (lambda cell: cell.tpot.mean_ms, -1),
    "p99 TPOT": (lambda cell: cell.tpot.p99_ms, -1),
}


def sorted_runs(runs: Sequence[Run], arms: Sequence[str]) -> list[Run]:
    """By load, then by arm in this order, then by repeat."""
    return sorted(runs, key=lambda run: (run.load, arms.index(run.arm), run.repeat))


def rows_of(runs: Sequence[Run], *, base: str) -> list[Row]:
    """One a load and arm, in the order of the runs. base: the arm that others are compared with."""
    groups: dict[tuple[float, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.load, run.arm), []).append(run)
    bases = {(run.load, run.repeat): run for run in runs if run.arm == base}
    return [_row(group, bases) for group in groups.values()]


def spread(values: Sequence[float]) -> Spread:
    return Spread(median=median(values), low=min(values), high=max(values))


def _row(group: list[Run], bases: dict[tuple[float, int], Run]) -> Row:
    cells = [run.cell for run in group]
    pairs = [(run.cell, bases[run.load, run.repeat].cell) for run in group if (run.load, run.repeat) in bases]
    num_pruned = sum(run.pruned_rows for run in group)
    shares = [cell.slo_share for cell in cells if cell.slo_share is not None]
    return Row(
        arm=group[0].arm,
        load=group[0].load,
        repeats=len(group),
        num_requests=sum(cell.num_requests for cell in cells),
        tokens_per_s=spread([cell.tokens_per_s for cell in cells]),
        throughput=_ratios([(mine.tokens_per_s, theirs.tokens_per_s) for mine, theirs in pairs]),
        latency=_ratios([(theirs.e2e.mean_ms, mine.e2e.mean_ms) for mine, theirs in pairs]),
        e2e=_times(cells, lambda cell: cell.e2e),
        ttft=_times(cells, lambda cell: cell.ttft),
        tpot=_times(cells, lambda cell: cell.tpot),
        slo_share=median(shares) if shares else None,
        against_base=_against([pair for pair in pairs if pair[0] is not pair[1]]),
        slo_gain=_slo_gain([pair for pair in pairs if pair[0] is not pair[1]]),
        gamma=median(cell.gamma for cell in cells),
        accepted_share=_share(sum(cell.accepted for cell in cells), sum(cell.verified for cell in cells)),
        pruned_share=_share(num_pruned, num_pruned + sum(cell.verified for cell in cells)),
        ahead_share=_share(sum(run.ahead_steps for run in group), sum(cell.num_steps for cell in cells)),
        different=sum(run.different for run in group),
    )


def _against(pairs: Sequence[tuple[Cell, Cell]]) -> dict[str, Estimate]:
    """How many times as good the first of each pair is. Pairs in which one took no time at all are left out."""
    found = {}
    for name, (of, better) in RATIOS.items():
        values = [(of(mine), of(theirs)) for mine, theirs in pairs]
        whole = [pair for pair in values if min(pair) > 0]
        if whole:
            above, below = zip(*whole, strict=True) if better > 0 else reversed([*zip(*whole, strict=True)])
            found[name] = ratio(above, below)
    return found


def _slo_gain(pairs: Sequence[tuple[Cell, Cell]]) -> Estimate | None:
    shares = [
        (mine.slo_share, theirs.slo_share)
        for mine, theirs in pairs
        if mine.slo_share is not None and theirs.slo_share is not None
    ]
    return difference([mine for mine, _ in shares], [theirs for _, theirs in shares]) if shares else None


def _times(cells: Sequence[Cell], of: Callable[[Cell], Times]) -> Times:
    found = [of(cell) for cell in cells]
    return Times(
        mean_ms=median(each.mean_ms for each in found),
        p50_ms=median(each.p50_ms for each in found),
        p99_ms=median(each.p99_ms for each in found),
    )


def _ratios(pairs: Sequence[tuple[float, float]]) -> Spread | None:
    """Of the first over the second of each pair; those over nothing are left out."""
    ratios = [above / below for above, below in pairs if below > 0]
    return spread(ratios) if ratios else None


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
