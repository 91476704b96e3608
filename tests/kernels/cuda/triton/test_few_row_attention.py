"""Attention of few rows in one launch is that of the torch backend, and so are the keys and values it stores.

Bugs these tests have been seen to catch: keys stored one position off, or in the wrong slot; the last piece left
out of the joining; a counter that is not reset between launches; queries of the next KV head; a row that sees a
key behind it; a window one wider; keys with the queries' weight; values rotated; granules that begin with a row.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from faser.errors import EngineError
from faser.kernels.cuda.flashinfer.backend import FlashInferBackend
from faser.kernels.cuda.triton.few_row_attention import FewRowWorkspace, few_row_attention, num_pieces
from faser.kernels.interface.shapes import AttentionShape
from faser.kernels.torch_backend import TorchBackend
from tests.kernels.cuda.triton.layers import backend_of
from tests.kernels.cuda.triton.rows import DEVICE
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

SEQUENCES, BLOCKS = 3, 14  # of each
REFERENCE = TorchBackend()
NORMS = ("q_norm", "k_norm", "v_norm")


def span(sequence: int, start: int, rows: int) -> Span:
    return Span(sequence=sequence, start=start, rows=rows)


class Case:
    """A cache of seeded numbers and weights of head norms, for the kernel and for the reference."""

    def __init__(
        self,
        shape: AttentionShape,
        dtype: torch.dtype,
        *,
        norms: int = 0,
        has_sinks: bool = False,
        pieces: int = 8,
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self.table = shuffled_table(SEQUENCES, BLOCKS)
        self.backend: FlashInferBackend = backend_of(None)
        size = kv_shape(shape, SEQUENCES * BLOCKS, dtype, num_layers=1)
        self.cache = self.backend.allocate_kv(size)
        self.wide = REFERENCE.allocate_kv(replace(size, dtype=torch.float32))
        generator = torch.Generator().manual_seed(7)
        self._generator = generator
        for ours, theirs in zip(self.cache.layers[0], (self.wide.keys[0], self.wide.values[0]), strict=True):
            ours.copy_(torch.randn(ours.shape, generator=generator))
            theirs.copy_(ours)
        self.norms = {
            name: (1 + torch.randn(shape.head_dim, generator=generator) / 4).to(dtype) for name in NORMS[:norms]
        }
        self.sinks = torch.randn(shape.num_heads, generator=generator) * 3 if has_sinks else None
        self.angles = rotary_angles(shape.head_dim)
        self.workspace = FewRowWorkspace(shape, torch.device(DEVICE), pieces)

    def rows(self, spans: list[Span]) -> Tensor:
        width = qkv_width(self.shape)
        return torch.randn(sum(each.rows for each in spans), width, generator=self._generator).to(self.dtype)

    def run(self, spans: list[Span], qkv: Tensor) -> Tensor:
        plan = self.backend.plan(layout_of(spans, self.table), BLOCK_SIZE)
        out = torch.zeros(len(qkv), self.shape.q_size, dtype=self.dtype, device=DEVICE)
        device = {name: each.to(DEVICE) for name, each in self.norms.items()}
        keys, values = self.cache.layers[0]
        before = qkv.clone()
        few_row_attention(
            qkv.to(DEVICE), self.angles.to(DEVICE), plan.device, max(each.rows for each in spans), keys, values,
            self.shape, self.workspace, out, **device, eps=1e-4,
            sinks=None if self.sinks is None else self.sinks.to(DEVICE),
        )  # fmt: skip
        assert torch.equal(qkv, before)
        return out.cpu()

    def wanted(self, spans: list[Span], qkv: Tensor) -> Tensor:
        plan = REFERENCE.plan(layout_of(spans, self.table), BLOCK_SIZE)
        wide = {name: each.float() for name, each in self.norms.items()}
        queries = REFERENCE.rope_append(qkv.float(), self.angles, self.wide, 0, self.shape, plan, **wide, eps=1e-4)
        out = torch.empty(len(qkv), self.shape.q_size)
        return REFERENCE.attend(queries, self.wide, 0, self.shape, plan, out, sinks=self.sinks)

    def check(self, spans: list[Span]) -> None:
        """A step of the kernel and of the reference, and what both stored."""
        qkv = self.rows(spans)
        near = 2.0**-5 if self.dtype is torch.bfloat16 else 2.0**-8
        assert_close(self.run(spans, qkv).float(), self.wanted(spans, qkv), rtol=near, atol=near)
        for ours, theirs in zip(self.cache.layers[0], (self.wide.keys[0], self.wide.values[0]), strict=True):
            assert_close(ours.float().cpu(), theirs, rtol=near, atol=near)
        assert not self.workspace.arrived.any()


STEPS = [
    [span(0, 150, 1), span(1, 63, 1), span(2, 0, 1)],
    [span(2, 60, 5), span(0, 151, 2)],  # across the end of a granule
    [span(1, 0, 4)],
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(4, 2), (1, 2), (6, 1)])
@pytest.mark.full(but=("heads0-dtype1", "heads1-dtype0", "heads2-dtype0"))
def test_steps_give_what_the_reference_gives(heads: tuple[int, int], dtype: torch.dtype) -> None:
    case = Case(attention_shape(*heads, 64), dtype)
    for spans in STEPS:
        case.check(spans)


@pytest.mark.parametrize("norms, head_dim", [(2, 128), (3, 64), (1, 64), (0, 256)])
@pytest.mark.full(but=("3-64", "2-128"))
def test_heads_are_normalised_before_they_are_rotated(norms: int, head_dim: int) -> None:
    case = Case(attention_shape(2, 2, head_dim), torch.float16, norms=norms)
    for spans in STEPS[:2]:
        case.check(spans)


@pytest.mark.parametrize(
    "window, cap, has_sinks", [(5, None, False), (70, 4.0, True), (None, 4.0, False), (1, None, True)]
)
def test_windows_caps_and_sinks(window: int | None, cap: float | None, has_sinks: bool) -> None:
    shape = replace(attention_shape(2, 2, 64, window), score_cap=cap)
    case = Case(shape, torch.float16, has_sinks=has_sinks)
    for spans in STEPS:
        case.check(spans)


def test_more_granules_than_pieces_are_read_in_turns() -> None:
    """Three and a half granules of a sequence are for two programs."""
    case = Case(attention_shape(2, 1, 64), torch.float16, pieces=2)
    for spans in ([span(0, 223, 1)], [span(1, 126, 4)], [span(2, 191, 2), span(0, 64, 1)]):
        case.check(spans)


def test_a_sequence_is_cut_for_as_many_programs_as_a_gpu_has_processors() -> None:
    assert [num_pieces(each) for each in (1, 2, 4, 8, 16, 32, 64, 128, 256)] == [32, 32, 32, 16, 8, 4, 2, 1, 1]


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    """Whatever other sequences there are, and where rows of its own sequence follow, as in a verified draft."""
    case = Case(attention_shape(2, 2, 64), torch.bfloat16, norms=2)
    spans = [span(0, 125, 5), span(1, 30, 1), span(2, 191, 2)]
    qkv = case.rows(spans)
    together = case.run(spans, qkv)
    row = 0
    for each in spans:
        for number in range(each.rows):
            alone = [span(each.sequence, each.start + number, 1)]
            assert torch.equal(case.run(alone, qkv[row : row + 1])[0], together[row]), (each, number)
            row += 1


def test_a_row_without_a_slot_stores_nothing_and_disturbs_nobody() -> None:
    case = Case(attention_shape(2, 2, 64), torch.float16)
    spans = [span(0, 20, 1), span(1, 33, 1)]
    qkv = case.rows(spans)
    before = [each.clone() for each in case.cache.layers[0]]
    plan = case.backend.plan(layout_of(spans, case.table), BLOCK_SIZE)
    plan.device.slots.fill_(-1)
    out = torch.zeros(2, case.shape.q_size, dtype=torch.float16, device=DEVICE)
    few_row_attention(qkv.to(DEVICE), None, plan.device, 1, *case.cache.layers[0], case.shape, case.workspace, out)
    for ours, theirs in zip(case.cache.layers[0], before, strict=True):
        assert torch.equal(ours, theirs)
    assert out.isfinite().all()


def test_what_does_not_fit_is_refused_by_name() -> None:
    case = Case(attention_shape(2, 2, 64), torch.float16)
    spans = [span(0, 20, 1)]
    with pytest.raises(EngineError, match="qkv has shape"):
        case.run(spans, case.rows(spans)[:, 64:])
    case.shape = replace(case.shape, head_dim=32)
    with pytest.raises(EngineError, match="head_dim is 32"):
        case.run(spans, case.rows(spans))
