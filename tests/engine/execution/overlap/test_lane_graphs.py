"""Overlapped steps through CUDA graphs of each lane, on an emulated device, bring the tokens of plain decoding.

Oracle: the same requests without speculation over an eager runner. Products of other numbers of rows may round
differently, so nearly all answers have to be the same. The partition switches lanes at every replay and checks
which lane's graphs they replay; the faults that it has to catch are planted below.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.testing import assert_close

from faser.config.speculation import SpeculationConfig
from faser.engine.contract.step_times import StepTimes
from faser.engine.control.clock import SimulatedClock
from faser.engine.control.kv_cache import KvManager
from faser.engine.control.scheduler import Scheduler
from faser.engine.control.speculation.control import SpeculationControl
from faser.engine.control.speculation.overlap import OverlapOptions
from faser.engine.control.step_cost import CostModel
from faser.engine.engine import Engine
from faser.engine.execution.drafting.draft_model import DraftKvCache
from faser.engine.execution.drafting.registry import DrafterParts, DraftModelParts, make_drafter
from faser.engine.execution.model_executor import ModelExecutor, SpeculativeExecution
from faser.engine.execution.overlap.lanes import Lanes, device_lanes_of
from faser.engine.execution.overlap.partition import Lane, Partition, synchronous
from faser.engine.execution.runner.batch import BlockTable, RowBatch
from faser.engine.execution.runner.graph_runner import LANES_STAGE, STAGE, GraphRunner
from faser.engine.execution.runner.graph_sizes import GraphSizes
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.sampling.verify import make_verifier
from faser.kernels.cuda.flashinfer.backend import FlashInferBackend
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.graph_capture import GraphCapture
from faser.kernels.interface.shapes import DeviceLane, LaneError
from tests.checkpoints import VOCAB_SIZE
from tests.engine.execution.overlap.alternating_partition import AlternatingPartition
from tests.engine.execution.runner.test_graph_engine import answers
from tests.engine.execution.runner.test_graph_runner import (
    BLOCK_SIZE,
    MAX_LOGIT_ROWS,
    MAX_ROWS,
    NEAR,
    NUM_BLOCKS,
    WIDTH,
    Side,
    asked,
    rows_of,
    write_heads_of_64,
)
from tests.kernels.cuda.fake_device import FakeAccelerator, FakeGraphRecorder
from tests.kernels.cuda.fake_graph import fake_backend
from tests.kernels.cuda.flashinfer.fake_flashinfer import FakeFlashInfer
from tests.native_acceptance import make_native

SLOTS, NUM_TOKENS, CAP = 4, 12, 3
few_answers = partial(answers, count=6, num_tokens=NUM_TOKENS)
SIZES = GraphSizes(rows=(4, 8), max_sequences=SLOTS, max_blocks_each=WIDTH)
FEW_SIZES = GraphSizes(rows=(4,), max_sequences=SLOTS, max_blocks_each=WIDTH)
SHARES = (0.25, 0.5)

T = TypeVar("T")
# The graph capture of a device lane.
CaptureOf = Callable[[FlashInferBackend, DeviceLane], GraphCapture]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    target: Path
    drafter: Path


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(
        target=write_heads_of_64(tmp_path_factory.mktemp("target")),
        drafter=write_heads_of_64(tmp_path_factory.mktemp("drafter"), noise=0.01),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    lanes: Lanes
    target: GraphRunner
    drafter: GraphRunner

    @property
    def partition(self) -> AlternatingPartition:
        assert isinstance(self.lanes.partition, AlternatingPartition)
        return self.lanes.partition


def its_own(backend: FlashInferBackend, lane: DeviceLane) -> GraphCapture:
    return backend.graph_capture_on(lane)


def make_world(
    checkpoints: Pair,
    backend: FlashInferBackend | None = None,
    draft_backend: FlashInferBackend | None = None,
    draft_capture: CaptureOf = its_own,
    shares: tuple[float, ...] = SHARES[:1],
    sizes: GraphSizes = FEW_SIZES,
) -> World:
    """A pair of models whose lanes alternate."""
    backend = backend or fake_backend()
    accelerator = backend._accelerator
    assert isinstance(accelerator, FakeAccelerator)
    partition = AlternatingPartition(accelerator, shares)
    return world_on(
        partition, checkpoints, backend, draft_backend or backend.concurrent_instance(), draft_capture, sizes
    )


def world_on(
    partition: Partition,
    checkpoints: Pair,
    backend: FlashInferBackend,
    draft_backend: FlashInferBackend,
    draft_capture: CaptureOf = its_own,
    sizes: GraphSizes = FEW_SIZES,
) -> World:
    device_lanes = device_lanes_of(partition)
    target, drafter = Side(checkpoints.target, backend), Side(checkpoints.drafter, draft_backend)
    return World(
        lanes=Lanes(partition=partition, target=backend, draft=draft_backend),
        target=target.graph_runner(
            sizes, lane_captures={each: backend.graph_capture_on(each) for each in device_lanes.verify}
        ),
        drafter=drafter.graph_runner(
            sizes,
            drafts=True,
            lane_captures={each: draft_capture(draft_backend, each) for each in device_lanes.draft},
        ),
    )


def plain_engine(side: Side) -> Engine:
    sampler = Sampler(SLOTS, VOCAB_SIZE, (2,), side.backend.sampling_kernels)
    executor = ModelExecutor(side.eager(), sampler, BlockTable(SLOTS, WIDTH), max_logit_rows=MAX_LOGIT_ROWS)
    return Engine(scheduler(None), executor)


def overlapping_engine(world: World, share: float) -> Engine:
    config = SpeculationConfig(model="beside", method="draft_model", policy="fixed", num_speculative_tokens=CAP)
    table = BlockTable(SLOTS, WIDTH)
    sampler = Sampler(SLOTS, VOCAB_SIZE, (2,), world.target.sampling_kernels)
    model = DraftModelParts(
        runner=world.drafter,
        kv=DraftKvCache(table, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE),
        max_positions=BLOCK_SIZE * WIDTH,
    )
    parts = DrafterParts(
        table=table,
        sampling=sampler.state,
        max_rows=MAX_ROWS,
        model=model,
        samples_in_runner=True,
    )
    speculation = SpeculativeExecution(
        drafter=make_drafter(config, parts),
        verifier=make_verifier(config, sampler),
        lanes=world.lanes,
    )
    control = SpeculationControl(
        config,
        CostModel(StepTimes.proportional(step_s=0.01, pass_s=1e-5, text_s=1e-7)),
        make_native=make_native,
        num_slots=SLOTS,
        clock=SimulatedClock(),
        overlap=OverlapOptions(
            name="streams", share=share, mode="on", every=3, most_rows=world.target.most_graph_rows
        ),
    )
    executor = ModelExecutor(
        world.target,
        sampler,
        table,
        max_logit_rows=MAX_LOGIT_ROWS,
        speculation=speculation,
        samples_in_runner=True,
    )
    return Engine(scheduler(control), executor, schedules_async=True)


def scheduler(control: SpeculationControl | None) -> Scheduler:
    return Scheduler(
        kv=KvManager(NUM_BLOCKS, BLOCK_SIZE),
        max_num_seqs=SLOTS,
        max_num_batched_tokens=MAX_ROWS,
        max_model_len=BLOCK_SIZE * WIDTH,
        eos_token_ids=(2,),
        clock=SimulatedClock(),
        speculation=control,
    )


@pytest.fixture(scope="module")
def world(checkpoints: Pair) -> World:
    return make_world(checkpoints, shares=SHARES, sizes=SIZES)


@pytest.fixture(scope="module")
def plain(checkpoints: Pair) -> dict[str, list[int]]:
    return few_answers(plain_engine(Side(checkpoints.target)))


@pytest.mark.parametrize("share", SHARES)
def test_overlapped_steps_through_graphs_of_each_lane_bring_the_tokens_of_plain_decoding(
    world: World, plain: dict[str, list[int]], share: float
) -> None:
    before, engine = world.partition.num_replays, overlapping_engine(world, share)

    found = few_answers(engine)

    assert {name: len(token_ids) for name, token_ids in found.items()} == dict.fromkeys(plain, NUM_TOKENS)
    assert sum(found[name] == plain[name] for name in plain) >= len(plain) - 2
    stats = engine.stats().speculation
    assert stats is not None
    assert dict(stats.mode_steps)["streams"] > 5
    assert sum(each.accepted for each in stats.methods) > 10
    assert world.partition.num_replays - before > 50


def test_no_step_is_overlapped_that_its_lane_would_compute_call_by_call(checkpoints: Pair) -> None:
    """Steps of up to 16 rows, prompts among them, and graphs of up to 8. Eager attention would make a wrapper."""
    backend = fake_backend()
    world = make_world(checkpoints, backend, sizes=SIZES)
    few_answers(overlapping_engine(world, SHARES[0]))
    (verify,) = device_lanes_of(world.partition).verify
    assert world.partition.num_replays > 50
    assert isinstance(backend._library, FakeFlashInfer)
    left_out = 2 * (backend._accelerator.num_processors - verify.num_processors)
    assert not [
        each for each in backend._library.wrappers if not each.is_fixed and each.left_out_blocks == left_out
    ]


class _OnePool(FakeAccelerator):
    """Planted: all graphs of the device share a memory pool."""

    def graph_recorder(self, lane: DeviceLane | None = None) -> FakeGraphRecorder:
        return FakeGraphRecorder(self, lane, pool=self)


class _ForgetsItsLane(FlashInferBackend):
    """Planted: the draft lane replays graphs captured for the whole device."""

    @property
    def lane(self) -> None:
        return None


def test_lanes_that_share_a_pool_are_caught(checkpoints: Pair) -> None:
    world = make_world(checkpoints, fake_backend(_OnePool()))
    with pytest.raises(AssertionError, match="share a pool"):
        few_answers(overlapping_engine(world, SHARES[0]))


def test_a_lane_that_replays_graphs_of_the_whole_device_is_caught(checkpoints: Pair) -> None:
    backend = fake_backend()
    forgetful = _ForgetsItsLane(backend._accelerator, backend._library, backend._kernels)
    world = make_world(checkpoints, backend, forgetful)
    with pytest.raises(AssertionError, match=r"captured for None, replayed on .*draft"):
        few_answers(overlapping_engine(world, SHARES[0]))


def test_a_draft_lane_that_replays_graphs_of_the_verify_lane_is_caught(checkpoints: Pair) -> None:
    """Of its own model, but on the other lane's stream and processors."""

    def other(backend: FlashInferBackend, lane: DeviceLane) -> GraphCapture:
        return backend.graph_capture_on(
            DeviceLane(name="verify", share=1 - lane.share, num_processors=99, stream="the other one")
        )

    world = make_world(checkpoints, draft_capture=other)
    with pytest.raises(AssertionError, match=r"captured for .*verify.* replayed on .*draft"):
        few_answers(overlapping_engine(world, SHARES[0]))


