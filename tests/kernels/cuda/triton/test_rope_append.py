"""Rotated queries and stored keys and values are those of the torch backend.

Bugs these tests have been seen to catch: turned the other way, values rotated, value heads off by some,
keys with the weight of queries, no slot stored; of 8-bit floats: no
saturation, or only upwards, what is no number stored as 448, ties away from zero, one half of a head stored twice.

Rotation alone is the same bits in float32. RMS norms sum in another order: within 2e-6 of float32, and of bfloat16
within 2**-5: three roundings stand in a row, and the interpreter cuts off where a GPU rounds.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from faser.engine.checkpoints.families.architecture import RopeSpec
from faser.engine.execution.models.rope import rotary_angles
from faser.errors import EngineError
from faser.kernels.cuda.flashinfer.paged_layout import NO_SLOT
from faser.kernels.cuda.triton.layer_ops import rope_append
from faser.kernels.interface.fp8 import FP8
from faser.kernels.interface.kv_cache import KvShape, stored
from faser.kernels.interface.shapes import AttentionShape, RowLayout
from faser.kernels.torch_backend import TorchBackend
from tests.kernels.cuda.triton.rows import DEVICE

BLOCK_SIZE, EPS = 4, 1e-5
Outcome = tuple[Tensor, Tensor, Tensor]  # queries, keys, values

LAYOUT = RowLayout(
    query_start=torch.tensor([0, 2, 3], dtype=torch.int32),
    seq_len=torch.tensor([5, 9], dtype=torch.int32),
    positions=torch.tensor([3, 4, 8], dtype=torch.int32),
    block_table=torch.tensor([[5, 1, 0], [2, 6, 3]], dtype=torch.int32),
)


def shape_of(head_dim: int, num_kv_heads: int = 2) -> AttentionShape:
    return AttentionShape(num_heads=4, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=1.0)


def stored_heads(shape: AttentionShape) -> int:
    return 0 if shape.reads_other else shape.num_kv_heads


def random_qkv(shape: AttentionShape, dtype: torch.dtype) -> Tensor:
    return torch.randn(3, shape.qkv_size, generator=torch.Generator().manual_seed(1)).to(dtype)


def by_backend(
    qkv: Tensor,
    shape: AttentionShape,
    angles: Tensor | None,
    norms: tuple[Tensor, ...],
    kv_dtype: torch.dtype | None = None,
    query_angles: Tensor | None = None,
) -> Outcome:
    """norms: of queries, keys, values, as far as they go. kv_dtype: of the cache; None: that of qkv."""
    backend = TorchBackend("cpu")
    kv = KvShape(
        heads=((stored_heads(shape), shape.head_dim),),
        num_blocks=7,
        block_size=BLOCK_SIZE,
        dtype=kv_dtype or qkv.dtype,
    )
    cache = backend.allocate_kv(kv)
    q_norm, k_norm, v_norm = (*norms, None, None, None)[:3]
    plan = backend.plan(LAYOUT, BLOCK_SIZE)
    queries = backend.rope_append(
        qkv.clone(),
        angles,
        cache,
        0,
        shape,
        plan,
        query_angles=query_angles,
        q_norm=q_norm,
        k_norm=k_norm,
        v_norm=v_norm,
        eps=EPS,
    )
    return queries, cache.keys[0], cache.values[0]


def by_kernel(
    qkv: Tensor,
    shape: AttentionShape,
    angles: Tensor | None,
    norms: tuple[Tensor, ...],
    kv_dtype: torch.dtype | None = None,
    query_angles: Tensor | None = None,
) -> Outcome:
    size, dtype = (7, BLOCK_SIZE, stored_heads(shape), shape.head_dim), kv_dtype or qkv.dtype
    keys, values = (torch.zeros(size, dtype=dtype, device=DEVICE) for _ in range(2))
    q_norm, k_norm, v_norm = (*(each.to(DEVICE) for each in norms), None, None, None)[:3]
    queries = rope_append(
        qkv.clone().to(DEVICE),
        None if angles is None else angles.to(DEVICE),
        LAYOUT.positions.long().to(DEVICE),
        torch.tensor([5 * 4 + 3, 1 * 4, 3 * 4], device=DEVICE),
        keys,
        values,
        shape,
        q_norm,
        k_norm,
        EPS,
        None if query_angles is None else query_angles.to(DEVICE),
        v_norm,
    )
    return queries.cpu(), keys.cpu(), values.cpu()


def test_queries_may_have_angles_of_their_own() -> None:
    shape, angles = shape_of(64), angles_of(64)
    case = (random_qkv(shape, torch.float32), shape, angles, (), None, 2 * angles)
    found, usual = by_kernel(*case), by_kernel(*case[:-1])
    for mine, theirs in zip(found, by_backend(*case), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(found[1], usual[1])
    assert torch.equal(found[0], 2 * usual[0])


def angles_of(head_dim: int) -> Tensor:
    return rotary_angles(RopeSpec(theta=10000.0, scaling=None), head_dim=head_dim, num_positions=16)


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_rotated_heads_are_the_same_bits_whatever_the_group(head_dim: int, num_kv_heads: int) -> None:
    shape = shape_of(head_dim, num_kv_heads)
    case = (random_qkv(shape, torch.float32), shape, angles_of(head_dim), ())
    for found, wanted in zip(by_kernel(*case), by_backend(*case), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.full(
    but=(
        "False-dtype0-64",
        "True-dtype1-128",
        "False-dtype2-256",
        "True-dtype0-512",
        "True-dtype2-64",
        "False-dtype1-512",
    )
)
def test_stored_8_bit_floats_are_the_bits_of_a_saturating_cast(
    head_dim: int, dtype: torch.dtype, rotates: bool
) -> None:
    """Oracle: torch's conversion, of what a cache of the inputs' type would get. Queries stay as they are."""
    shape = shape_of(head_dim)
    qkv = random_qkv(shape, dtype) * torch.tensor([[2.0**-7], [1.0], [200.0]], dtype=dtype)
    case = (qkv, shape, angles_of(head_dim) if rotates else None, ())
    found = by_kernel(*case, FP8)
    queries, keys, values = by_kernel(*case)
    assert torch.equal(found[0], queries)
    for mine, wide in zip(found[1:], (keys, values), strict=True):
        assert wide.abs().max() > 448
        assert torch.equal(mine.view(torch.uint8), wide.float().clamp(-448, 448).to(FP8).view(torch.uint8))
    if dtype is torch.float32 or not rotates:
        for mine, theirs in zip(found, by_backend(*case, FP8), strict=True):
            assert torch.equal(mine.float(), theirs.float())


def comparable(codes: Tensor) -> Tensor:
    """The bits of 8-bit floats, without the sign of what is no number."""
    bits = codes.view(torch.uint8)
    return torch.where(codes.float().isnan(), bits & 0x7F, bits)


def test_16_bit_numbers_are_stored_as_the_torch_backend_stores_them() -> None:
    """From half the least number of the type to twice the largest; and infinities, and what is no number.

    Of what is no number only that is compared: on an H200 the stored bits are without the sign.
    """
    shape = AttentionShape(num_heads=1, num_kv_heads=1, head_dim=128, scale=1.0)
    exponents = [*range(127 - 11, 127 + 10), 0, 255]
    bits = torch.tensor(exponents)[:, None] * 128 + torch.arange(128)
    numbers = torch.cat((bits, bits - 2**15)).to(torch.int16).view(torch.bfloat16)
    qkv = numbers.repeat(1, 3).to(DEVICE)
    rows = torch.arange(len(qkv), device=DEVICE)
    keys, values = (torch.zeros(len(qkv), 1, 1, 128, dtype=FP8, device=DEVICE) for _ in range(2))
    rope_append(qkv, None, rows, rows, keys, values, shape)
    wanted = stored(numbers, FP8)
    for found in (keys, values):
        assert torch.equal(comparable(found.view(-1, 128).cpu()), comparable(wanted))


def test_a_cache_of_another_type_is_refused() -> None:
    shape, slots = shape_of(64), torch.zeros(3, dtype=torch.int64, device=DEVICE)
    qkv = random_qkv(shape, torch.bfloat16).to(DEVICE)
    size = (1, BLOCK_SIZE, 2, 64)
    good, other = (torch.zeros(size, dtype=dtype, device=DEVICE) for dtype in (FP8, torch.float8_e5m2))
    with pytest.raises(EngineError, match=r"keys is torch.float8_e5m2; the kernel needs"):
        rope_append(qkv, None, slots, slots, other, other.clone(), shape)
    with pytest.raises(EngineError, match=r"values is torch.bfloat16; the kernel needs torch.float8"):
        rope_append(qkv, None, slots, slots, good, good.float().bfloat16(), shape)


def test_without_angles_nothing_is_rotated() -> None:
    shape = shape_of(64)
    case = (random_qkv(shape, torch.float32), shape, None, ())
    for found, wanted in zip(by_kernel(*case), by_backend(*case), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 2**-5)])
@pytest.mark.parametrize("num_norms, head_dim", [(1, 64), (2, 64), (3, 128), (3, 512)])
def test_heads_are_normalised_before_they_are_rotated(
    num_norms: int, head_dim: int, dtype: torch.dtype, tolerance: float
) -> None:
    """Queries alone, keys too, values too, which are not rotated. Planted: values left out, with keys' weight."""
    shape = shape_of(head_dim)
    generator = torch.Generator().manual_seed(2)
    norms = tuple((1 + torch.randn(head_dim, generator=generator) / 4).to(dtype) for _ in range(num_norms))
    case = (3 * random_qkv(shape, dtype), shape, angles_of(head_dim), norms)
    for found, wanted in zip(by_kernel(*case), by_backend(*case), strict=True):
        torch.testing.assert_close(found.float(), wanted.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kv_dtype", [torch.float32, FP8])
def test_a_shape_that_reads_the_keys_of_others_has_queries_alone(kv_dtype: torch.dtype) -> None:
    """There is no room in the cache for anything else."""
    shape = replace(shape_of(512), reads_other=True)
    norms = (1 + torch.arange(512) / 512,)
    case = (random_qkv(shape, torch.float32), shape, angles_of(512), norms, kv_dtype)
    found, wanted = by_kernel(*case), by_backend(*case)
    assert found[0].shape == wanted[0].shape == (3, 4 * 512)
    torch.testing.assert_close(found[0], wanted[0], rtol=2e-6, atol=2e-6)
    assert not found[1].numel()


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
    with pytest.raises(EngineError, match=r"head_dim is 80; rope_append has kernels for \(64, 128, 256, 512\)"):
        rope_append(random_qkv(shape, torch.float32).to(DEVICE), None, slots, slots, keys, keys.clone(), shape)
