"""Phase `overlap`: drafting during verification against drafting before it, by acceptance, requests and drafter.

Pairs of models walk (see models.py), so acceptance is as given and tokens are the target's own. One engine for
each drafter and partition, which measures what steps and passes cost; within it these take turns in every
round, on the same prompts:

off      nobody drafts
serial   policy faser, drafts before the step
ahead    policy faser, drafts during the step on this partition, wherever anybody drafts
auto     policy faser, ahead where it finds that this pays
ahead:2  drafts of two tokens during the step, and so on: chunks of a fixed length

Predicted before the day, at 128 tokens of context and acceptance 0.9, over the best other way: 0.94 at one request
and 0.93 at 128 by `sm`, 0.95 to 1.1 at 64 by `streams`. `decision` says what follows: where no cell exceeds 1.03,
`sm` lanes leave the GPU.

Where the first round of the most requests shows that drafting ahead loses, an engine's further cells would show no
more: a trace of some steps is written instead. `lanes` says which partition was made for each that was asked for,
and why; one that was made for another is left out where it is asked for itself. `gaps` has the medians of the
host's part in every pair of lanes.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.decoding.partitions import Divide, Divided, TimedPartition, divide
from benchmarks.gpu.decoding.policies import Arm, Turns, contest
from benchmarks.gpu.engines import Opened, Wanted, made_up_costs, target_of, with_engine
from benchmarks.gpu.models import Config, Walk, Walking, own_head, write_shape
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.record import Desk, Json
from benchmarks.gpu.steps import ClosedLoop, clock_of, greedy
from benchmarks.spec_bench.chart import line_chart
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
LEAST_AHEAD = 0.7  # of drafting before the step in the first round; below that a trace says more than cells
LEAST_GAIN = 1.03  # over the best other way, in one cell at least, or `sm` lanes leave the GPU
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
    desk.keep("rows", rows_of(desk.result.get("turns", [])))
    desk.keep("gaps", gaps_of(desk.result.get("turns", [])))
    desk.keep("decision", decision_of(desk.result["rows"]))
    for name, picture in pictures(desk.result["rows"]).items():
        (desk.folder.path / name).write_text(picture, "utf-8")


def _measure(
    plan: Plan, desk: Desk, walk: Walk, config: Config, divided: Divided, about: Json, ends_s: float
) -> None:
    """One engine, from its loading to its end."""
    timed = TimedPartition(divided.partition)
    wanted = _wanted(plan, walk, f"walking-{about['drafter']}", config, timed)

    def work(opened: Opened) -> None:
        desk.append("lanes", {**about, **divided.about})
        _compare(plan, desk, opened, walk, about, timed, ends_s)

    try:
        with_engine(plan, wanted, work)
    except ConfigError as error:
        desk.append("refused", {**about, "says": str(error)})


def _compare(
    plan: Plan, desk: Desk, opened: Opened, walk: Walk, about: Json, timed: TimedPartition, ends_s: float
) -> None:
    sizes = plan.sizes
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
        if losses:
            name = f"overlap-{about['drafter']}-{about['partition']}.trace.gz"
            desk.append(
                "stopped", {**about, "acceptance": acceptance, "ahead": round(losses[0], 4), "trace": name}
            )
            trace_ahead(plan, opened, turns, desk.folder.path / name)
            return


def trace_ahead(plan: Plan, opened: Opened, turns: Turns, file: Path) -> None:
    """Trace some steps of the most requests that draft ahead: which kernels ran at the same time."""
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
        prompts=walk.prompts(place, max(sizes.overlap_batches), sizes.overlap_context),
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
        context=sizes.overlap_context,
        rows=sizes.rows,
        sources=sources_of(plan, walk, target),
        speculative={"method": "draft_model", "model": str(draft), "num_speculative_tokens": sizes.cap},
        costs=made_up_costs() if plan.dry_run else None,
        overlap="on",
        partition=partition,
    )


def sources_of(plan: Plan, walk: Walk, target: Path) -> Sources:
    """The target goes to successors, the drafter to what it takes for them."""

    def source(directory: Path) -> WeightSource:
        return Walking.of(directory, walk.successor if directory == target else walk.guess, plan.device)

    return source


def rows_of(turns: Sequence[Json]) -> list[Json]:
    """One a cell: medians over rounds. Ratios are to serial in the same round; gain: ahead over the best other."""
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
            }
        )
    return rows


def decision_of(rows: Sequence[Json]) -> str:
    """Say what follows for lanes with processors of their own."""
    if not rows:
        return "No cell was measured: nothing follows."
    best = max(rows, key=lambda row: float(row["gain"]))
    where = f"{best['partition']}, {best['sequences']} sequences, acceptance {best['acceptance']:g}"
    follows = (
        "lanes stay" if best["gain"] > LEAST_GAIN else f"no cell exceeds {LEAST_GAIN}: `sm` lanes leave the GPU"
    )
    return f"Best gain {best['gain']:.2f} ({where}): {follows}."


def gaps_of(turns: Sequence[Json]) -> list[Json]:
    """Return by cell the medians of what the host takes around lanes, in turns that always draft ahead."""
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


def pictures(rows: Sequence[Json]) -> dict[str, str]:
    """Times serial by requests, one a drafter and partition."""
    made: dict[str, str | None] = {}
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


def _median_if(values: Sequence[float | None]) -> float | None:
    """Return the median of the values that there are."""
    there = [value for value in values if value is not None]
    return _median(there) if there else None


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 4)
