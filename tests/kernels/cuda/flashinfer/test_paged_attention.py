"""Wrappers of a lane: planned for its processors, over the one workspace of their backend.

Bugs these tests have been seen to catch: a lane's splits by all processors; wrappers of a lane that plan for all
of them; the kernel without tensor cores asked to plan for a lane.
"""

import pytest
import torch

from faser.kernels.cuda.flashinfer.paged_attention import AttentionKind, AttentionWorkspace, AttentionWrappers
from faser.kernels.interface.shapes import AttentionShape
from tests.kernels.cuda.fake_device import FakeAccelerator
from tests.kernels.cuda.flashinfer.fake_flashinfer import FakeFlashInfer
from tests.kernels.layouts import attention_shape

ALL = 132


def kind_of(shape: AttentionShape, *, one_row_each: bool = True) -> AttentionKind:
    return AttentionKind(shape, torch.bfloat16, torch.bfloat16, one_row_each)


def wrappers_for(*counts: int) -> tuple[FakeFlashInfer, list[AttentionWrappers]]:
    """Wrappers of one backend, for lanes of these numbers of processors."""
    accelerator = FakeAccelerator()
    library, workspace = FakeFlashInfer(accelerator), AttentionWorkspace(accelerator)
    return library, [AttentionWrappers(accelerator, library, workspace, each) for each in counts]


@pytest.mark.parametrize("num_processors, most", [(132, 132), (96, 96), (20, 20), (12, 12)])
def test_a_lanes_sequences_are_split_unless_each_has_one_of_its_processors_anyway(
    num_processors: int, most: int
) -> None:
    """Two blocks a processor and two KV heads."""
    _, (wrappers,) = wrappers_for(num_processors)
    kind = kind_of(attention_shape(4, 2, 64))
    assert wrappers.splits(kind, most)
    assert not wrappers.splits(kind, most + 1)
    assert wrappers.splits(kind_of(attention_shape(4, 2, 64), one_row_each=False), 10 * most)


def test_the_kernel_without_tensor_cores_is_planned_for_all_processors_on_a_lane_too() -> None:
    library, (whole, lane) = wrappers_for(ALL, 20)
    for group, planned_for in ((1, [ALL, ALL]), (4, [ALL, 20])):
        kind = kind_of(attention_shape(group, 2, 64))
        for wrappers in (whole, lane):
            wrappers.eager(kind)
        assert [each.library.num_processors for each in library.wrappers[-2:]] == planned_for


def test_places_of_a_backend_share_a_workspace_and_another_backend_has_its_own() -> None:
    first, first_wrappers = wrappers_for(ALL, 112, 20)
    second, second_wrappers = wrappers_for(ALL, 20)
    kind = kind_of(attention_shape(4, 2, 64), one_row_each=False)
    for wrappers in (*first_wrappers, *second_wrappers):
        wrappers.eager(kind)
    ours, theirs = ({each.workspace.data_ptr() for each in library.wrappers} for library in (first, second))
    assert len(ours) == len(theirs) == 1
    assert ours != theirs
