"""Phase `lanes`: what a copy and a pass of the draft model reach on some of a GPU's processors, alone on them.

Green contexts divide the device; the draft's lane has what a group of the others leaves. Each number of processors
is a split of its own, whose passes are replayed from graphs that were captured there. On a CPU: its cores.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch

from benchmarks.gpu.engines import Opened, Wanted, made_up, made_up_costs, with_engine
from benchmarks.gpu.models import BLOCK_SIZE, step_bytes, write_shape
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.record import Desk, Json
from benchmarks.gpu.steps import DeviceClock, batch_of, clock_of, steps_s
from faser.engine.checkpoints.files import read_model_config
from faser.engine.execution.overlap.lanes import make_partition, run_on_lane
from faser.engine.execution.overlap.partition import (
    Draft,
    Lane,
    OverlapResult,
    Partition,
    Verify,
    synchronous,
)
from faser.engine.execution.overlap.streams import D as Drafted
from faser.engine.execution.overlap.streams import V as Verified
from faser.engine.execution.overlap.streams import green_contexts, plain_streams
from faser.engine.execution.runner.batch import RowBatch
from faser.kernels.cuda.lanes import CudaLaneDevice, GreenContextError, open_green_driver

_SHARE_DIGITS = 6
_COPIES = 10


class Splits:
    """Partition of several others, by the share of the draft's lane."""

    name = "splits"

    def __init__(self, parts: Sequence[Partition]) -> None:
        self._parts = {round(each.share, _SHARE_DIGITS): each for each in parts}
        self.share = min(self._parts)

    def shares(self) -> tuple[float, ...]:
        return tuple(sorted(self._parts))

    def resize(self, share: float) -> None:
        self.share = share

    def run_both(self, draft: Draft[Drafted], verify: Verify[Verified]) -> OverlapResult[Drafted, Verified]:
        return self._parts[self.share].run_both(draft, verify)

    def close(self) -> None:
        for each in self._parts.values():
            each.close()


def run(plan: Plan, desk: Desk) -> None:
    sizes = plan.sizes
    partition = make_partition("cores") if plan.dry_run else split(desk, sizes.lane_counts)
    target = write_shape(plan.models / "short", sizes.target | {"num_hidden_layers": 1})
    draft = write_shape(plan.models / "draft", sizes.draft)
    desk.say("loading the draft model, and a layer of the target")
    wanted = Wanted(
        target=target,
        draft=draft,
        sequences=max(sizes.lane_batches),
        context=max(sizes.lane_contexts),
        rows=sizes.rows,
        sources=made_up(plan),
        speculative={"method": "draft_model", "model": str(draft), "num_speculative_tokens": 1},
        costs=made_up_costs(),
        overlap="on",
        partition=partition,
        graph_rows=tuple(sorted(sizes.lane_batches)),
    )
    with_engine(plan, wanted, partial(_cells, plan, desk, partition))
    partition.close()


def split(desk: Desk, counts: Sequence[int]) -> Splits:
    """One split for each number of processors of the draft's lane that the driver grants, and the whole device."""
    index = torch.device("cuda", torch.cuda.current_device())
    device, parts = CudaLaneDevice(index), []
    driver = open_green_driver(index)
    for count in counts:
        try:
            parts.append(green_contexts(driver, device, (driver.num_processors - count,)))
        except GreenContextError as error:
            desk.append("refused", {"processors": count, "says": str(error)})
    return Splits([*parts, plain_streams(device)])


def _cells(plan: Plan, desk: Desk, partition: Partition, opened: Opened) -> None:
    sizes, clock = plan.sizes, clock_of(plan.device)
    assert opened.draft_runner is not None, "the engine has a draft model"
    assert opened.lanes is not None, "the engine has lanes"
    runner, spec = opened.draft_runner, read_model_config(plan.models / "draft").spec
    for share in partition.shares():
        partition.resize(share)

        def timed(work: Callable[[], list[float]], lane: Lane, _done: Callable[[], bool]) -> tuple[float, int]:
            assert opened.lanes is not None
            taken_s = statistics.median(run_on_lane(opened.lanes.draft, lane, work))
            processors = len(lane.cores or ()) if lane.device_lane is None else lane.device_lane.num_processors
            return taken_s, processors

        def measured(work: Callable[[], list[float]], about: Json, moved: int) -> Json:
            idle = synchronous(lambda _: None)
            taken_s, processors = partition.run_both(partial(timed, work), idle).drafted
            rate = moved / taken_s / 1e9
            each = {"gb_s": round(rate, 1), "gb_s_a_processor": round(rate / processors, 2)}
            return {**about, "processors": processors, "ms": round(1e3 * taken_s, 4), **each}

        if desk.may_begin(f"share {share:.2f}: a copy"):
            source = torch.randint(256, (sizes.copy_bytes // 4,), dtype=torch.uint8, device=plan.device)
            into = torch.empty_like(source)
            copying = partial(_copies_s, clock, into, source)
            desk.append("copies", measured(copying, {}, 2 * source.numel()))
        for sequences in sizes.lane_batches:
            for context in sizes.lane_contexts:
                if not desk.may_begin(f"share {share:.2f}: {sequences} sequences at {context}"):
                    continue
                batch = _batch(opened, sequences, context)
                moved = step_bytes(spec, kv_tokens=sequences * context)
                about = {"sequences": sequences, "context": context}
                passes = partial(steps_s, runner, batch, clock, max(sizes.steps // 2, 1), drafts=True)
                desk.append("passes", measured(passes, about, moved))


def _copies_s(clock: DeviceClock, into: torch.Tensor, source: torch.Tensor) -> list[float]:
    marks = [clock.mark()]
    for _ in range(_COPIES):
        into.copy_(source)
        marks.append(clock.mark())
    return clock.between_s(marks)


def _batch(opened: Opened, sequences: int, context: int) -> RowBatch:
    return batch_of(
        sequences=sequences,
        rows_each=1,
        context=context,
        num_blocks=opened.info.num_blocks,
        block_size=BLOCK_SIZE,
        vocab_size=opened.info.vocab_size,
    )
