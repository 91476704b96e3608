"""The reference backend against formulas written out in float64: it is the oracle of all others."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from faser.kernels.interface.backend import Backend
from faser.kernels.torch_backend import TorchBackend
from faser.types.activation import Activation
from tests.kernels.layouts import (
    BLOCK_SIZE,
    Span,
    attention_shape,
    kv_shape,
    layout_of,
    naive_attention,
    qkv_width,
    rotary_angles,
    shuffled_table,
    step,
)


@pytest.fixture
def backend() -> TorchBackend:
    torch.manual_seed(0)
    return TorchBackend()


def test_linear_adds_bias_and_residual(backend: TorchBackend) -> None:
    weight, bias, x, residual = torch.randn(5, 7), torch.randn(5), torch.randn(3, 7), torch.randn(3, 5)
    out = backend.linear(x, backend.pack(weight, bias), torch.empty(3, 5), residual=residual)
    wanted = torch.tensor(
        [
            [sum(weight[n, k] * x[r, k] for k in range(7)) + bias[n] + residual[r, n] for n in range(5)]
            for r in range(3)
        ]
    )
    assert_close(out, wanted)


def test_a_packed_weight_survives_its_source(backend: TorchBackend) -> None:
    weight = torch.ones(2, 2)
    packed = backend.pack(weight)
    weight.zero_()
    assert backend.linear(torch.ones(1, 2), packed, torch.empty(1, 2)).tolist() == [[2.0, 2.0]]


def test_embed_returns_rows_of_the_weight(backend: Backend) -> None:
    weight = torch.randn(9, 4)
    out = backend.embed(torch.tensor([8, 0, 8]), backend.pack(weight), torch.empty(3, 4))
    assert torch.equal(out, weight[[8, 0, 8]])


def test_rms_norm_divides_by_the_root_mean_square(backend: TorchBackend) -> None:
    x, weight = torch.randn(4, 6), torch.randn(6)
    wanted = [[x[r, i] / (x[r].square().mean() + 1e-3) ** 0.5 * weight[i] for i in range(6)] for r in range(4)]
    assert_close(backend.rms_norm(x, weight, 1e-3, torch.empty(4, 6)), torch.tensor(wanted))


def test_silu_mul_gates_the_second_half_by_the_first(backend: TorchBackend) -> None:
    gate_up = torch.randn(3, 8)
    wanted = [[g / (1 + (-g).exp()) * u for g, u in zip(row[:4], row[4:], strict=True)] for row in gate_up]
    assert_close(backend.gate(gate_up, torch.empty(3, 4)), torch.tensor(wanted))


def test_the_gate_of_gpt_oss_clamps_both_halves_and_adds_one(backend: TorchBackend) -> None:
    """The gate from above alone: at -20 it would give as little as at -7, but for the other half."""
    gate = torch.tensor([-20.0, -2.0, 0.5, 6.5, 9.0])
    up = torch.tensor([[9.0], [7.5], [0.25], [-6.0], [-9.0]])
    wanted = [
        [g / (1 + math.exp(-1.702 * g)) * (u + 1) for g in (-20, -2, 0.5, 6.5, 7)] for u in (7, 7, 0.25, -6, -7)
    ]
    both = torch.cat((gate.expand(5, 5), up.expand(5, 5)), 1)
    assert_close(
        backend.gate(both, torch.empty(5, 5), Activation.SWIGLU_OAI), torch.tensor(wanted), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("group", [1, 3])
def test_a_sequence_in_chunks_attends_as_the_formula_says(
    backend: TorchBackend, group: int, window: int | None
) -> None:
    shape = attention_shape(group, 2, 16, window)
    table = shuffled_table(1, 4)
    cache = backend.allocate_kv(kv_shape(shape, 4, torch.float32))
    qkv = torch.randn(37, qkv_width(shape))
    parts = [
        step(
            backend, cache, shape, layout_of([Span(sequence=0, start=start, rows=rows)], table), qkv[start:][:rows]
        )
        for start, rows in ((0, 20), (20, 1), (21, 16))
    ]
    assert_close(torch.cat(parts).double(), naive_attention(qkv, shape), rtol=1e-5, atol=1e-5)


def test_rotation_is_a_complex_product_and_depends_on_distance_only(backend: TorchBackend) -> None:
    shape = attention_shape(1, 1, 16)
    angles = rotary_angles(16)
    cache = backend.allocate_kv(kv_shape(shape, 8, torch.float32))
    qkv = torch.randn(1, 48)

    def turned(position: int) -> Tensor:
        layout = layout_of([Span(sequence=0, start=position, rows=1)], torch.arange(8, dtype=torch.int32)[None])
        return backend.rope_append(qkv.clone(), angles, cache, 0, shape, backend.plan(layout, BLOCK_SIZE))[
            0
        ].clone()

    query = torch.complex(qkv[0, :8], qkv[0, 8:16]).to(torch.complex128)
    turn = torch.complex(angles[9, :8], angles[9, 8:])
    wanted = torch.view_as_real(query * turn)
    assert_close(turned(9).view(2, 8).T.double(), wanted)
    assert_close(turned(9) @ turned(4), turned(25) @ turned(20))


def test_head_norms_come_before_the_rotation(backend: TorchBackend) -> None:
    shape = attention_shape(2, 1, 16)
    angles, weight = rotary_angles(16), torch.randn(16)
    cache = backend.allocate_kv(kv_shape(shape, 1, torch.float32))
    plan = backend.plan(layout_of([Span(sequence=0, start=3, rows=1)], shuffled_table(1, 1)), BLOCK_SIZE)
    qkv = torch.randn(1, 64)
    normed = qkv.clone()
    for head in range(3):
        part = normed[0, head * 16 : (head + 1) * 16]
        part.copy_(part / (part.square().mean() + 1e-6) ** 0.5 * weight)
    wanted = backend.rope_append(normed, angles, cache, 0, shape, plan)
    queries = backend.rope_append(qkv, angles, cache, 0, shape, plan, q_norm=weight, k_norm=weight)
    assert_close(queries, wanted)


@pytest.mark.parametrize("part", ["key", "value"])
@pytest.mark.parametrize("score_cap, window", [(None, None), (None, 4), (30.0, None)])
def test_a_key_or_value_that_is_no_number_counts_for_the_rows_that_see_it_alone(
    backend: TorchBackend, part: str, score_cap: float | None, window: int | None
) -> None:
    shape = replace(attention_shape(2, 1, 16, window), score_cap=score_cap)
    layout = layout_of([Span(sequence=0, start=0, rows=12)], shuffled_table(1, 2))
    qkv = torch.randn(12, qkv_width(shape))
    sound = step(backend, backend.allocate_kv(kv_shape(shape, 2, torch.float32)), shape, layout, qkv)
    qkv[5, {"key": 32, "value": 48}[part] + 3] = torch.nan
    found = step(backend, backend.allocate_kv(kv_shape(shape, 2, torch.float32)), shape, layout, qkv)
    end = 12 if window is None else 5 + window
    assert torch.equal(found[:5], sound[:5])
    assert found[5:end].isnan().all()
    assert torch.equal(found[end:], sound[end:])
