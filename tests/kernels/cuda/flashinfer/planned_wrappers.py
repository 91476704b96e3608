"""A program: FlashInfer's own wrappers, planned for lanes of several sizes, without a GPU. Writes their plans.

    python -m tests.kernels.cuda.flashinfer.planned_wrappers MODULES FOLDER 132 20 …

MODULES: where compiled modules are. The runtime is the stand-in of planner, compiled into FOLDER. Without a
GPU there is no pinned memory, so requests for it are dropped.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from faser.kernels.cuda.flashinfer.graph_capture import FlashInferGraphCapture
from faser.kernels.cuda.flashinfer.library import load_flashinfer, planner_of
from faser.kernels.cuda.flashinfer.paged_attention import (
    AttentionKind,
    AttentionWorkspace,
    AttentionWrappers,
    plan_attention,
)
from faser.kernels.cuda.flashinfer.paged_layout import paged_layout
from faser.kernels.interface.graph_capture import GraphBatchSize
from faser.kernels.interface.shapes import AttentionShape
from tests.kernels.cuda.fake_device import FakeAccelerator
from tests.kernels.cuda.fake_graph import fake_kernels
from tests.kernels.cuda.flashinfer.planner import HEAD_DIM, PAGE_SIZE, stand_in
from tests.kernels.layouts import Span, attention_shape, layout_of, shuffled_table

ROWS = (2, 1)  # of every sequence: verified, and decoded with tensor cores
NUM_SEQUENCES, BLOCKS_EACH = 4, 256
NUM_CAPTURED, SHORT_BLOCKS = 64, 64  # sequences of a captured step; of all but the first one, the blocks
GROUP, NUM_KV_HEADS = 4, 8


class _Unpinned(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


def planned(modules: Path, num_processors: list[int]) -> list[list[list[int]]]:
    """For each number of processors: the plan's arguments of a launch, eager for each of ROWS, and captured."""
    accelerator = FakeAccelerator()
    library, workspace = load_flashinfer(modules), AttentionWorkspace(accelerator)
    shape, table = attention_shape(GROUP, NUM_KV_HEADS, HEAD_DIM), shuffled_table(NUM_SEQUENCES, BLOCKS_EACH)
    lanes = [AttentionWrappers(accelerator, library, workspace, each) for each in num_processors]
    found: list[list[list[int]]] = []
    for wrappers in lanes:
        found.append([])
        for rows in ROWS:
            start = BLOCKS_EACH * PAGE_SIZE - rows
            layout = layout_of([Span(sequence=s, start=start, rows=rows) for s in range(NUM_SEQUENCES)], table)
            host = paged_layout(layout, PAGE_SIZE, accelerator.host_numbers)
            kind = AttentionKind(shape, torch.bfloat16, torch.bfloat16, one_row_each=rows == 1)
            wrapper: Any = wrappers.eager(kind)
            plan_attention(wrapper, kind, host, PAGE_SIZE, host.page_indices)
            found[-1].append([int(each) for each in wrapper._plan_info])
        found[-1].append(captured(accelerator, wrappers, shape))
    return found


def captured(accelerator: FakeAccelerator, wrappers: AttentionWrappers, shape: AttentionShape) -> list[int]:
    """Of a step where each sequence has a row."""
    size = GraphBatchSize(rows=NUM_CAPTURED, sequences=NUM_CAPTURED, one_row_each=True)
    plan = FlashInferGraphCapture(accelerator, wrappers, fake_kernels(accelerator)).plan(
        size, PAGE_SIZE, NUM_CAPTURED * BLOCKS_EACH
    )
    wrapper: Any = plan.attention(AttentionKind(shape, torch.bfloat16, torch.bfloat16, one_row_each=True))
    blocks = [SHORT_BLOCKS if s else BLOCKS_EACH for s in range(NUM_CAPTURED)]
    spans = [Span(sequence=s, start=PAGE_SIZE * count - 1, rows=1) for s, count in enumerate(blocks)]
    plan.update(layout_of(spans, shuffled_table(NUM_CAPTURED, BLOCKS_EACH)))
    return [int(each) for each in planner_of(wrapper).found]


if __name__ == "__main__":
    runtime = stand_in(Path(sys.argv[2]))
    with _Unpinned():
        sys.stdout.write(json.dumps(planned(Path(sys.argv[1]), [int(each) for each in sys.argv[3:]])))
