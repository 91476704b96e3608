"""Phase `overlap`: drafting during verification against drafting before it, by acceptance, requests and drafter.

Pairs of models walk (see models.py), so acceptance is as given and tokens are the target's own. One engine for
each drafter and partition, which measures what steps, passes and lanes cost; within it these take turns in every
round, on the same prompts:

off      nobody drafts
serial   policy faser, drafts before the step
ahead    policy faser, drafts during the step on this partition, wherever anybody drafts
auto     policy faser, ahead where its own cost model says that it pays
ahead:2  drafts of two tokens during the step, and so on: chunks of a fixed length

Where the first round of the most requests shows that drafting ahead loses, an engine's further cells would show no
more: a trace of some steps is written instead. `lanes` says which partition was made for each that was asked for,
and why; one that was made for another is left out where it is asked for itself. `gaps` has the medians of the
host's part in every pair of lanes. `promises` compares the gain that the cost model expects of each cell with the
measured one.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.decoding.partitions import Divide, Divided, TimedPartition, divide
from benchmarks.gpu.decoding.policies import Arm, Turns, contest
from benchmarks.gpu.engines import Opened, Wanted, lane_costs, target_of, with_engine
from benchmarks.gpu.models import Config, Walk, Walking, own_head, write_shape
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.record import Desk, Json
from benchmarks.gpu.steps import ClosedLoop, clock_of, greedy
from benchmarks.spec_bench.chart import Chart, line_chart
from faser.engine.contract.step_times import FACTORS, InterferenceTable
from faser.engine.control.speculation.draft_lengths import Objective, best_lengths
from faser.engine.control.speculation.overlap import best_overlap
from faser.engine.control.speculation.policy import Candidates
from faser.engine.control.step_cost import CostModel
from faser.engine.execution.models.weights import WeightSource
from faser.engine.execution.overlap.partition import Partition
from faser.engine.execution.startup.models import Sources
from faser.errors import ConfigError

OFF, SERIAL, AHEAD, AUTO = "off", "serial", "ahead", "auto"
ARMS = (
    Arm(policy="off", overlap="off", label=OFF),
    Arm(policy="faser", overlap="off", label=SERIAL),
    Arm(policy="faser", overlap="on", label=AHEAD),
    Arm(policy="faser", overlap="auto", label=AUTO),
)
LEAST_AHEAD = 0.95  # of drafting before the step in the first round; below that a trace says more than cells
PROMISED = 1.08  # a gain over the best other way that is worth lanes; whether it came is counted
_CELL = ("drafter", "partition", "acceptance", "sequences")
_TRACED_STEPS = 4
GAPS = ("draft_gap_ms", "verify_gap_ms", "given_ms", "join_ms", "between_ms")


def run(plan: Plan, desk: Desk, divide: Divide = divide) -> None:
    """divide: may raise ConfigError."""
    sizes = plan.sizes
    walk = Walk.drawn(int(sizes.target["vocab_size"]), sizes.overlap_acceptances)
    pairs = [(name, config, part) for name, config in sizes.overlap_drafts for part in sizes.partitions]
    for place, (name, config, partition) in enumerate(pairs):
        about = {"drafter": name, "partition": partition}
        if not desk.may_begin(f"drafter {name}, lanes by {partition}: loading"):
            continue
        ends_s = desk.left_s / (len(pairs) - place)
        try:
            divided = divide(plan, partition)
        except ConfigError as error:
            desk.append("refused", {**about, "says": str(error)})
            continue
        if divided.is_measured_as_itself(sizes.partitions):
            says = f"{divided.partition.name} instead, which has rows of its own: {divided.refusal}"
            desk.append("refused", {**about, "says": says})
        else:
            _measure(plan, desk, walk, config, divided, about, ends_s)
        divided.partition.close()
    desk.keep("rows", rows_of(desk.result.get("turns", []), desk.result.get("expected", [])))
    desk.keep("gaps", gaps_of(desk.result.get("turns", [])))
    desk.keep("promises", promises(desk.result["rows"]))
    for name, picture in pictures(desk.result["rows"]).items():
        (desk.folder.path / name).write_text(picture, "utf-8")


def _measure(
    plan: Plan, desk: Desk, walk: Walk, config: Config, divided: Divided, about: Json, ends_s: float
) -> None:
    """One engine, from its loading to its end."""
    timed = TimedPartition(divided.partition)
    wanted = _wanted(plan, walk, f"walking-{about['drafter']}", config, timed)

    def work(opened: Opened) -> None:
        desk.append("lanes", {**about, **divided.about, **_measured(opened.interference)})
        _compare(plan, desk, opened, walk, about, timed, ends_s)

    try:
        with_engine(plan, wanted, work)
    except ConfigError as error:
        desk.append("refused", {**about, "says": str(error)})


def _compare(
    plan: Plan, desk: Desk, opened: Opened, walk: Walk, about: Json, timed: TimedPartition, ends_s: float
) -> None:
    sizes, costs = plan.sizes, opened.costs
    assert costs is not None, "an engine that drafts knows what that costs"
    stop_at_s = desk.left_s - ends_s
    losses: list[float] = []

    def goes_on(taken: Sequence[Json]) -> bool:
        rates = {turn["policy"]: turn["tokens_per_s"] for turn in taken}
        ratio = rates[AHEAD] / rates[SERIAL]
        if taken[0]["round"] or taken[0]["sequences"] != max(sizes.overlap_batches) or ratio >= LEAST_AHEAD:
            return True
        losses.append(ratio)
        return False

    for place, acceptance in enumerate(sizes.overlap_acceptances):
        turns = turns_of(plan, walk, place, about, timed, goes_on)
        left_s = max(desk.left_s - stop_at_s, 0.0)
        contest(plan, desk, opened.engine, turns, ends_s=left_s / (len(sizes.overlap_acceptances) - place))
        for sequences in sizes.overlap_batches:
            cell = {**about, "acceptance": acceptance, "sequences": sequences}
            kv_tokens = sequences * sizes.context
            found = expected(costs, opened.interference, acceptance, sequences, kv_tokens, sizes.cap)
            desk.append("expected", {**cell, **found})
        if losses:
            name = f"overlap-{about['drafter']}-{about['partition']}.trace.gz"
            desk.append(
                "stopped", {**about, "acceptance": acceptance, "ahead": round(losses[0], 4), "trace": name}
            )
            trace_ahead(plan, opened, turns, desk.folder.path / name)
            return


def trace_ahead(plan: Plan, opened: Opened, turns: Turns, file: Path) -> None:
    """Of some steps of the most requests that draft ahead: which kernels ran at the same time."""
    loop = ClosedLoop(opened.engine, clock_of(plan.device))
    opened.engine.use_policy("faser", forget=False, overlap="on")
    loop.start(turns.prompts, turns.sampling)
    loop.warm()
    with torch.profiler.profile() as seen:
        loop.look(seconds=plan.sizes.cell_s, steps=_TRACED_STEPS)
    loop.stop()
    seen.export_chrome_trace(str(file))


def arms_of(chunks: Sequence[int]) -> tuple[Arm, ...]:
    fixed = (Arm(policy="fixed", gamma=each, overlap="on", label=f"{AHEAD}:{each}") for each in chunks)
    return (*ARMS, *fixed)


def turns_of(
    plan: Plan,
    walk: Walk,
    place: int,
    about: Json,
    timed: TimedPartition,
    goes_on: Callable[[Sequence[Json]], bool] = lambda _: True,
) -> Turns:
    """At the acceptance of this place among the walk's."""
    sizes = plan.sizes
    return Turns(
        arms=arms_of(sizes.chunks),
        batches=sizes.overlap_batches,
        prompts=walk.prompts(place, max(sizes.overlap_batches), sizes.context),
        sampling=greedy,
        about={**about, "acceptance": walk.acceptances[place]},
        seen=timed.taken,
        goes_on=goes_on,
    )


