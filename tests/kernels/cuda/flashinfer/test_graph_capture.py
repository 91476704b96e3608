"""Plans of captured steps: made again where they would change, and only there.

Bugs these tests have been seen to catch: a plan that is kept when a sequence gets another piece, or when rows move
from one sequence to another.
"""

import numpy as np
import pytest
import torch

from faser.engine.execution.runner.graph_sizes import GraphSizes
from faser.kernels.cuda.flashinfer.graph_capture import FlashInferGraphCapture, PlanExtent
from faser.kernels.cuda.flashinfer.paged_attention import AttentionKind, AttentionWorkspace, AttentionWrappers
from faser.kernels.interface.graph_capture import GraphBatchSize
from tests.kernels.cuda.fake_device import FakeAccelerator
from tests.kernels.cuda.fake_graph import fake_kernels
from tests.kernels.cuda.flashinfer.fake_flashinfer import FakeFlashInfer
from tests.kernels.layouts import Span, attention_shape, layout_of, shuffled_table

PAGE_SIZE, MAX_BLOCKS, SEQUENCES = 16, 40, 3
PREFILL, DECODE = "BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"


class Captured:
    """A captured step of three sequences with attention of one kind."""

    def __init__(self, *, rows: int, processors: int = 132) -> None:
        accelerator = FakeAccelerator()
        self.library = FakeFlashInfer(accelerator)
        one_row_each = rows == SEQUENCES
        wrappers = AttentionWrappers(accelerator, self.library, AttentionWorkspace(accelerator), processors)
        self.capture = FlashInferGraphCapture(accelerator, wrappers, fake_kernels(accelerator))
        size = GraphBatchSize(rows=rows, sequences=SEQUENCES, one_row_each=one_row_each)
        self.plan = self.capture.plan(size, PAGE_SIZE, SEQUENCES * MAX_BLOCKS)
        self.plan.attention(AttentionKind(attention_shape(4, 2, 64), torch.bfloat16, torch.bfloat16, one_row_each))
        self.table = shuffled_table(SEQUENCES, MAX_BLOCKS)
        self.accelerator = accelerator
        self.name = DECODE if one_row_each else PREFILL

    def update(self, lengths: list[int], rows: list[int]) -> int:
        """How often the layout of these sequences is planned."""
        before = self.library.calls[f"{self.name}.planner"]
        spans = [Span(sequence=i, start=n - rows[i], rows=rows[i]) for i, n in enumerate(lengths)]
        self.capture.update_plan(self.plan, layout_of(spans, self.table))
        self.accelerator.wait()
        return self.library.calls[f"{self.name}.planner"] - before


def test_room_that_was_reserved_for_the_largest_step_is_the_room_of_all() -> None:
    """Qwen3-8B. FlashInfer's usual 128 MiB are too small for 512 rows with tiles of 16 rows of a sequence."""
    accelerator, shape = FakeAccelerator(), attention_shape(32, 8, 128)
    library, workspace = FakeFlashInfer(accelerator), AttentionWorkspace(accelerator)
    wrappers = AttentionWrappers(accelerator, library, workspace, 132)
    capture = FlashInferGraphCapture(accelerator, wrappers, fake_kernels(accelerator))
    sizes = GraphSizes.default(
        max_rows=8192,
        max_sequences=256,
        max_drafts=7,
        max_blocks_each=MAX_BLOCKS,
        tile_rows=capture.tile_rows(shape),
    ).batch_sizes
    capture.reserve(shape, sizes)
    reserved = workspace.of(0).data_ptr(), workspace.nbytes
    assert workspace.nbytes > 128 << 20
    wrappers.eager(AttentionKind(shape, torch.bfloat16, torch.bfloat16, one_row_each=False))
    for size in sizes[-3:]:
        plan = capture.plan(size, PAGE_SIZE, size.sequences * MAX_BLOCKS)
        plan.attention(AttentionKind(shape, torch.bfloat16, torch.bfloat16, size.one_row_each))
    assert (workspace.of(0).data_ptr(), workspace.nbytes) == reserved


def test_a_longer_layout_is_planned_again_when_a_sequence_gets_another_piece() -> None:
    step = Captured(rows=SEQUENCES)
    assert step.update([300, 100, 20], [1, 1, 1]) == 1
    (wrapper,) = step.library.wrappers
    assert wrapper.planned is not None
    assert wrapper.planned.chunk_tokens == 16
    assert [step.update([300 + n, 100 + n, 20 + n], [1, 1, 1]) for n in range(1, 6)] == [0, 0, 0, 0, 1]
    assert step.library.calls[f"{DECODE}.plan"] == 1


def test_a_plan_serves_shorter_sequences_where_each_has_one_row_and_its_kernel_takes_empty_pieces() -> None:
    """Several rows of a sequence are laid out by the pieces that the kernel counts, not by those planned."""
    shape, alone = attention_shape(1, 4, 64), Captured(rows=SEQUENCES)
    assert alone.plan.serves_shorter
    assert not Captured(rows=SEQUENCES + 2).plan.serves_shorter
    alone.plan._is_blank = True  # another layer of the captured ones
    alone.plan.attention(AttentionKind(shape, torch.bfloat16, torch.bfloat16, one_row_each=True))
    assert not alone.plan.serves_shorter


def test_rows_that_move_to_another_sequence_are_planned_again() -> None:
    step = Captured(rows=9)
    assert step.update([300, 100, 20], [1, 5, 2]) == 1
    assert step.update([301, 101, 21], [1, 5, 2]) == 0
    assert step.update([301, 101, 21], [5, 1, 2]) == 1


def test_sequences_that_are_never_cut_need_no_other_plan() -> None:
    lengths = np.array([1, 5000], dtype=np.int32)
    assert PlanExtent(None, 1 << 30).num_pieces(lengths) == PlanExtent(None, 1 << 30).num_pieces(3 * lengths)


@pytest.mark.parametrize("length, pieces", [(1, 1), (64, 1), (65, 2), (128, 2), (129, 3), (160, 3), (5000, 3)])
def test_a_window_bounds_the_pieces_of_a_sequence(length: int, pieces: int) -> None:
    found = PlanExtent(64, 160).num_pieces(np.array([length], dtype=np.int32))
    assert np.frombuffer(found, dtype=np.int32).tolist() == [pieces - 1]
