"""What encoders need of the native backend, against torch: LayerNorm, activations, attention that sees ahead.

Bugs these tests have been seen to catch: a row that sees only to itself; a window in one direction.
"""

import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close

from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.encoders import ONE_INPUT, TorchEncoderKernels
from faser.kernels.interface.kv_cache import KvShape
from faser.kernels.interface.shapes import AttentionShape, RowLayout
from faser.kernels.torch_backend import TorchBackend
from faser.types.activation import Activation

NEAR = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8}
REFERENCE = TorchBackend()
SIZES = [(1, 3), (7, 16), (33, 64), (5, 391)]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("rows, width", SIZES)
def test_layer_norm_is_torchs(
    native: NativeBackend, rows: int, width: int, dtype: torch.dtype, has_bias: bool
) -> None:
    x, weight = torch.randn(rows, width) * 3 + 5, torch.randn(width)
    bias = torch.randn(width) if has_bias else None
    wanted = functional.layer_norm(
        x.double(), (width,), weight.double(), None if bias is None else bias.double(), 1e-5
    )
    for kernels in (native.encoder_kernels, TorchEncoderKernels()):
        stream, out = x.clone(), torch.empty(rows, width, dtype=dtype)
        kernels.layer_norm(stream, weight, bias, 1e-5, wide=None, out=out)
        assert (stream == x).all()
        kernels.layer_norm(stream, weight, bias, 1e-5, wide=stream, out=out)
        assert_close(stream, wanted.float(), rtol=1e-5, atol=1e-5)
        assert (out == stream.to(dtype)).all()
        kernels.layer_norm(x, weight, bias, 1e-5, wide=stream, out=None)


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("activation", ONE_INPUT)
def test_activations_are_torchs(native: NativeBackend, activation: Activation, dtype: torch.dtype) -> None:
    x = torch.cat([torch.linspace(-12, 12, 3001), torch.tensor([0.0, -100, 100, 1e-20])])[None].to(dtype)
    wanted = ONE_INPUT[activation](x.double())
    native.encoder_kernels.activate(x, activation)
    assert_close(x.double(), wanted, rtol=NEAR[dtype], atol=NEAR[dtype] / 4)


@pytest.mark.parametrize("dtype", NEAR)
def test_a_gate_by_gelu_is_torchs(native: NativeBackend, dtype: torch.dtype) -> None:
    gate_up = torch.randn(9, 2 * 37).mul(3).to(dtype)
    found = native.gate(gate_up, torch.empty(9, 37, dtype=dtype), Activation.GELU)
    gate, up = gate_up.double().chunk(2, -1)
    assert_close(found.double(), functional.gelu(gate) * up, rtol=NEAR[dtype], atol=NEAR[dtype] / 4)


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("reach", [None, 1, 40])
@pytest.mark.parametrize("width", [16, 32])
def test_attention_sees_ahead_in_its_own_text(
    native: NativeBackend, width: int, reach: int | None, dtype: torch.dtype
) -> None:
    """Oracle: the softmax of each text written out. Texts have one row to several spans of keys."""
    counts, heads, block = torch.tensor([5, 1, 300, 16, 600]), 3, 16
    starts = functional.pad(counts.cumsum(0), (1, 0)).int()
    rows = int(starts[-1])
    positions = torch.cat([torch.arange(int(each)) for each in counts]).int()
    last = (counts - 1).repeat_interleave(counts).int()
    seen_to = last if reach is None else torch.minimum(positions + reach, last)
    blocks = -(-counts // block)
    order = torch.randperm(int(blocks.sum())).int()
    table = torch.zeros(len(counts), int(blocks.max()), dtype=torch.int32)
    for at, (count, own) in enumerate(zip(blocks, torch.split(order, blocks.tolist()), strict=True)):
        table[at, : int(count)] = own
    layout = RowLayout(
        query_start=starts, seq_len=counts.int(), positions=positions, block_table=table, seen_to=seen_to
    )
    window = None if reach is None else reach + 1
    shape = AttentionShape(num_heads=heads, num_kv_heads=heads, head_dim=width, scale=width**-0.5, window=window)
    qkv = torch.randn(rows, 3 * heads * width).to(dtype)
    wanted = torch.empty(rows, heads * width, dtype=torch.float64)
    for start, end in zip(starts.tolist(), starts.tolist()[1:], strict=False):
        q, k, v = qkv[start:end].double().view(end - start, 3, heads, width).permute(1, 2, 0, 3)
        places = torch.arange(end - start)
        near = (places[:, None] - places[None]).abs() <= (end if reach is None else reach)
        weights = (q @ k.mT * width**-0.5).masked_fill(~near, -torch.inf).softmax(-1)
        wanted[start:end] = (weights @ v).transpose(0, 1).reshape(end - start, -1)
    kv = KvShape(heads=((heads, width),), num_blocks=len(order), block_size=block, dtype=dtype)
    backends: tuple[Backend, ...] = (native, REFERENCE)
    for backend in backends:
        cache, plan = backend.allocate_kv(kv), backend.plan(layout, block)
        queries = backend.rope_append(qkv.clone(), None, cache, 0, shape, plan)
        found = backend.attend(queries, cache, 0, shape, plan, torch.empty(rows, heads * width, dtype=dtype))
        assert_close(found.double(), wanted, rtol=2 * NEAR[dtype], atol=2 * NEAR[dtype])
