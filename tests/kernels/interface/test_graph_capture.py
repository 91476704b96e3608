"""Replayed steps against eager ones on the reference backend; the device and its kernels are emulated.

The emulation replays what was captured call by call (fake_device). So a host number that ended up in a graph, an
array that was replaced, or a plan at another address than the kernel reads, all show. One test runs the same on a
GPU, if the machine has one.

Bugs these tests have been seen to catch: plans that are not renewed, or only the first kind's, or before the last
one was copied; arrays that are not sent; a blank plan, or padding, that stores; padding without a row in decoding;
page numbers taken from the host; wrappers of eager steps in a graph; a workspace that does not grow; values read
from the keys; two lanes over one workspace.
"""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from faser.kernels.cuda.flashinfer.backend import FlashInferBackend
from faser.kernels.cuda.flashinfer.paged_attention import AttentionKind
from faser.kernels.factory import make_backend
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.graph_capture import CapturedGraph, GraphBatchSize, GraphCapture
from faser.kernels.interface.shapes import AttentionPlan, AttentionShape, DeviceLane, KvCache, RowLayout
from faser.kernels.torch_backend import TorchBackend
from tests.kernels.cuda.fake_device import FakeAccelerator, FakeGraphRecorder
from tests.kernels.cuda.fake_graph import fake_backend, fake_kernels
from tests.kernels.cuda.flashinfer.fake_flashinfer import FakeFlashInfer, FakePrefill
from tests.kernels.histories import MOST_ROWS, NUM_SEQUENCES, Steps, histories, shapes
from tests.kernels.layouts import (
    BLOCK_SIZE,
    Span,
    attention_shape,
    kv_shape,
    layout_of,
    qkv_width,
    rotary_angles,
    shuffled_table,
)

pytestmark = pytest.mark.usefixtures("one_thread", "seeded")

REFERENCE = TorchBackend()
NEAR = 2.0**-6  # keys and mixed values are rounded to bfloat16 in other lanes than the reference's
BLOCKS_EACH = 8
BATCH_SIZES = (
    GraphBatchSize(rows=2, sequences=2, one_row_each=True),
    GraphBatchSize(rows=4, sequences=4, one_row_each=True),
    GraphBatchSize(rows=6, sequences=3, one_row_each=False, rows_each=2),
    GraphBatchSize(rows=9, sequences=3, one_row_each=False),
    GraphBatchSize(rows=NUM_SEQUENCES * MOST_ROWS + 1, sequences=5, one_row_each=False),
)


@dataclass
class Sized:
    """The graph of one size, with its inputs and results: [rows, …] for each of the layers."""

    batch_size: GraphBatchSize
    plan: AttentionPlan
    qkv: Tensor
    out: Tensor
    graph: CapturedGraph

    def fits(self, layout: RowLayout) -> bool:
        rows, sequences = len(layout.positions), len(layout.seq_len)
        if self.batch_size.one_row_each and rows != sequences:
            return False
        counts = layout.query_start.diff()
        if self.batch_size.rows_each is not None and not (counts == self.batch_size.rows_each).all():
            return False
        return rows <= self.batch_size.rows and sequences <= self.batch_size.sequences