def _wanted(plan: Plan, walk: Walk, name: str, config: Config, partition: Partition) -> Wanted:
    target, sizes = target_of(plan), plan.sizes
    draft = write_shape(plan.models / name, own_head(config))
    return Wanted(
        target=target,
        draft=draft,
        sequences=max(sizes.overlap_batches),
        context=sizes.context,
        rows=sizes.rows,
        sources=sources_of(plan, walk, target),
        speculative={"method": "draft_model", "model": str(draft), "num_speculative_tokens": sizes.cap},
        costs=lane_costs() if plan.dry_run else None,
        overlap="on",
        partition=partition,
    )


def sources_of(plan: Plan, walk: Walk, target: Path) -> Sources:
    """The target goes to successors, the drafter to what it takes for them."""

    def source(directory: Path) -> WeightSource:
        return Walking.of(directory, walk.successor if directory == target else walk.guess, plan.device)

    return source


def expected(
    costs: CostModel,
    lanes: tuple[InterferenceTable, ...],
    acceptance: float,
    sequences: int,
    kv_tokens: int,
    cap: int,
) -> dict[str, float]:
    """Tokens a second of each way at its best, as the policy computes them; gain: of ahead over the best other."""
    survival = np.tile(acceptance ** np.arange(cap + 1.0), (sequences, 1))
    candidates = Candidates.alike(np.arange(sequences), np.full(sequences, cap), survival, kv_tokens=kv_tokens)
    objective = Objective(costs, candidates)
    before = best_lengths(candidates, objective, costs).rate
    overlapped = best_overlap(candidates, objective, costs, lanes)
    assert overlapped is not None, "all of these sequences may draft"
    ahead = overlapped.rate
    return {
        "off": round(objective.rate_without_drafts, 1),
        "before": round(before, 1),
        "ahead": round(ahead, 1),
        "gain": round(ahead / max(before, objective.rate_without_drafts), 4),
    }


