"""Wrappers of a lane: planned for its processors, over the one workspace of their backend.

Bugs these tests have been seen to catch: a lane's pieces by all processors; wrappers of a lane that plan for all
of them; the kernel without tensor cores asked to plan for a lane; many sequences of which none is ever cut.
"""

import pytest
import torch

from faser.kernels.cuda.flashinfer.graph_capture import FlashInferGraphCapture
from faser.kernels.cuda.flashinfer.paged_attention import AttentionKind, AttentionWorkspace, AttentionWrappers
from faser.kernels.interface.graph_capture import GraphBatchSize
from faser.kernels.interface.shapes import AttentionShape
from tests.kernels.cuda.fake_device import FakeAccelerator
from tests.kernels.cuda.fake_graph import fake_kernels
from tests.kernels.cuda.flashinfer.fake_flashinfer import FakeFlashInfer
from tests.kernels.layouts import Span, attention_shape, layout_of, shuffled_table

ALL = 132


def kind_of(shape: AttentionShape, *, one_row_each: bool = True) -> AttentionKind:
    return AttentionKind(shape, torch.bfloat16, torch.bfloat16, one_row_each)


def wrappers_for(*counts: int) -> tuple[FakeFlashInfer, list[AttentionWrappers]]:
    """Wrappers of one backend, for lanes of these numbers of processors."""
    accelerator = FakeAccelerator()
    library, workspace = FakeFlashInfer(accelerator), AttentionWorkspace(accelerator)
    return library, [AttentionWrappers(accelerator, library, workspace, each) for each in counts]


@pytest.mark.parametrize("num_processors, at_once", [(132, 33), (96, 24), (20, 5), (12, 3)])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_a_captured_steps_longest_sequences_are_cut_however_many_sequences_there_are(
    num_processors: int, at_once: int, group: int
) -> None:
    """Two blocks a processor and eight KV heads. The kernel without tensor cores has a planner of its own."""
    for sequences in (1, at_once // 2, at_once, 2 * at_once):
        library, (wrappers,) = wrappers_for(num_processors)
        table = shuffled_table(sequences, 40)
        plan = FlashInferGraphCapture(library.accelerator, wrappers, fake_kernels(library.accelerator)).plan(
            GraphBatchSize(rows=sequences, sequences=sequences, one_row_each=True), 16, 40 * sequences
        )
        plan.attention(kind_of(attention_shape(group, 8, 64)))
        plan.update(layout_of([Span(sequence=s, start=639 if s else 15, rows=1) for s in range(sequences)], table))
        (wrapper,) = library.wrappers
        assert wrapper.most_pieces == (33 if group == 1 else max(at_once, sequences + at_once // 2))


def test_the_kernel_without_tensor_cores_is_planned_for_all_processors_on_a_lane_too() -> None:
    library, (whole, lane) = wrappers_for(ALL, 20)
    for group, left_out in ((1, [0, 0]), (2, [0, 2 * (ALL - 20)]), (4, [0, 2 * (ALL - 20)])):
        kind = kind_of(attention_shape(group, 2, 64))
        for wrappers in (whole, lane):
            wrappers.eager(kind)
        assert [each.left_out_blocks for each in library.wrappers[-2:]] == left_out


def test_places_of_a_backend_share_a_workspace_and_another_backend_has_its_own() -> None:
    first, first_wrappers = wrappers_for(ALL, 112, 20)
    second, second_wrappers = wrappers_for(ALL, 20)
    kind = kind_of(attention_shape(4, 2, 64), one_row_each=False)
    for wrappers in (*first_wrappers, *second_wrappers):
        wrappers.eager(kind)
    ours, theirs = ({each.workspace.data_ptr() for each in library.wrappers} for library in (first, second))
    assert len(ours) == len(theirs) == 1
    assert ours != theirs