def run_on_lane(partition: AlternatingPartition, backend: Backend, call: Callable[[], T]) -> T:
    """On the verify lane of the current share, without drafting."""

    def verify(lane: Lane) -> T:
        backend.use(lane.processors)
        try:
            return call()
        finally:
            backend.use(None)

    return partition.run_both(lambda _lane, _verify_done: None, synchronous(verify)).verified


def logits_of(runner: Runner, batch: RowBatch, rows: NDArray[np.int64]) -> torch.Tensor:
    runner.forward(batch)
    return runner.logits(rows).clone()


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.full(but=("0.5",))
def test_a_lane_computes_what_an_eager_runner_does_and_continues_from_the_whole_device(
    checkpoints: Pair, world: World, share: float
) -> None:
    """Steps alternate between the whole device and a lane, over one KV cache."""
    eager, table = Side(checkpoints.target).eager(), filled_table()
    world.partition.resize(share)
    for step, counts in enumerate(((3, 3, 3), (1, 1, 1), (2, 1, 4), (1, 1, 1), (12, 2, 2))):
        starts = [(0, 3, 4, 6, 7)[step], (0, 3, 4, 5, 6)[step], (0, 3, 4, 8, 9)[step]]
        batch = rows_of(table, [0, 1, 2], starts, list(counts), seed=step)
        rows = np.arange(min(sum(counts), MAX_LOGIT_ROWS))
        call = partial(logits_of, world.target, batch, rows)

        ours = run_on_lane(world.partition, world.lanes.target, call) if step % 2 else call()
        assert_close(ours, logits_of(eager, batch, rows), rtol=NEAR, atol=NEAR)


