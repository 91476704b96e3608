"""Graphs of steps with adapters, on the emulated device of test_graph_runner: which adapter a row has is read from
the device at each replay.

Oracle: the eager runner, which takes the adapters of rows from the host.

Planted bugs that this test has caught: the graph of steps without adapters replayed for one with; slots of the
step before; slots that were baked into the graph.
"""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from faser.engine.execution.models.adapted import AdapterSizes
from faser.engine.execution.runner.batch import BlockTable
from faser.engine.execution.runner.graph_sizes import GraphSizes
from faser.kernels.cuda.flashinfer.backend import FlashInferBackend
from faser.kernels.interface.adapters import LowRank, check_rank, row_adapters
from faser.kernels.interface.shapes import RowLayout
from tests.engine.execution.models.test_adapted import put, some_lora
from tests.engine.execution.runner.test_graph_runner import (
    NEAR,
    NUM_BLOCKS,
    SLOTS,
    WIDTH,
    Side,
    rows_of,
    write_heads_of_64,
)
from tests.kernels.cuda.fake_device import FakeAccelerator
from tests.kernels.cuda.fake_graph import fake_kernels
from tests.kernels.cuda.flashinfer.fake_flashinfer import FakeFlashInfer

SIZES = GraphSizes(rows=(2, 4), max_sequences=4, max_blocks_each=WIDTH)
ROOM = AdapterSizes(slots=3, max_rank=8)
Room = tuple[tuple[int, ...], int, Tensor]


class GatheredAdapters:
    """Adapters in tensor operations that read the slots of rows where the graph reads them, on the device.

    Room: columns of the parts, the largest rank, and [slots + 1, N, K]: what each slot adds; the last one nothing.
    """

    def __init__(self, accelerator: FakeAccelerator) -> None:
        self._accelerator = accelerator

    def room(self, parts: tuple[int, ...], depth: int, _dtype: torch.dtype, *, slots: int, max_rank: int) -> Room:
        return parts, max_rank, torch.zeros(slots + 1, sum(parts), depth)

    def pack(self, room: Room, parts: tuple[LowRank | None, ...]) -> tuple[LowRank | None, ...]:
        check_rank(parts, room[1])
        return parts

    def set(self, room: Room, slot: int, packed: tuple[LowRank | None, ...] | None) -> None:
        widths, _, added = room
        columns = [
            added.new_zeros(width, added.shape[2]) if part is None else part.up.float() @ part.down.float()
            for width, part in zip(widths, packed or (None,) * len(widths), strict=True)
        ]
        added[slot].copy_(torch.cat(columns))

    def rows(self, layout: RowLayout) -> Tensor | None:
        return None if layout.adapters is None else torch.from_numpy(row_adapters(layout))

    def rows_at(self, slots: Tensor) -> Tensor:
        return slots

    def add(self, x: Tensor, room: Room, out: Tensor, rows: Tensor) -> None:
        def kernel() -> None:
            assert int(rows.max()) < len(room[2]) - 1
            out.add_(torch.einsum("rnk,rk->rn", room[2][rows], x.float()))  # below 0: the last one

        self._accelerator.launch(kernel)


def adapting_side(checkpoint: Path, accelerator: FakeAccelerator) -> Side:
    """A model with two adapters, in slots 0 and 2."""
    kernels = replace(fake_kernels(accelerator), adapters=lambda _: GatheredAdapters(accelerator))
    side = Side(
        checkpoint,
        FlashInferBackend(accelerator, FakeFlashInfer(accelerator), kernels),
        adapters=ROOM,
    )
    for slot, only in ((0, ""), (2, "mlp")):
        put(side.decoder, side.backend, slot, some_lora(side.decoder, slot + 1, only=only))
    return side


def test_steps_with_and_without_adapters_replay_what_eager_ones_compute(tmp_path: Path) -> None:
    """Rows change their adapters from step to step, some have none, and in some steps none has one."""
    write_heads_of_64(tmp_path)
    accelerator = FakeAccelerator()
    eager = adapting_side(tmp_path, FakeAccelerator()).eager()
    replayed = adapting_side(tmp_path, accelerator).graph_runner(SIZES)
    table, rng, replays = BlockTable(SLOTS, WIDTH), random.Random(2), [0]
    blocks = rng.sample(range(NUM_BLOCKS), SLOTS * WIDTH)
    for slot in range(SLOTS):
        table.append(slot, tuple(blocks[slot * WIDTH : (slot + 1) * WIDTH]))
    accelerator.on_replay = lambda _: replays.append(replays.pop() + 1)
    found_by: dict[tuple[int, ...], Tensor] = {}
    for number, adapters in enumerate(((-1, -1), (0, -1), (-1, -1), (2, 0), (2, 2), (-1, 0), (-1, -1))):
        for slot, adapter in enumerate(adapters):
            table.set_adapter(slot, adapter)
        batch = rows_of(table, [1, 0], [0, 0], [2, 1], seed=9)
        assert replayed.rows_replayed(batch) == 4, "a row of padding"
        before = replays[0]
        for runner in (eager, replayed):
            runner.forward(batch)
        assert replays[0] == before + 1
        rows = np.arange(3)
        ours, theirs = replayed.logits(rows).clone(), eager.logits(rows).clone()
        torch.testing.assert_close(ours, theirs, rtol=NEAR, atol=NEAR)
        if adapters in found_by:
            assert torch.equal(ours, found_by[adapters]), number
        found_by[adapters] = ours
    plain = found_by[-1, -1]
    assert (found_by[0, -1][:2] - plain[:2]).abs().max() < NEAR, "the sequence of slot 1 comes first"
    assert (found_by[0, -1][2] - plain[2]).abs().max() > 4 * NEAR
    assert (found_by[2, 2] - found_by[2, 0])[:2].abs().max() > 4 * NEAR
