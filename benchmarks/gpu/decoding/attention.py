"""Phase `attention`: attention of a step by rows of a sequence and by the width of its tiles, as captured.

A tile has 16, 64 or 128 packed rows: rows of a sequence times query heads per KV head. One that is too narrow
reads all keys again for the next rows, one that is too wide computes scores of absent rows. The plan is the one of
a captured step with that tile, over keys and values that are in no cache. On a CPU an emulated FlashInfer
computes, so that the plans are made.
"""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu.decoding import environment
from benchmarks.gpu.decoding.few_row_mixtures import HostClock
from benchmarks.gpu.models import BLOCK_SIZE
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.record import Desk, Json
from benchmarks.gpu.steps import batch_of
from faser.config.environment import cache_dir
from faser.engine.checkpoints.families import decoder_spec
from faser.engine.execution.models.layers import attention_shape
from faser.kernels.cuda.choices import GraphClock, KernelClock
from faser.kernels.cuda.device import Accelerator, CudaDevice
from faser.kernels.cuda.flashinfer.build import ARCH, modules_dir
from faser.kernels.cuda.flashinfer.graph_capture import FixedPlan
from faser.kernels.cuda.flashinfer.library import FlashInfer, load_flashinfer
from faser.kernels.cuda.flashinfer.paged_attention import (
    AttentionKind,
    AttentionWorkspace,
    AttentionWrappers,
    PlanGrid,
    tile_rows,
)
from faser.kernels.interface.graph_capture import GraphBatchSize
from faser.kernels.interface.shapes import AttentionShape

_VALUE_BYTES = 2


def run(plan: Plan, desk: Desk) -> None:
    sizes = plan.sizes
    accelerator, library, clock = _device(plan)
    bytes_s = environment.bytes_s(desk.folder)
    for name, config in (("target", sizes.target), ("draft", sizes.draft)):
        shape = attention_shape(decoder_spec(config).attention)
        wrappers = AttentionWrappers(
            accelerator, library, AttentionWorkspace(accelerator), accelerator.num_processors
        )
        timed = Timed(wrappers, accelerator, clock, shape, sizes.context)
        for sequences in sizes.attention_batches:
            for rows_each in sizes.verify_rows:
                if desk.may_begin(f"{name}: {sequences} sequences, {rows_each} rows each"):
                    for row in timed.measured(sequences, rows_each, bytes_s):
                        desk.append("cells", {"model": name, **row})


def _device(plan: Plan) -> tuple[Accelerator, FlashInfer, KernelClock]:
    if plan.dry_run:
        from tests.kernels.cuda.fake_device import FakeAccelerator
        from tests.kernels.cuda.flashinfer.fake_flashinfer import FakeFlashInfer

        emulated = FakeAccelerator()
        return emulated, FakeFlashInfer(emulated), HostClock()
    device = torch.device("cuda", torch.cuda.current_device())
    library = load_flashinfer(modules_dir(cache_dir() / "kernels", ARCH))
    return CudaDevice(device), library, GraphClock(device)


class Timed:
    """Attention of one layer."""

    def __init__(
        self,
        wrappers: AttentionWrappers,
        accelerator: Accelerator,
        clock: KernelClock,
        shape: AttentionShape,
        context: int,
    ) -> None:
        self._wrappers, self._accelerator, self._clock = wrappers, accelerator, clock
        self._shape, self._context = shape, context

    def measured(self, sequences: int, rows_each: int, bytes_s: float) -> Iterator[Json]:
        """Each width of tiles that holds a row of a sequence; of one row each: the only one."""
        shape, device = self._shape, self._accelerator.device
        kind = AttentionKind(shape, torch.bfloat16, torch.bfloat16, one_row_each=rows_each == 1)
        pages = sequences * -(-self._context // BLOCK_SIZE)
        cache = torch.randn(2, pages, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim, device=device)
        keys, values = cache.to(torch.bfloat16).unbind()
        queries = torch.randn(sequences * rows_each, shape.num_heads, shape.head_dim, device=device)
        queries = queries.to(torch.bfloat16)
        layout = batch_of(
            sequences=sequences,
            rows_each=rows_each,
            context=self._context,
            num_blocks=pages,
            block_size=BLOCK_SIZE,
            vocab_size=1,
        ).layout
        known = set()
        for most in (None,) if rows_each == 1 else (*tile_rows(shape), None):
            size = GraphBatchSize(
                rows=sequences * rows_each, sequences=sequences, one_row_each=rows_each == 1, tile_rows=most
            )
            plan = FixedPlan(size, BLOCK_SIZE, pages, accelerator=self._accelerator, wrappers=self._wrappers)
            wrapper = plan.attention(kind)
            plan.update(layout)
            sizes = plan.device.sizes
            tile = PlanGrid.of(kind, sizes.rows, sizes.sequences, None).tile
            if tile in known:
                continue
            known.add(tile)
            work = partial(wrapper.run, q=queries, paged_kv_cache=(keys, values), out=torch.empty_like(queries))
            us = 1e6 * self._clock.seconds(work)
            floor_us = 1e6 * cache.numel() * _VALUE_BYTES / bytes_s
            yield {
                "sequences": sequences,
                "rows_each": rows_each,
                "tile": tile,
                "us": round(us, 2),
                "floor_us": round(floor_us, 2),
                "times_floor": round(us / floor_us, 3),
            }