def filled_table() -> BlockTable:
    table = BlockTable(SLOTS, WIDTH)
    for slot in range(SLOTS):
        table.append(slot, tuple(range(slot * WIDTH, (slot + 1) * WIDTH)))
    return table


def test_every_lane_has_graphs_of_its_own_and_progress_counts_them(checkpoints: Pair) -> None:
    side, said = Side(checkpoints.target), []
    accelerator = side.backend._accelerator
    assert isinstance(accelerator, FakeAccelerator)
    device_lanes = device_lanes_of(AlternatingPartition(accelerator, SHARES)).verify
    lane_captures = {each: side.backend.graph_capture_on(each) for each in device_lanes}
    runner = side.graph_runner(SIZES, lane_captures=lane_captures, report=lambda *each: said.append(each))
    assert [stage for stage, _, _ in said] == sorted(
        (stage for stage, _, _ in said), key=[STAGE, LANES_STAGE].index
    )
    wanted = len(SIZES.batch_sizes) + len(SIZES.rows) * 6
    assert runner.num_graphs == 3 * wanted
    assert said[-1] == (LANES_STAGE, 2 * wanted, 2 * wanted)
    captures = [side.backend.graph_capture_on(each) for each in device_lanes]
    assert len({id(each) for each in (*captures, side.backend.graph_capture)}) == 3
    assert all(each.graph_bytes > 0 for each in captures)