def rows_of(turns: Sequence[Json], expectations: Sequence[Json]) -> list[Json]:
    """One a cell: medians over rounds. Ratios are to serial in the same round; gain: ahead over the best other."""
    promised = {tuple(each[name] for name in _CELL): each for each in expectations}
    rounds: dict[tuple[Any, ...], dict[int, dict[str, Json]]] = {}
    for turn in turns:
        of_cell = rounds.setdefault(tuple(turn[name] for name in _CELL), {})
        of_cell.setdefault(turn["round"], {})[turn["policy"]] = turn
    rows = []
    for cell, found in rounds.items():
        whole = [each for each in found.values() if all(arm.name in each for arm in ARMS)]
        if not whole:
            continue
        rates = [{name: turn["tokens_per_s"] for name, turn in each.items()} for each in whole]
        chunks = dict.fromkeys(name for each in rates for name in each if name.startswith(f"{AHEAD}:"))
        expected_of = promised.get(cell)
        rows.append(
            {
                **dict(zip(_CELL, cell, strict=True)),
                "rounds": len(whole),
                "serial_tokens_per_s": statistics.median(each[SERIAL] for each in rates),
                **{
                    name: _median(each[name] / each[SERIAL] for each in rates if name in each)
                    for name in (OFF, AHEAD, AUTO, *chunks)
                },
                "gain": _median(each[AHEAD] / max(each[SERIAL], each[OFF]) for each in rates),
                "auto_of_best": _median(each[AUTO] / max(each[OFF], each[SERIAL], each[AHEAD]) for each in rates),
                "auto_ahead": _median(each[AUTO]["ahead"] for each in whole),
                "accepted": _median(each[SERIAL]["accepted"] for each in whole),
                "expected_gain": None if expected_of is None else expected_of["gain"],
            }
        )
    return rows


def gaps_of(turns: Sequence[Json]) -> list[Json]:
    """Of turns that always draft ahead, one a cell: medians over rounds of what the host takes around lanes."""
    cells: dict[tuple[Any, ...], list[Json]] = {}
    for turn in turns:
        if turn["policy"] == AHEAD and turn["pairs"]:
            cells.setdefault(tuple(turn[name] for name in _CELL), []).append(turn)
    return [
        {
            **dict(zip(_CELL, cell, strict=True)),
            "pairs": sum(turn["pairs"] for turn in found),
            **{name: _median_if([turn[name] for turn in found]) for name in GAPS},
        }
        for cell, found in cells.items()
    ]


def promises(rows: Sequence[Json]) -> Json:
    """Cells by what was expected of drafting ahead and what was measured. bar: PROMISED."""
    expected_of = [row for row in rows if row["expected_gain"] is not None]
    high = [row for row in expected_of if row["expected_gain"] >= PROMISED]
    return {
        "bar": PROMISED,
        "cells": len(expected_of),
        "promised": len(high),
        "of these above 1": sum(row["gain"] > 1 for row in high),
        "of these above the bar": sum(row["gain"] >= PROMISED for row in high),
        "above the bar without a promise": sum(row["gain"] >= PROMISED for row in expected_of)
        - sum(row["gain"] >= PROMISED for row in high),
        "auto below 0.98 of the best way": sum(row["auto_of_best"] < 0.98 for row in expected_of),
    }


def pictures(rows: Sequence[Json]) -> dict[str, str]:
    """Times serial by requests, one a drafter and partition; and what was measured over what was expected."""
    made: dict[str, str | None] = {"overlap-expected.svg": _expected_chart(rows)}
    for drafter, partition in dict.fromkeys((row["drafter"], row["partition"]) for row in rows):
        of_engine = [row for row in rows if (row["drafter"], row["partition"]) == (drafter, partition)]
        lines = {
            f"{mode}, {acceptance:g}": sorted(
                (row["sequences"], row[mode]) for row in of_engine if row["acceptance"] == acceptance
            )
            for mode in (AHEAD, AUTO)
            for acceptance in dict.fromkeys(row["acceptance"] for row in of_engine)
        }
        made[f"overlap-{drafter}-{partition}.svg"] = line_chart(
            f"Drafter {drafter}, lanes by {partition}", "requests", "times serial", lines, doubling=True
        )
    return {name: picture for name, picture in made.items() if picture is not None}


def _expected_chart(rows: Sequence[Json]) -> str | None:
    points = [(row["expected_gain"], row["gain"]) for row in rows if row["expected_gain"] is not None]
    if not points:
        return None
    low, high = min(0.9, *(x for x, _ in points)), max(1.1, *(x for x, _ in points))
    chart = Chart(
        title="Drafting ahead over the best other way",
        x_label="as the cost model expects",
        y_label="as measured",
        low=low,
        high=high,
        top=max(high, *(y for _, y in points)),
    )
    chart.rule((low, low), (high, high))
    chart.dots(points)
    return chart.svg()


def _measured(lanes: tuple[InterferenceTable, ...]) -> Json:
    """What lanes cost each other as the engine measured it, by share, rows of a step and tokens of context."""
    return {
        "co_run": [
            {
                "share": round(each.share, 4),
                "context": context,
                "rows": rows,
                **{name: round(getattr(each, name)[i][j], 4) for name in FACTORS},
            }
            for each in lanes
            for i, context in enumerate(each.contexts)
            for j, rows in enumerate(each.rows)
        ]
    }


def _median_if(values: Sequence[float | None]) -> float | None:
    """Of those that there are."""
    there = [value for value in values if value is not None]
    return _median(there) if there else None


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 4)
