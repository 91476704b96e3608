"""Steps of the target beside passes of the draft model: how much longer each takes than alone on everything.

By share, rows and context, with the recordings that an engine has for its lanes. Writes into blocks of the cache:
no sequence may be running. Drafts are not looked at. A partition that came for one that the driver refused is left
out where it has rows of its own.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.common.bare import batch_of, greedy_requests
from benchmarks.gpu.common.engines import (
    Opened,
    Wanted,
    close,
    draft_of,
    free_memory,
    lane_costs,
    made_up,
    open_engine,
    target_of,
)
from benchmarks.gpu.common.plan import Plan
from benchmarks.gpu.common.record import Desk, Json
from benchmarks.gpu.common.timing import DeviceClock, clock_of
from benchmarks.gpu.lanes.timed_partition import Divided, divide
from faser.engine.execution.drafting.samplers import WINDOW
from faser.engine.execution.overlap.lanes import Lanes, enqueue_on_lane, run_on_lane
from faser.engine.execution.overlap.partition import Lane, Partition, PendingResult
from faser.engine.execution.runner.batch import RowBatch
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.tokens import PendingTokens
from faser.errors import ConfigError
from faser.kernels.interface.sampling import SamplingMetadata

_ROUNDS = 5
_LEAST_S = 40.0  # two models and the recordings of lanes take most of that

Work = Callable[[], PendingResult[None]]  # gives it to the device
Choose = Callable[[NDArray[np.int64], SamplingMetadata], PendingTokens]
Divide = Callable[[Plan, str], Divided]


def run(plan: Plan, desk: Desk, divide: Divide = divide) -> None:
    for name in plan.sizes.partitions:
        needs_s = 0.0 if plan.dry_run else _LEAST_S
        if not desk.may_begin(f"verification beside drafting by {name}: loading", needs_s=needs_s):
            continue
        try:
            divided = divide(plan, name)
        except ConfigError as error:
            desk.append("matrix", {"asked": name, "says": str(error)})
            continue
        if divided.is_measured_as_itself(plan.sizes.partitions):
            desk.append("matrix", {"asked": name, "partition": divided.partition.name, "says": divided.refusal})
        else:
            _measure(plan, desk, divided)
            free_memory()  # recordings go before the streams that they were made on
        divided.partition.close()


def _measure(plan: Plan, desk: Desk, divided: Divided) -> None:
    try:
        opened = _open(plan, divided.partition)
    except ConfigError as error:
        desk.append("matrix", {"asked": divided.asked, "says": str(error)})
        return
    cells(plan, desk, opened, divided, clock_of(plan.device))
    close(opened)


def _open(plan: Plan, partition: Partition) -> Opened:
    """Raises ConfigError for what does not fit."""
    sizes, draft = plan.sizes, draft_of(plan)
    return open_engine(
        plan,
        Wanted(
            target=target_of(plan),
            draft=draft,
            sequences=max(sequences for sequences, _ in sizes.lane_rows),
            context=max(sizes.lane_contexts),
            rows=sizes.rows,
            sources=made_up(plan),
            speculative={"method": "draft_model", "model": str(draft), "num_speculative_tokens": sizes.cap},
            costs=lane_costs(),
            overlap="on",
            partition=partition,
        ),
    )


def cells(plan: Plan, desk: Desk, opened: Opened, divided: Divided, clock: DeviceClock) -> None:
    lanes, runner, drafting = opened.lanes, opened.runner, opened.draft_runner
    assert lanes is not None, "the engine has no lanes"
    assert drafting is not None, "the engine has no draft model"
    for context in plan.sizes.lane_contexts:
        for sequences, rows_each in plan.sizes.lane_rows:
            verify = steps_of(runner, runner.sample, _batch(opened, sequences, rows_each, context), 1)
            passes = _batch(opened, sequences, 1, context)
            draft = steps_of(drafting, partial(_guess, drafting), passes, plan.sizes.cycle_gamma)
            for share in lanes.partition.shares():
                what = f"{sequences} sequences, {rows_each} rows each, context {context}, share {share:.3f}"
                if not desk.may_begin(what):
                    continue
                lanes.partition.resize(share)
                row = {"asked": divided.asked, "partition": lanes.partition.name, "share": round(share, 4)}
                row |= {"sequences": sequences, "rows_each": rows_each, "context": context}
                desk.append("matrix", {**row, **beside(lanes, clock, draft, verify)})


def beside(lanes: Lanes, clock: DeviceClock, draft: Work, verify: Work) -> Json:
    """Medians. slowdown: of the work on its lane over the same alone; speed_up: in turns over side by side."""

    def on_draft(lane: Lane, _done: Callable[[], bool]) -> None:
        run_on_lane(lanes.draft, lane, lambda: draft().wait())

    def on_verify(lane: Lane) -> PendingResult[None]:
        return enqueue_on_lane(lanes.target, lane, verify)

    rounds = []
    for _ in range(_ROUNDS + 1):
        marks = [clock.mark()]
        for work in (draft, verify):
            work().wait()
            marks.append(clock.mark())
        draft_s, verify_s = clock.between_s(marks)
        joined = lanes.partition.run_both(on_draft, on_verify)
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


def steps_of(runner: Runner, choose: Choose, batch: RowBatch, count: int) -> Work:
    """So many forwards, and the choice of a token a row behind each; waiting is for the last one."""
    rows = np.arange(len(batch.token_ids), dtype=np.int64)
    requests = greedy_requests(batch.layout.positions.numpy().astype(np.int64) + 1)

    def work() -> PendingResult[None]:
        for _ in range(count):
            runner.forward(batch)
            pending = choose(rows, requests)

        def wait() -> None:
            pending.wait()

        return PendingResult(wait)

    return work


def _guess(runner: Runner, rows: NDArray[np.int64], requests: SamplingMetadata) -> PendingTokens:
    return runner.sample_drafts(rows, requests, WINDOW)


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