class NoClusters:
    """A capture on processors that cannot run a kernel. Another one's, but for the capturing."""

    def __init__(self, capture: GraphCapture, error: Exception) -> None:
        self._capture = capture
        self._error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._capture, name)

    def capture(self, _work: Callable[[], None]) -> Any:
        raise self._error


def test_a_lane_that_cannot_run_a_kernel_is_named_with_the_reason(checkpoints: Pair) -> None:
    """Planted: an exhausted memory told as a lane's fault."""
    side = Side(checkpoints.target)
    accelerator = side.backend._accelerator
    assert isinstance(accelerator, FakeAccelerator)
    lane = device_lanes_of(AlternatingPartition(accelerator, SHARES)).draft[0]

    def capturing(error: Exception) -> GraphRunner:
        capture = cast(GraphCapture, NoClusters(side.backend.graph_capture_on(lane), error))
        return side.graph_runner(SIZES, lane_captures={lane: capture})

    told = f"the {lane.num_processors} processors of the draft lane cannot run this model: no clusters$"
    with pytest.raises(LaneError, match=told):
        capturing(RuntimeError("no clusters\nCompile with …"))
    with pytest.raises(torch.OutOfMemoryError):
        capturing(torch.OutOfMemoryError("full"))


@pytest.mark.parametrize("shape", [(1, 4, 4), (3, 3, 3), (2, 1, 4), (1, 1, 1), (4, 4, 3)])
def test_a_lane_replays_every_step_that_is_no_larger_than_the_largest_graph(
    world: World, shape: tuple[int, ...]
) -> None:
    batch = rows_of(filled_table(), [*range(len(shape))], [0] * len(shape), [*shape], seed=1)
    before, most_rows = world.partition.num_replays, world.target.most_graph_rows
    run_on_lane(world.partition, world.lanes.target, lambda: world.target.forward(batch))
    assert world.partition.num_replays - before == (batch.num_rows <= most_rows)


def test_on_a_lane_without_graphs_everything_is_computed_call_by_call(checkpoints: Pair) -> None:
    side = Side(checkpoints.target)
    runner, table = side.graph_runner(SIZES), filled_table()
    accelerator = side.backend._accelerator
    assert isinstance(accelerator, FakeAccelerator)
    partition = AlternatingPartition(accelerator, SHARES)
    batch = rows_of(table, [0, 1], [0, 0], [1, 1], seed=1)
    requests = asked(2, seed=3)

    def tokens() -> list[int]:
        runner.forward(batch)
        found: list[int] = runner.sample(batch.last_rows, requests).wait().token_ids.tolist()
        return found

    wanted = tokens()
    assert run_on_lane(partition, side.backend, tokens) == wanted
    assert partition.num_replays == 0
