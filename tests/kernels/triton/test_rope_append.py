"""Rotated queries and stored keys and values are those of the torch backend.

Bugs these tests have been seen to catch: turned the other way, values rotated, value heads off by some,
keys with the weight of queries, no slot stored.

Rotation alone is the same bits in float32. RMS norms sum in another order: within 2e-6 of float32, and of bfloat16
within 2**-5: three roundings stand in a row, and the interpreter cuts off where a GPU rounds.
"""

import pytest
import torch
from torch import Tensor

from faser.engine.models.rope import rotary_angles
from faser.engine.models.spec import RopeSpec
from faser.errors import EngineError
from faser.kernels.backend import AttentionShape, KvShape, RowLayout
from faser.kernels.torch_backend import TorchBackend
from faser.kernels.triton.rope_append import NO_SLOT, HeadNorm, rope_append
from tests.kernels.triton.rows import DEVICE

BLOCK_SIZE = 4
Outcome = tuple[Tensor, Tensor, Tensor]  # queries, keys, values

LAYOUT = RowLayout(
    query_start=torch.tensor([0, 2, 3], dtype=torch.int32),
    seq_len=torch.tensor([5, 9], dtype=torch.int32),
    positions=torch.tensor([3, 4, 8], dtype=torch.int32),
    block_table=torch.tensor([[5, 1, 0], [2, 6, 3]], dtype=torch.int32),
)


def shape_of(head_dim: int, num_kv_heads: int = 2) -> AttentionShape:
    return AttentionShape(num_heads=4, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=1.0)


def random_qkv(shape: AttentionShape, dtype: torch.dtype) -> Tensor:
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    return torch.randn(3, width, generator=torch.Generator().manual_seed(1)).to(dtype)


def by_backend(qkv: Tensor, shape: AttentionShape, angles: Tensor | None, norm: HeadNorm | None) -> Outcome:
    backend = TorchBackend("cpu")
    kv = KvShape(
        num_layers=1,
        num_blocks=7,
        block_size=BLOCK_SIZE,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=qkv.dtype,
    )
    cache = backend.allocate_kv(kv)
    weights = {} if norm is None else {"q_norm": norm.q_weight, "k_norm": norm.k_weight, "eps": norm.eps}
    plan = backend.plan(LAYOUT, BLOCK_SIZE)
    queries = backend.rope_append(qkv.clone(), angles, cache, 0, shape, plan, **weights)  # type: ignore[arg-type]
    return queries, cache.keys[0], cache.values[0]


def by_kernel(qkv: Tensor, shape: AttentionShape, angles: Tensor | None, norm: HeadNorm | None) -> Outcome:
    keys, values = (
        torch.zeros(7, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim, dtype=qkv.dtype, device=DEVICE)
        for _ in range(2)
    )
    queries = rope_append(
        qkv.clone().to(DEVICE),
        None if angles is None else angles.to(DEVICE),
        LAYOUT.positions.long().to(DEVICE),
        torch.tensor([5 * 4 + 3, 1 * 4, 3 * 4], device=DEVICE),
        keys,
        values,
        shape,
        norm and HeadNorm(q_weight=norm.q_weight.to(DEVICE), k_weight=norm.k_weight.to(DEVICE), eps=norm.eps),
    )
    return queries.cpu(), keys.cpu(), values.cpu()


def angles_of(head_dim: int) -> Tensor:
    return rotary_angles(RopeSpec(theta=10000.0, scaling=None), head_dim=head_dim, num_positions=16)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_rotated_heads_are_the_same_bits_whatever_the_group(head_dim: int, num_kv_heads: int) -> None:
    shape = shape_of(head_dim, num_kv_heads)
    case = (random_qkv(shape, torch.float32), shape, angles_of(head_dim), None)
    for found, wanted in zip(by_kernel(*case), by_backend(*case), strict=True):
        assert torch.equal(found, wanted)


def test_without_angles_nothing_is_rotated() -> None:
    shape = shape_of(64)
    case = (random_qkv(shape, torch.float32), shape, None, None)
    for found, wanted in zip(by_kernel(*case), by_backend(*case), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 2**-5)])
def test_heads_are_normalised_before_they_are_rotated(dtype: torch.dtype, tolerance: float) -> None:
    shape = shape_of(64)
    generator = torch.Generator().manual_seed(2)
    weights = [(1 + torch.randn(64, generator=generator) / 4).to(dtype) for _ in range(2)]
    norm = HeadNorm(q_weight=weights[0], k_weight=weights[1], eps=1e-5)
    case = (random_qkv(shape, dtype), shape, angles_of(64), norm)
    for found, wanted in zip(by_kernel(*case), by_backend(*case), strict=True):
        torch.testing.assert_close(found.float(), wanted.float(), rtol=tolerance, atol=tolerance)


def test_a_row_without_a_slot_stores_nothing() -> None:
    shape = shape_of(64)
    keys, values = (torch.zeros(1, BLOCK_SIZE, 2, 64, device=DEVICE) for _ in range(2))
    slots = torch.full((3,), NO_SLOT, device=DEVICE)
    qkv = random_qkv(shape, torch.float32).to(DEVICE)
    rope_append(qkv, None, LAYOUT.positions.long().to(DEVICE), slots, keys, values, shape)
    assert not keys.any()
    assert not values.any()


def test_a_head_size_without_a_kernel_is_refused() -> None:
    shape = shape_of(80)
    keys = torch.zeros(1, BLOCK_SIZE, 2, 80, device=DEVICE)
    slots = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    with pytest.raises(EngineError, match=r"head_dim is 80; rope_append has kernels for \(64, 128\)"):
        rope_append(random_qkv(shape, torch.float32).to(DEVICE), None, slots, slots, keys, keys.clone(), shape)