class Layers:
    """Two layers, the second with a window, in graphs of several sizes. The caller gives the projections."""

    def __init__(self, backend: FlashInferBackend, shape: AttentionShape, angles: Tensor | None) -> None:
        self.shapes = (shape, replace(shape, window=5))
        self.angles = None if angles is None else angles.to(backend.device)
        self.cache: KvCache = backend.allocate_kv(kv_shape(shape, NUM_SEQUENCES * BLOCKS_EACH, torch.bfloat16))
        self.capture: GraphCapture = backend.graph_capture
        self._backend = backend
        self.sizes = [self._captured(batch_size) for batch_size in BATCH_SIZES]

    def _captured(self, batch_size: GraphBatchSize) -> Sized:
        shape, max_blocks = self.shapes[0], batch_size.sequences * BLOCKS_EACH
        plan = self.capture.plan(batch_size, BLOCK_SIZE, max_blocks)
        device, width = self._backend.device, shape.num_heads * shape.head_dim
        qkv = torch.randn(2, batch_size.rows, qkv_width(shape)).bfloat16().to(device)
        out = torch.zeros(2, batch_size.rows, width, dtype=torch.bfloat16, device=device)
        graph = self.capture.capture(lambda: run_layers(self._backend, self, plan, qkv, out))
        return Sized(batch_size, plan, qkv, out, graph)

    def step(self, layout: RowLayout, qkv: Tensor) -> Tensor:
        """[2, R, …] of both layers, by the smallest graph that fits."""
        rows = qkv.shape[1]
        sized = next(each for each in self.sizes if each.fits(layout))
        sized.qkv[:, :rows] = qkv.to(sized.qkv.device)
        sized.qkv[:, rows:] = torch.nan
        self.capture.update_plan(sized.plan, layout)
        sized.graph.replay()
        return sized.out[:, :rows].cpu()

    def eager_step(self, layout: RowLayout, qkv: Tensor) -> Tensor:
        size, device = (2, qkv.shape[1], self.shapes[0].num_heads * 64), self._backend.device
        out = torch.zeros(size, dtype=torch.bfloat16, device=device)
        plan = self._backend.plan(layout, BLOCK_SIZE)
        run_layers(self._backend, self, plan, qkv.to(device, copy=True), out)
        return out.cpu()


def run_layers(backend: Backend, layers: Layers, plan: AttentionPlan, qkv: Tensor, out: Tensor) -> None:
    for layer, shape in enumerate(layers.shapes):
        queries = backend.rope_append(qkv[layer], layers.angles, layers.cache, layer, shape, plan)
        backend.attend(queries, layers.cache, layer, shape, plan, out[layer])


class Reference:
    """The same on the torch backend in float32."""

    def __init__(self, layers: Layers) -> None:
        shape = layers.shapes[0]
        self.shapes = layers.shapes
        self.angles = None if layers.angles is None else layers.angles.cpu()
        self.cache = REFERENCE.allocate_kv(kv_shape(shape, NUM_SEQUENCES * BLOCKS_EACH, torch.float32))

    def step(self, layout: RowLayout, qkv: Tensor) -> Tensor:
        shape = self.shapes[0]
        out = torch.zeros(2, qkv.shape[1], shape.num_heads * shape.head_dim)
        plan, wide = REFERENCE.plan(layout, BLOCK_SIZE), qkv.float()
        for layer, each in enumerate(self.shapes):
            queries = REFERENCE.rope_append(wide[layer], self.angles, self.cache, layer, each, plan)
            REFERENCE.attend(queries, self.cache, layer, each, plan, out[layer])
        return out


