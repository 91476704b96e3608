"""Phase `overlap`: drafting beside verification against drafting before it, by acceptance, requests and drafter.

Pairs of models walk (see walks), so acceptance is as given and tokens are the target's own. One engine for each
drafter and partition; within it these take turns in every round, on the same prompts:

off      nobody drafts
serial   policy faser, drafts before the step
ahead    policy faser, drafts beside the step on this partition, wherever anybody drafts
auto     policy faser, ahead where its own cost model says that it pays

Beside each cell stands what that cost model expects of it at the given acceptance, so that it can be held against
what was measured: of the cells where so much was promised, in how many it came.
"""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.closed_loop import greedy
from benchmarks.gpu.engines import Opened, Wanted, close, lane_costs, lanes_of, open_engine, target_of
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.policies import Arm, Turns, contest
from benchmarks.gpu.record import Desk, Json
from benchmarks.gpu.shapes import Config, write_shape
from benchmarks.gpu.walks import Walk, Walking
from faser.bench.chart import Chart, line_chart
from faser.engine.cost_model import CostModel
from faser.engine.models.weights import WeightSource
from faser.engine.spec.overlap import best_ahead
from faser.engine.spec.policies.draft_lengths import best_lengths
from faser.engine.spec.policies.objective import Objective
from faser.engine.spec.policy import Candidates
from faser.errors import ConfigError

OFF, SERIAL, AHEAD, AUTO = "off", "serial", "ahead", "auto"
ARMS = (
    Arm(policy="off", overlap="off", label=OFF),
    Arm(policy="faser", overlap="off", label=SERIAL),
    Arm(policy="faser", overlap="on", label=AHEAD),
    Arm(policy="faser", overlap="auto", label=AUTO),
)
PROMISED = 1.08  # a gain over the best other way that is worth lanes; whether it came is counted
_CELL = ("drafter", "partition", "acceptance", "sequences")


def run(plan: Plan, desk: Desk) -> None:
    sizes = plan.sizes
    walk = Walk.drawn(int(sizes.target["vocab_size"]), sizes.overlap_acceptances)
    pairs = [(name, config, part) for name, config in sizes.overlap_drafts for part in sizes.partitions]
    for place, (name, config, partition) in enumerate(pairs):
        about = {"drafter": name, "partition": partition}
        if not desk.may_begin(f"drafter {name}, lanes by {partition}: loading"):
            continue
        ends_s = desk.left_s / (len(pairs) - place)
        try:
            opened = _open(plan, walk, name, config, partition)
        except ConfigError as error:
            desk.append("refused", {**about, "says": str(error)})
            continue
        _compare(plan, desk, opened, walk, about, ends_s)
        close(opened)
    desk.keep("rows", rows_of(desk.result.get("turns", []), desk.result.get("expected", [])))
    desk.keep("promises", promises(desk.result["rows"]))
    for name, picture in pictures(desk.result["rows"]).items():
        (desk.folder.path / name).write_text(picture, "utf-8")


def _compare(plan: Plan, desk: Desk, opened: Opened, walk: Walk, about: Json, ends_s: float) -> None:
    sizes, costs = plan.sizes, opened.costs
    assert costs is not None, "an engine that drafts knows what that costs"
    desk.append("lanes", {**about, "taken": lanes_of(opened.engine).partition.name, **_measured(costs)})
    stop_at_s = desk.left_s - ends_s
    for place, acceptance in enumerate(sizes.overlap_acceptances):
        turns = Turns(
            arms=ARMS,
            batches=sizes.overlap_batches,
            prompts=walk.prompts(place, max(sizes.overlap_batches), sizes.context),
            sampling=greedy,
            about={**about, "acceptance": acceptance},
        )
        left_s = max(desk.left_s - stop_at_s, 0.0)
        contest(plan, desk, opened.engine, turns, ends_s=left_s / (len(sizes.overlap_acceptances) - place))
        for sequences in sizes.overlap_batches:
            cell = {**about, "acceptance": acceptance, "sequences": sequences}
            kv_tokens = sequences * sizes.context
            desk.append("expected", {**cell, **expected(costs, acceptance, sequences, kv_tokens, sizes.cap)})


