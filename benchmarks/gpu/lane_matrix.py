"""Steps of the target beside passes of the draft model: how much longer each takes than alone on everything.

By share, rows and context, with the recordings that an engine has for its lanes. Writes into blocks of the cache:
no sequence may be running. Drafts are not looked at.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.bare import batch_of, greedy_requests
from benchmarks.gpu.engines import (
    Opened,
    Wanted,
    close,
    draft_of,
    draft_runner_of,
    lane_costs,
    lanes_of,
    made_up,
    on_lane,
    open_engine,
    runner_of,
    target_of,
)
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.record import Desk, Json
from benchmarks.gpu.timing import DeviceClock, clock_of
from faser.engine.batch import RowBatch
from faser.engine.choosing import Pending
from faser.engine.partition import Lane
from faser.engine.requests import Requests
from faser.engine.runner import Runner
from faser.engine.spec.draft_choice import WINDOW
from faser.errors import ConfigError

_ROUNDS = 5

Work = Callable[[], None]
Choose = Callable[[NDArray[np.int64], Requests], Pending]


def run(plan: Plan, desk: Desk) -> None:
    sizes, target, draft = plan.sizes, target_of(plan), draft_of(plan)
    for partition in sizes.partitions:
        if not desk.may_begin(f"verification beside drafting by {partition}: loading"):
            continue
        try:
            opened = open_engine(
                plan,
                Wanted(
                    target=target,
                    draft=draft,
                    sequences=max(sequences for sequences, _ in sizes.lane_rows),
                    context=max(sizes.lane_contexts),
                    rows=sizes.rows,
                    sources=made_up(plan),
                    speculative={
                        "method": "draft_model",
                        "model": str(draft),
                        "num_speculative_tokens": sizes.cap,
                    },
                    costs=lane_costs(),
                    overlap="on",
                    partition=None if plan.dry_run else partition,
                ),
            )
        except ConfigError as error:
            desk.append("matrix", {"partition": partition, "says": str(error)})
            continue
        _cells(plan, desk, opened)
        close(opened)


def _cells(plan: Plan, desk: Desk, opened: Opened) -> None:
    clock, lanes = clock_of(plan.device), lanes_of(opened.engine)
    for context in plan.sizes.lane_contexts:
        for sequences, rows_each in plan.sizes.lane_rows:
            runner, drafting = runner_of(opened.engine), draft_runner_of(opened.engine)
            verify = _steps(runner, runner.choose, _batch(opened, sequences, rows_each, context), 1)
            passes = _batch(opened, sequences, 1, context)
            draft = _steps(drafting, partial(_guess, drafting), passes, plan.sizes.cycle_gamma)
            for share in lanes.partition.shares():
                what = f"{sequences} sequences, {rows_each} rows each, context {context}, share {share:.3f}"
                if not desk.may_begin(what):
                    continue
                lanes.partition.resize(share)
                row = {"partition": lanes.partition.name, "share": round(share, 4), "sequences": sequences}
                row |= {"rows_each": rows_each, "context": context, **_beside(opened, clock, draft, verify)}
                desk.append("matrix", row)


def _beside(opened: Opened, clock: DeviceClock, draft: Work, verify: Work) -> Json:
    lanes = lanes_of(opened.engine)

    def on_draft(lane: Lane, _done: Callable[[], bool]) -> None:
        on_lane(lanes.draft, lane, draft)

    def on_verify(lane: Lane) -> None:
        on_lane(lanes.target, lane, verify)

    rounds = []
    for _ in range(_ROUNDS + 1):
        marks = [clock.mark()]
        for work in (draft, verify):
            work()
            marks.append(clock.mark())
        draft_s, verify_s = clock.between_s(marks)
        joined = lanes.partition.both(on_draft, on_verify)
        ended_s = max(joined.draft_ended_s, joined.verify_ended_s)
        rounds.append(
            {
                "draft_ms": 1e3 * draft_s,
                "verify_ms": 1e3 * verify_s,
                "draft_slowdown": (joined.draft_ended_s - joined.draft_began_s) / draft_s,
                "verify_slowdown": (joined.verify_ended_s - joined.verify_began_s) / verify_s,
                "speed_up": (draft_s + verify_s) / (ended_s - min(joined.draft_began_s, joined.verify_began_s)),
            }
        )
    return medians(rounds[1:])


def _steps(runner: Runner, choose: Choose, batch: RowBatch, count: int) -> Work:
    """So many forwards, and the choice of a token a row behind each; the last one is waited for."""
    rows = np.arange(len(batch.token_ids), dtype=np.int64)
    requests = greedy_requests(batch.layout.positions.numpy().astype(np.int64) + 1)

    def work() -> None:
        for _ in range(count):
            runner.forward(batch)
            pending = choose(rows, requests)
        pending.wait()

    return work


def _guess(runner: Runner, rows: NDArray[np.int64], requests: Requests) -> Pending:
    return runner.guess(rows, requests, WINDOW)


def _batch(opened: Opened, sequences: int, rows_each: int, context: int) -> RowBatch:
    info = opened.info
    return batch_of(
        sequences=sequences,
        rows_each=rows_each,
        context=context,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        vocab_size=info.vocab_size,
    )


def medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(each[name] for each in rounds), 4) for name in rounds[0]}
