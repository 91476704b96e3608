"""Lanes of an engine that is measured: how they were divided, and the host's part in every pair that they run.

Owns the moments of pairs. Knows nothing of what runs on the lanes.

    host     called ── gives verification ── given ── drafts: gives passes, waits for them … ── waits ── returned
    device          ┊ verify began ……………………………………………………………………………………………… verify ended
                                              ┊ draft began …………………………………… draft ended

A lane has begun when the device comes to the event before the lane's first kernel. That is as early as the kernel
can begin: if the host has not given it by then, the device waits on. `given` says until when that may be.

Steps of the target beside passes of the draft model: how much longer each takes than alone on everything.

By share, rows and context, with the recordings that an engine has for its lanes. Writes into blocks of the cache:
no sequence may be running. Drafts are not looked at. A partition that came for one that the driver refused is left
out where it has rows of its own.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.gpu.engines import (
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
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.record import Desk, Json
from benchmarks.gpu.steps import DeviceClock, batch_of, clock_of, greedy_requests
from faser.engine.execution.drafters.draft_samplers import WINDOW
from faser.engine.execution.overlap.factory import divide_gpu, make_partition
from faser.engine.execution.overlap.green_contexts import GreenContexts
from faser.engine.execution.overlap.lanes import Lanes, enqueue_on_lane, run_on_lane
from faser.engine.execution.overlap.partition import (
    Draft,
    Lane,
    OverlapResult,
    Partition,
    PendingResult,
    Verify,
)
from faser.engine.execution.runner.batch import RowBatch
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.token_samplers import PendingTokens
from faser.errors import ConfigError
from faser.kernels.interface.sampling.sampling_metadata import SamplingMetadata

D = TypeVar("D")
V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class Divided:
    """asked: by name. refusal: why another one came, in the driver's words; None: it is the one asked for."""

    asked: str
    partition: Partition
    refusal: str | None

    @property
    def about(self) -> Json:
        shares = [round(share, 4) for share in self.partition.shares()]
        about = {"asked": self.asked, "came": self.partition.name, "refusal": self.refusal, "shares": shares}
        refused = self.partition.refused_splits if isinstance(self.partition, GreenContexts) else {}
        return {**about, "refused_splits": refused} if refused else about

    def is_measured_as_itself(self, asked: Sequence[str]) -> bool:
        """Whether this one came for another, and is among those asked for: it need not be measured twice."""
        return self.partition.name != self.asked and self.partition.name in asked


def divide(plan: Plan, name: str) -> Divided:
    """Raises ConfigError where a partition of this name cannot be had at all."""
    if plan.dry_run:
        return Divided(asked=name, partition=make_partition(name), refusal=None)
    device = torch.device("cuda", torch.cuda.current_device())
    partition, refusal = divide_gpu(name, device)
    return Divided(asked=name, partition=partition, refusal=refusal)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """When the pair was asked for, when verification had been given, when each lane began, when the later one
    ended, and when the caller had it."""

    called_s: float
    given_s: float
    draft_began_s: float
    verify_began_s: float
    ended_s: float
    returned_s: float


class TimedPartition:
    """See Partition. Another one, which notes the moments of every pair."""

    def __init__(self, partition: Partition, now: Callable[[], float] = time.perf_counter) -> None:
        self._partition = partition
        self._now = now
        self._pairs: list[_Pair] = []

    @property
    def name(self) -> str:
        return self._partition.name

    @property
    def share(self) -> float:
        return self._partition.share

    def shares(self) -> tuple[float, ...]:
        return self._partition.shares()

    def resize(self, share: float) -> None:
        self._partition.resize(share)

    def run_both(self, draft: Draft[D], verify: Verify[V]) -> OverlapResult[D, V]:
        given_s = 0.0

        def giving(lane: Lane) -> PendingResult[V]:
            nonlocal given_s
            underway = verify(lane)
            given_s = self._now()
            return underway

        joined = self._partition.run_both(draft, giving)
        self._pairs.append(
            _Pair(
                called_s=joined.began_s,
                given_s=given_s,
                draft_began_s=joined.draft_began_s,
                verify_began_s=joined.verify_began_s,
                ended_s=max(joined.draft_ended_s, joined.verify_ended_s),
                returned_s=self._now(),
            )
        )
        return joined

    def close(self) -> None:
        self._partition.close()

    def taken(self) -> Json:
        """Of the pairs since this was asked last, medians in milliseconds; none of them: only their number.

        draft_gap_ms, verify_gap_ms: from the call of `both` until the lane begins. given_ms: until verification
        has been given. join_ms: from the later end until the return. between_ms: from a pair's later end
        until a lane of the next pair begins, whatever happens in between; None for a single pair.
        """
        pairs, self._pairs = self._pairs, []
        if not pairs:
            return {"pairs": 0}
        between = [
            min(after.draft_began_s, after.verify_began_s) - before.ended_s for before, after in pairwise(pairs)
        ]
        return {
            "pairs": len(pairs),
            "draft_gap_ms": _median_ms([each.draft_began_s - each.called_s for each in pairs]),
            "verify_gap_ms": _median_ms([each.verify_began_s - each.called_s for each in pairs]),
            "given_ms": _median_ms([each.given_s - each.called_s for each in pairs]),
            "join_ms": _median_ms([each.returned_s - each.ended_s for each in pairs]),
            "between_ms": _median_ms(between) if between else None,
        }


def _median_ms(seconds: Sequence[float]) -> float:
    return round(1e3 * statistics.median(seconds), 4)


_ROUNDS = 5
_LEAST_S = 40.0  # two models and the recordings of lanes take most of that

Work = Callable[[], PendingResult[None]]  # gives it to the device
Choose = Callable[[NDArray[np.int64], SamplingMetadata], PendingTokens]
Divide = Callable[[Plan, str], Divided]


def run_matrix(plan: Plan, desk: Desk, divide: Divide = divide) -> None:
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