def _open(plan: Plan, walk: Walk, name: str, config: Config, partition: str) -> Opened:
    """Raises ConfigError where this partition cannot be had."""
    target, sizes = target_of(plan), plan.sizes
    draft = write_shape(plan.models / f"walking-{name}", config | {"tie_word_embeddings": False})

    def sources(directory: Path) -> WeightSource:
        return Walking.of(directory, walk.successor if directory == target else walk.guess, plan.device)

    return open_engine(
        plan,
        Wanted(
            target=target,
            draft=draft,
            sequences=max(sizes.overlap_batches),
            context=sizes.context,
            rows=sizes.rows,
            sources=sources,
            speculative={"method": "draft_model", "model": str(draft), "num_speculative_tokens": sizes.cap},
            costs=lane_costs() if plan.dry_run else None,
            overlap="on",
            partition=None if plan.dry_run else partition,  # a CPU has one kind of lanes
        ),
    )


def expected(costs: CostModel, acceptance: float, sequences: int, kv_tokens: int, cap: int) -> dict[str, float]:
    """Tokens a second of each way at its best, as the policy computes them; gain: of ahead over the best other."""
    survival = np.tile(acceptance ** np.arange(cap + 1.0), (sequences, 1))
    candidates = Candidates(
        slots=np.arange(sequences),
        limit=np.full(sequences, cap),
        survival=survival,
        weight=np.ones(sequences),
        lag=np.zeros(sequences, dtype=np.int64),
        other_rows=0,
        kv_tokens=kv_tokens,
    )
    objective = Objective(costs, candidates)
    before = best_lengths(candidates, objective, costs).rate
    ahead = best_ahead(candidates, objective, costs, costs.lanes).rate
    return {
        "off": round(objective.plain_rate, 1),
        "before": round(before, 1),
        "ahead": round(ahead, 1),
        "gain": round(ahead / max(before, objective.plain_rate), 4),
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
        whole = [each for each in found.values() if len(each) == len(ARMS)]
        if not whole:
            continue
        rates = [{name: turn["tokens_per_s"] for name, turn in each.items()} for each in whole]
        told = promised.get(cell)
        rows.append(
            {
                **dict(zip(_CELL, cell, strict=True)),
                "rounds": len(whole),
                "serial_tokens_per_s": statistics.median(each[SERIAL] for each in rates),
                **{name: _median(each[name] / each[SERIAL] for each in rates) for name in (OFF, AHEAD, AUTO)},
                "gain": _median(each[AHEAD] / max(each[SERIAL], each[OFF]) for each in rates),
                "auto_of_best": _median(each[AUTO] / max(each[OFF], each[SERIAL], each[AHEAD]) for each in rates),
                "auto_ahead": _median(each[AUTO]["ahead"] for each in whole),
                "accepted": _median(each[SERIAL]["accepted"] for each in whole),
                "expected_gain": None if told is None else told["gain"],
            }
        )
    return rows


def promises(rows: Sequence[Json]) -> Json:
    """Cells by what was expected of drafting ahead and what came. bar: PROMISED."""
    told = [row for row in rows if row["expected_gain"] is not None]
    high = [row for row in told if row["expected_gain"] >= PROMISED]
    return {
        "bar": PROMISED,
        "cells": len(told),
        "promised": len(high),
        "of these above 1": sum(row["gain"] > 1 for row in high),
        "of these above the bar": sum(row["gain"] >= PROMISED for row in high),
        "above the bar without a promise": sum(row["gain"] >= PROMISED for row in told)
        - sum(row["gain"] >= PROMISED for row in high),
        "auto below 0.98 of the best way": sum(row["auto_of_best"] < 0.98 for row in told),
    }


def pictures(rows: Sequence[Json]) -> dict[str, str]:
    """Times serial by requests, one for each drafter and partition; and what came over what was expected."""
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


def _measured(costs: CostModel) -> Json:
    """What lanes cost each other, as the engine measured it."""
    names = ("share", "verify", "draft", "verify_alone", "draft_alone")
    return {"co_run": [{name: round(getattr(each, name), 4) for name in names} for each in costs.lanes]}


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 4)