def made(seed: int, layout: RowLayout, shape: AttentionShape) -> Tensor:
    """[2, R, …] projections of a step."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, len(layout.positions), qkv_width(shape), generator=generator).bfloat16()


@settings(max_examples=15, deadline=None)
@given(steps=histories(most_steps=8), shape=shapes(), rotates=st.booleans(), eager=st.sets(st.integers(0, 7)))
def test_replayed_steps_give_what_the_reference_gives(
    steps: Steps, shape: AttentionShape, rotates: bool, eager: set[int]
) -> None:
    """Sizes take turns as they come, with eager steps in between; refused tails are computed again."""
    accelerator = FakeAccelerator()
    layers = Layers(fake_backend(accelerator), shape, rotary_angles(64) if rotates else None)
    reference, table = Reference(layers), shuffled_table(NUM_SEQUENCES, BLOCKS_EACH)
    for number, spans in enumerate(steps):
        layout = layout_of(spans, table)
        qkv = made(number, layout, shape)
        step = layers.eager_step if number in eager else layers.step
        assert_close(step(layout, qkv).float(), reference.step(layout, qkv), rtol=NEAR, atol=NEAR)
    accelerator.wait()


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or find_spec("flashinfer") is None, reason="needs a GPU and flashinfer"
)
@pytest.mark.parametrize("group, num_kv_heads", [(1, 2), (4, 2)])
def test_a_gpu_gives_what_the_reference_gives(tmp_path: Path, group: int, num_kv_heads: int) -> None:
    """Reading, verifying with a refused tail and decoding, replayed and eager, with windows."""
    backend = make_backend("flashinfer", "cuda", num_threads=1, cache_dir=tmp_path)
    assert isinstance(backend, FlashInferBackend)
    layers = Layers(backend, attention_shape(group, num_kv_heads, 64), rotary_angles(64))
    reference, table = Reference(layers), shuffled_table(NUM_SEQUENCES, BLOCKS_EACH)
    lengths = [0] * NUM_SEQUENCES
    for number, rows in enumerate([(17, 20, 1), (1, 1), (3, 2, 1), (1, 1, 1), (4,), (1,)]):
        starts = [max(0, lengths[s] - number % 2) for s in range(len(rows))]
        spans = [Span(sequence=s, start=starts[s], rows=count) for s, count in enumerate(rows)]
        lengths[: len(rows)] = [start + count for start, count in zip(starts, rows, strict=True)]
        layout = layout_of(spans, table)
        qkv = made(number, layout, layers.shapes[0])
        wanted = reference.step(layout, qkv)
        for step in (layers.step, layers.eager_step):
            assert_close(step(layout, qkv).float(), wanted, rtol=NEAR, atol=NEAR)
    assert backend.graph_capture.graph_bytes > 0


def test_padding_leaves_the_cache_as_it_is() -> None:
    """Oracle: the cache of eager steps, bit for bit."""
    shape = attention_shape(4, 2, 64)
    layers, others = (Layers(fake_backend(), shape, rotary_angles(64)) for _ in range(2))
    table = shuffled_table(NUM_SEQUENCES, BLOCKS_EACH)
    for number, rows in enumerate([(1, 17, 3), (1, 1, 1), (1, 1), (2, 1)]):
        spans = [Span(sequence=s, start=20 * number, rows=count) for s, count in enumerate(rows)]
        layout = layout_of(spans, table)
        qkv = made(number, layout, shape)
        layers.step(layout, qkv)
        others.eager_step(layout, qkv)
        assert torch.equal(layers.cache.data, others.cache.data)


@pytest.mark.parametrize("batch_size", BATCH_SIZES)
def test_a_plan_that_was_never_updated_is_all_padding(batch_size: GraphBatchSize) -> None:
    layers = Layers(fake_backend(), attention_shape(4, 2, 64), None)
    assert not layers.cache.data.any(), "capturing has stored something"
    sized = next(each for each in layers.sizes if each.batch_size is batch_size)
    sized.graph.replay()
    assert not layers.cache.data.any()


def test_plans_that_are_updated_early_keep_their_layout() -> None:
    """Two plans are updated before either graph is replayed; each replay sees its own."""
    shape = attention_shape(1, 2, 64)
    layers = Layers(fake_backend(), shape, None)
    reference, table = Reference(layers), shuffled_table(NUM_SEQUENCES, BLOCKS_EACH)
    steps = [[Span(sequence=0, start=0, rows=3)], [Span(sequence=1, start=0, rows=17)]]
    layouts = [layout_of(spans, table) for spans in steps]
    wanted = [reference.step(layout, made(at, layout, shape)) for at, layout in enumerate(layouts)]
    chosen = layers.sizes[3:]
    for at, (sized, layout) in enumerate(zip(chosen, layouts, strict=True)):
        layers.capture.update_plan(sized.plan, layout)
        sized.qkv[:, : len(layout.positions)] = made(at, layout, shape)
    for at in (1, 0):
        chosen[at].graph.replay()
        found = chosen[at].out[:, : wanted[at].shape[1]]
        assert_close(found.float(), wanted[at], rtol=NEAR, atol=NEAR)


def test_updating_a_plan_waits_for_no_more_than_the_step_before_the_last() -> None:
    """The host waits for the copy of the previous plan, never for the running step."""
    accelerator = FakeAccelerator()
    layers = Layers(fake_backend(accelerator), attention_shape(4, 2, 64), None)
    sized, table = layers.sizes[1], shuffled_table(NUM_SEQUENCES, BLOCKS_EACH)
    for position in range(6):
        layout = layout_of([Span(sequence=s, start=position, rows=1) for s in range(2)], table)
        before = accelerator.given  # the last piece of work is the replay of the previous step
        layers.capture.update_plan(sized.plan, layout)
        assert accelerator.done < before
        sized.graph.replay()
    accelerator.wait()


def test_nothing_is_allocated_for_a_step() -> None:
    accelerator = FakeAccelerator()
    layers = Layers(fake_backend(accelerator), attention_shape(4, 2, 64), None)
    pinned, captured = accelerator.pinned_bytes, layers.capture.graph_bytes
    table = shuffled_table(NUM_SEQUENCES, BLOCKS_EACH)
    for position in range(4):
        layout = layout_of([Span(sequence=0, start=position, rows=1)], table)
        layers.step(layout, made(position, layout, layers.shapes[0]))
    assert (accelerator.pinned_bytes, layers.capture.graph_bytes) == (pinned, captured)


def test_a_layout_that_does_not_fit_its_plan_is_refused() -> None:
    capture = fake_backend().graph_capture
    table = shuffled_table(NUM_SEQUENCES, BLOCKS_EACH)
    plan = capture.plan(GraphBatchSize(rows=4, sequences=2, one_row_each=False), BLOCK_SIZE, 3)
    for spans, problem in (
        ([Span(sequence=0, start=0, rows=5)], "5 rows do not fit into 4"),
        ([Span(sequence=s, start=0, rows=1) for s in range(3)], "3 sequences do not fit into 2"),
        (
            [Span(sequence=s, start=40, rows=1) for s in range(2)],
            "6 blocks and 0 for padding; there is room for 5",
        ),
    ):
        with pytest.raises(AssertionError, match=problem):
            capture.update_plan(plan, layout_of(spans, table))


@pytest.mark.parametrize(
    "batch_size",
    [
        GraphBatchSize(rows=2, sequences=3, one_row_each=False),
        GraphBatchSize(rows=3, sequences=2, one_row_each=True),
        GraphBatchSize(rows=0, sequences=0, one_row_each=True),
    ],
)
def test_a_batch_size_that_contradicts_itself_is_refused(batch_size: GraphBatchSize) -> None:
    with pytest.raises(AssertionError, match="GraphBatchSize"):
        fake_backend().graph_capture.plan(batch_size, BLOCK_SIZE, 8)


def test_each_size_and_kind_has_a_wrapper_of_its_own_over_one_workspace() -> None:
    accelerator = FakeAccelerator()
    library = FakeFlashInfer(accelerator)
    backend = FlashInferBackend(accelerator, library, fake_kernels(accelerator))
    layers = Layers(backend, attention_shape(4, 2, 64), None)
    assert len(library.wrappers) == 2 * len(BATCH_SIZES)
    assert all(each.is_fixed for each in library.wrappers)
    assert len({each.workspace.data_ptr() for each in library.wrappers}) == 1
    layout = layout_of([Span(sequence=0, start=0, rows=3)], shuffled_table(NUM_SEQUENCES, BLOCKS_EACH))
    library.calls.clear()
    layers.step(layout, made(0, layout, layers.shapes[0]))
    plans = {name: count for name, count in library.calls.items() if name.endswith(".planner")}
    assert plans == {"BatchPrefillWithPagedKVCacheWrapper.planner": 2}


def test_a_workspace_grows_with_the_size_and_earlier_wrappers_keep_theirs() -> None:
    """The emulated planner says what it needs; 128 MiB are not enough for 600 rows of 8 KV heads."""
    accelerator = FakeAccelerator()
    library = FakeFlashInfer(accelerator)
    backend = FlashInferBackend(accelerator, library, fake_kernels(accelerator))
    shape = attention_shape(8, 8, 128)
    cache = backend.allocate_kv(kv_shape(shape, 4, torch.bfloat16))
    for rows in (4, 600):
        plan = backend.graph_capture.plan(
            GraphBatchSize(rows=rows, sequences=rows // 2, one_row_each=False), BLOCK_SIZE, rows
        )
        qkv = torch.zeros(rows, qkv_width(shape), dtype=torch.bfloat16)
        out = torch.zeros(rows, shape.num_heads * shape.head_dim, dtype=torch.bfloat16)

        def work(plan: AttentionPlan = plan, qkv: Tensor = qkv, out: Tensor = out) -> None:
            backend.attend(backend.rope_append(qkv, None, cache, 0, shape, plan), cache, 0, shape, plan, out)

        backend.graph_capture.capture(work)
    small, large = library.wrappers
    assert small.workspace.nbytes == 128 << 20
    assert large.workspace.nbytes > 128 << 20


def test_two_instances_capture_apart() -> None:
    accelerator = FakeAccelerator()
    library = FakeFlashInfer(accelerator)
    backend = FlashInferBackend(accelerator, library, fake_kernels(accelerator))
    lanes = [Layers(each, attention_shape(4, 2, 64), None) for each in (backend, backend.concurrent_instance())]
    assert lanes[0].capture is not lanes[1].capture
    ours, theirs = library.wrappers[: 2 * len(BATCH_SIZES)], library.wrappers[2 * len(BATCH_SIZES) :]
    assert ours[0].workspace.data_ptr() != theirs[0].workspace.data_ptr()
    table = shuffled_table(NUM_SEQUENCES, BLOCKS_EACH)
    for lane in lanes:
        reference = Reference(lane)
        layout = layout_of([Span(sequence=1, start=0, rows=7)], table)
        qkv = made(1, layout, lane.shapes[0])
        assert_close(lane.step(layout, qkv).float(), reference.step(layout, qkv), rtol=NEAR, atol=NEAR)


def lane_of(name: str, num_processors: int) -> DeviceLane:
    return DeviceLane(name=name, share=num_processors / 132, num_processors=num_processors, stream=f"of {name}")


def test_lanes_of_one_backend_capture_apart_and_each_has_one_graph_capture() -> None:
    backend = fake_backend()
    lanes = (lane_of("verify", 120), lane_of("verify", 96))
    captures = [backend.graph_capture, *(backend.graph_capture_on(each) for each in lanes)]
    assert captures[1] is backend.graph_capture_on(lane_of("verify", 120))
    recorders = [each._recorder for each in captures]
    assert [each.lane for each in recorders if isinstance(each, FakeGraphRecorder)] == [None, *lanes]
    assert len({id(each.pool) for each in recorders if isinstance(each, FakeGraphRecorder)}) == 3
    assert backend.concurrent_instance().graph_capture_on(lanes[0]) is not captures[1]


def test_lanes_of_one_backend_have_wrappers_of_their_own_over_one_workspace() -> None:
    backend, lane = fake_backend(), lane_of("draft", 12)
    kind = AttentionKind(attention_shape(4, 2, 64), torch.bfloat16, torch.bfloat16, one_row_each=False)
    layout = layout_of([Span(sequence=1, start=0, rows=7)], shuffled_table(NUM_SEQUENCES, BLOCKS_EACH))
    batch_size = GraphBatchSize(rows=9, sequences=3, one_row_each=False)
    eager: dict[DeviceLane | None, set[FakePrefill]] = {None: set(), lane: set()}
    workspaces = set()
    for here in (None, lane, None, lane):
        backend.use(here)
        assert backend.lane == here
        capture = backend.graph_capture if here is None else backend.graph_capture_on(here)
        recorded = capture.plan(batch_size, BLOCK_SIZE, 8).attention(kind)
        planned = backend.plan(layout, BLOCK_SIZE).attention(kind)
        for wrapper in (planned, recorded):
            assert isinstance(wrapper, FakePrefill)
            assert wrapper.left_out_blocks == (0 if here is None else 2 * (132 - 12))
            workspaces.add(wrapper.workspace.data_ptr())
        assert isinstance(planned, FakePrefill)
        eager[here].add(planned)
    assert [len(each) for each in eager.values()] == [1, 1]
    assert eager[None] != eager[lane]
    assert len(workspaces) == 1
    backend.use(None)
    assert backend.lane is None
