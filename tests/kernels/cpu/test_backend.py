"""The native backend: against the reference in float32, and the promise that a row's bits are its own.

Bugs these tests have been seen to catch: the residual dropped in the last columns, the last panels skipped,
products summed in two halves for few rows, the pair of a key swapped, a value stored under the wrong token,
keys normalised by the queries' weight, a rotation the wrong way, a window one wider, the next key seen,
another sequence's blocks read, spans that start elsewhere when alone, spans joined without rescaling, stale
values left in, one layer copied of two; scores capped after they are masked, not at all, or in units of the
query; a sink that adds to the values, is multiplied by the scale, or is another head's; keys that grow as
queries do.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from faser.errors import ConfigError
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import Isa, library_path, runnable_isas
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.shapes import AttentionShape, KvCache
from faser.kernels.torch_backend import TorchBackend
from faser.types.activation import Activation
from tests.kernels.conftest import LibraryOf
from tests.kernels.interface.low_bit.blocks import random_blocks
from tests.kernels.layouts import (
    BLOCK_SIZE,
    Span,
    attention_shape,
    kv_shape,
    layout_of,
    qkv_width,
    rotary_angles,
    shuffled_table,
    step,
)

DTYPES = [torch.float32, torch.bfloat16]
REFERENCE = TorchBackend()
BF16_ULP = 2.0**-8  # one unit in the last place of a bfloat16, relative


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def check(actual: Tensor, wanted: Tensor, dtype: torch.dtype, size: float = 1.0) -> None:
    """float32: within 1e-5. bfloat16: one unit in the last place of the result, or of a value as large as size."""
    near = 1e-5 if dtype is torch.float32 else BF16_ULP
    assert_close(actual.to(wanted.dtype), wanted, rtol=near, atol=near * size)


def random(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows, columns, depth", [(1, 64, 32), (3, 17, 6), (7, 130, 66), (24, 1, 2), (40, 200, 130)]
)
def test_linear_matches_the_reference(
    native: NativeBackend, rows: int, columns: int, depth: int, dtype: torch.dtype
) -> None:
    """Oracle: the product in float64 of the same rounded inputs; also a column count that fills no panel."""
    weight, bias, x = (
        random(columns, depth, dtype=dtype),
        random(columns, dtype=dtype),
        random(rows, depth, dtype=dtype),
    )
    residual = random(rows, columns, dtype=dtype)
    packed = native.pack(weight, bias)
    product = x.double() @ weight.double().T + bias.double()
    size = math.sqrt(depth)
    out = torch.full((rows, columns), math.nan, dtype=dtype)
    check(native.linear(x, packed, out), product, dtype, size)
    logits = torch.full((rows, columns), math.nan)
    check(native.linear(x, packed, logits), product, torch.float32, size)
    wanted = product + residual.double()
    check(native.linear(x, packed, residual, residual=residual), wanted, dtype, size)


def test_linear_takes_rows_out_of_wider_tensors(native: NativeBackend) -> None:
    weight, wide, out = random(20, 16), random(5, 48), torch.zeros(5, 30)
    native.linear(wide[:, 16:32], native.pack(weight), out[:, :20])
    assert_close(out[:, :20], wide[:, 16:32] @ weight.T, rtol=1e-5, atol=1e-5)
    assert not out[:, 20:].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_product_has_the_same_bits_in_every_batch(native: NativeBackend, dtype: torch.dtype) -> None:
    columns, depth, most = 150, 180, 200
    packed = native.pack(random(columns, depth, dtype=dtype), random(columns, dtype=dtype))
    x, residual = random(most, depth, dtype=dtype), random(most, columns, dtype=dtype)

    def product(rows: slice) -> Tensor:
        out = torch.empty(len(x[rows]), columns, dtype=dtype)
        return native.linear(x[rows], packed, out, residual=residual[rows])

    together = product(slice(0, most))
    for first, end in [(r, r + 1) for r in range(40)] + [(0, n) for n in range(2, 41)] + [(100, 197), (3, 105)]:
        assert torch.equal(product(slice(first, end)), together[first:end]), (first, end)


@pytest.mark.parametrize("token_id", [-1, 17, 2**40])
@pytest.mark.parametrize("low_bit", [False, True])
def test_an_id_without_a_row_is_an_error_and_nothing_is_read(
    native: NativeBackend, low_bit: bool, token_id: int
) -> None:
    """Bugs seen to be caught: an id that is taken as it is, which crashes; an id below 0 that passes."""
    weight = random_blocks("Q4_0", 17, 64) if low_bit else random(17, 64)
    backends: list[Backend] = [native, REFERENCE]
    for backend in backends:
        with pytest.raises(IndexError):
            backend.embed(torch.tensor([3, token_id, 4]), backend.pack(weight), torch.empty(3, 64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_embed_returns_the_rows_that_were_packed(native: NativeBackend, dtype: torch.dtype) -> None:
    weight = random(50, 34, dtype=dtype)
    ids = torch.tensor([49, 0, 15, 16, 17, 31, 32, 49, 0, 5])
    out = native.embed(ids, native.pack(weight), torch.empty(len(ids), 34, dtype=dtype))
    assert torch.equal(out, weight[ids])


def test_a_packed_weight_survives_its_source_and_its_neighbours(native: NativeBackend) -> None:
    weights = [random(33, 20) for _ in range(3)]
    packed = [native.pack(weight.clone()) for weight in weights]
    del packed[1]
    for weight, kept in ((weights[0], packed[0]), (weights[2], packed[1])):
        assert torch.equal(native.embed(torch.arange(33), kept, torch.empty(33, 20)), weight)


def test_pack_refuses_what_the_kernels_cannot_multiply(native: NativeBackend) -> None:
    with pytest.raises(ConfigError, match="inputs, 7, are odd"):
        native.pack(random(4, 7, dtype=torch.bfloat16))
    with pytest.raises(ConfigError, match="bfloat16 and float32; the weight is float16"):
        native.pack(random(4, 8, dtype=torch.float16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, width", [(1, 576), (3, 50), (100, 576)])
def test_rms_norm_matches_the_reference(native: NativeBackend, rows: int, width: int, dtype: torch.dtype) -> None:
    """With and without something to add to, in place."""
    x, weight, stream = random(rows, width, dtype=dtype), random(width), random(rows, width, dtype=dtype)
    wanted = REFERENCE.rms_norm(x.float(), weight, 1e-5, torch.empty(rows, width))
    out = native.rms_norm(x, weight, 1e-5, torch.empty(rows, width, dtype=dtype))
    check(out, wanted, dtype)
    added = stream.float() + wanted
    check(native.rms_norm(x, weight, 1e-5, stream, residual=stream), added, dtype, size=4.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, width", [(1, 1536), (3, 50), (40, 1536)])
@pytest.mark.parametrize("activation", Activation)
def test_a_gate_matches_the_reference(
    native: NativeBackend, activation: Activation, rows: int, width: int, dtype: torch.dtype
) -> None:
    gate_up = (random(rows, 2 * width) * 4).to(dtype)
    gate_up[0, 0], gate_up[0, 1] = 200, -200
    wanted = REFERENCE.gate(gate_up.float(), torch.empty(rows, width), activation)
    out = native.gate(gate_up, torch.empty(rows, width, dtype=dtype), activation)
    check(out, wanted, dtype)


@pytest.mark.parametrize("activation", Activation)
def test_a_gate_hides_no_nan(native: NativeBackend, activation: Activation) -> None:
    gate_up = torch.zeros(2, 40)
    gate_up[0, 3] = gate_up[1, 25] = float("nan")
    found = native.gate(gate_up, torch.empty(2, 20), activation)
    assert found.isnan().nonzero().tolist() == [[0, 3], [1, 5]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_rope_append_returns_the_queries_of_the_reference(
    native: NativeBackend, head_dim: int, dtype: torch.dtype
) -> None:
    """With and without norms and angles. In float32 on both sides: bfloat16 rounds where the reference rounds."""
    shape, rows = attention_shape(3, 2, head_dim), 9
    layout = layout_of([Span(sequence=0, start=7, rows=rows)], shuffled_table(1, 1))
    qkv, norms = random(rows, qkv_width(shape), dtype=dtype), list(random(2, head_dim))

    def queries(backend: Backend, kind: torch.dtype, angles: Tensor | None, norms: list[Tensor] | None) -> Tensor:
        cache = backend.allocate_kv(kv_shape(shape, 1, kind))
        q_norm, k_norm = (None, None) if norms is None else norms
        plan, rows = backend.plan(layout, BLOCK_SIZE), qkv.to(kind, copy=True)
        return backend.rope_append(rows, angles, cache, 0, shape, plan, q_norm=q_norm, k_norm=k_norm).float()

    for angles, weights in ((None, None), (rotary_angles(head_dim), None), (rotary_angles(head_dim), norms)):
        wanted = queries(REFERENCE, torch.float32, angles, weights)
        check(queries(native, dtype, angles, weights), wanted, dtype, size=4.0)


@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_keys_are_normalised_and_rotated_before_they_are_stored(native: NativeBackend, head_dim: int) -> None:
    """Seen through attention, because a backend's cache is its own. Queries with angles of their own too."""
    shape, rows = attention_shape(3, 2, head_dim), 20
    layout = layout_of([Span(sequence=0, start=0, rows=rows)], shuffled_table(1, 2))
    qkv, q_norm, k_norm = random(rows, qkv_width(shape)), random(head_dim), random(head_dim)

    def mixed(backend: Backend, query_angles: Tensor | None) -> Tensor:
        cache, plan = backend.allocate_kv(kv_shape(shape, 2, torch.float32)), backend.plan(layout, BLOCK_SIZE)
        queries = backend.rope_append(
            qkv.clone(),
            rotary_angles(head_dim),
            cache,
            0,
            shape,
            plan,
            query_angles=query_angles,
            q_norm=q_norm,
            k_norm=k_norm,
        )
        return backend.attend(queries, cache, 0, shape, plan, torch.empty(queries.shape))

    usual, other = (mixed(native, angles) for angles in (None, 2 * rotary_angles(head_dim)))
    check(usual, mixed(REFERENCE, None), torch.float32, size=4.0)
    check(other, mixed(REFERENCE, 2 * rotary_angles(head_dim)), torch.float32, size=4.0)
    assert not torch.allclose(usual, other, atol=1e-2)


@pytest.mark.parametrize("head_dim", [16, 80, 512])
def test_values_are_normalised_and_a_layer_may_read_those_of_another(native: NativeBackend, head_dim: int) -> None:
    """The second layer, which has twice as many queries and stores nothing, reads the first one's."""
    shape, rows = attention_shape(3, 2, head_dim), 20
    reading = replace(shape, num_heads=2 * shape.num_heads, reads_other=True)
    layout = layout_of([Span(sequence=0, start=0, rows=rows)], shuffled_table(1, 2))
    qkv, more, v_norm = random(rows, qkv_width(shape)), random(rows, reading.q_size), random(head_dim)

    def mixed(backend: Backend, v_norm: Tensor | None) -> Tensor:
        size = replace(kv_shape(shape, 2, torch.float32), heads=((2, head_dim), (0, head_dim)))
        cache, plan = backend.allocate_kv(size), backend.plan(layout, BLOCK_SIZE)
        backend.rope_append(qkv.clone(), rotary_angles(head_dim), cache, 0, shape, plan, v_norm=v_norm)
        queries = backend.rope_append(more.clone(), rotary_angles(head_dim), cache, 1, reading, plan)
        return backend.attend(queries, cache, 0, reading, plan, torch.empty(queries.shape))

    usual, other = mixed(native, v_norm), mixed(native, None)
    check(usual, mixed(REFERENCE, v_norm), torch.float32, size=4.0)
    check(other, mixed(REFERENCE, None), torch.float32, size=4.0)
    assert not torch.allclose(usual, other, atol=1e-2)


RAGGED = [
    Span(sequence=3, start=0, rows=37),
    Span(sequence=0, start=299, rows=1),
    Span(sequence=5, start=250, rows=30),
    Span(sequence=1, start=15, rows=1),
    Span(sequence=4, start=512, rows=1),
    Span(sequence=2, start=96, rows=5),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window, block_size", [(None, 48), (1, 16), (40, 32), (300, 16)])
@pytest.mark.parametrize("group, num_kv_heads, head_dim", [(3, 3, 64), (1, 2, 80), (8, 1, 128)])
def test_ragged_attention_matches_the_reference(
    native: NativeBackend,
    group: int,
    num_kv_heads: int,
    head_dim: int,
    window: int | None,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    """Oracle: the reference in float32 on the same inputs. Decode rows and prompt chunks, shuffled blocks."""
    shape = attention_shape(group, num_kv_heads, head_dim, window)
    table = shuffled_table(6, -(-513 // block_size))
    before = [Span(sequence=s.sequence, start=0, rows=s.start) for s in RAGGED if s.start]
    outs = []
    inputs = [random(sum(s.rows for s in spans), qkv_width(shape), dtype=dtype) for spans in (before, RAGGED)]
    for backend, kind in ((native, dtype), (REFERENCE, torch.float32)):
        cache = backend.allocate_kv(kv_shape(shape, table.numel(), kind, block_size))
        for spans, qkv in zip((before, RAGGED), inputs, strict=True):
            out = step(backend, cache, shape, layout_of(spans, table), qkv.to(kind), block_size=block_size)
        outs.append(out.float())
    check(outs[0], outs[1], dtype, size=4.0)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
def test_capped_scores_and_sinks_match_the_reference(native: NativeBackend, kv_dtype: torch.dtype) -> None:
    """Sinks from one that weighs nothing to one that weighs nearly all; scores far beyond the cap."""
    shape = replace(attention_shape(3, 2, 64, 40), scale=1.0, score_cap=5.0)
    table = shuffled_table(6, 33)
    sinks = torch.tensor([-30.0, 0.0, 3.0, 5.0, 9.0, 200.0])
    qkv = random(sum(s.rows for s in RAGGED), qkv_width(shape))
    near = 1e-5 if kv_dtype is torch.float32 else 2e-3  # integers round
    found: dict[str, list[Tensor]] = {}
    for name, each, cap in (("both", sinks, 5.0), ("a cap", None, 5.0), ("sinks", sinks, None)):
        of = replace(shape, score_cap=cap, scale=1.0 if cap else 0.125)
        found[name] = [
            step(
                backend,
                backend.allocate_kv(kv_shape(of, table.numel(), kv_dtype)),
                of,
                layout_of([replace(s, start=0) for s in RAGGED], table),
                qkv,
                sinks=each,
            )
            for backend in (native, REFERENCE)
        ]
        assert_close(*found[name], rtol=near, atol=4 * near)
    assert found["both"][0][:, -64:].abs().max() < 1e-6  # the last head's sink takes all
    assert not torch.allclose(found["both"][0][:, :64], found["sinks"][0][:, :64], atol=1e-2)


def prefill(
    backend: NativeBackend, cache: KvCache, shape: AttentionShape, table: Tensor, qkv: Tensor, cuts: list[int]
) -> Tensor:
    """A sequence in chunks that end at the cuts; returns all rows."""
    angles = rotary_angles(shape.head_dim)
    return torch.cat(
        [
            step(
                backend,
                cache,
                shape,
                layout_of([Span(sequence=0, start=a, rows=b - a)], table),
                qkv[a:b],
                angles,
            )
            for a, b in pairwise(cuts)
        ]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group, window", [(1, None), (3, None), (3, 70), (8, 300)])
def test_a_row_attends_to_the_same_bits_however_its_sequence_is_cut(
    native: NativeBackend, group: int, window: int | None, dtype: torch.dtype
) -> None:
    """One prefill of everything, against chunks of every small size, single rows, and rows around spans' edges."""
    shape, tokens = attention_shape(group, 2, 64, window), 600
    table = shuffled_table(1, 40)
    cache = native.allocate_kv(kv_shape(shape, 40, dtype))
    qkv = random(tokens, qkv_width(shape), dtype=dtype)
    whole = prefill(native, cache, shape, table, qkv, [0, tokens])
    for cuts in ([*range(60), 255, 256, 257, 258, 511, 512, 513, 600], [0, 7, 13, 100, 164, 413, 600]):
        again = native.allocate_kv(kv_shape(shape, 40, dtype))
        assert torch.equal(prefill(native, again, shape, table, qkv, cuts), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_attends_to_the_same_bits_with_any_other_rows_in_the_step(
    native: NativeBackend, dtype: torch.dtype
) -> None:
    """A long decode row alone is cut into spans over the threads; among others it is not."""
    shape, num_sequences, long = attention_shape(3, 3, 64), 24, 1500
    table = shuffled_table(num_sequences, 96)
    cache = native.allocate_kv(kv_shape(shape, table.numel(), dtype))
    lengths = [long] + [1 + 61 * s % 400 for s in range(1, num_sequences)]
    filled = [Span(sequence=s, start=0, rows=n) for s, n in enumerate(lengths)]
    step(native, cache, shape, layout_of(filled, table), random(sum(lengths), qkv_width(shape), dtype=dtype))
    spans = [Span(sequence=s, start=n, rows=1) for s, n in enumerate(lengths)]
    rows = random(num_sequences, qkv_width(shape), dtype=dtype)
    together = step(native, cache, shape, layout_of(spans, table), rows)
    for s in range(num_sequences):
        assert torch.equal(
            step(native, cache, shape, layout_of(spans[s : s + 1], table), rows[s : s + 1])[0], together[s]
        )


def test_two_threads_and_one_give_the_same_bits(native_alone: NativeBackend, kernel_cache: Path) -> None:
    two = NativeBackend(library_path(cache_dir=kernel_cache), num_threads=2)
    shape = attention_shape(3, 1, 64)
    qkv, last = (
        random(700, qkv_width(shape), dtype=torch.bfloat16),
        random(1, qkv_width(shape), dtype=torch.bfloat16),
    )
    weight, x = random(500, 64, dtype=torch.bfloat16), random(50, 64, dtype=torch.bfloat16)
    results = []
    for backend in (native_alone, two):
        cache = backend.allocate_kv(kv_shape(shape, 44, torch.bfloat16))
        table = shuffled_table(1, 44)
        parts = [
            step(backend, cache, shape, layout_of([Span(sequence=0, start=start, rows=len(rows))], table), rows)
            for start, rows in ((0, qkv), (700, last))
        ]
        product = backend.linear(x, backend.pack(weight), torch.empty(50, 500, dtype=torch.bfloat16))
        results.append([*parts, product])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 20])
def test_slots_that_no_row_sees_may_hold_anything(
    native: NativeBackend, window: int | None, dtype: torch.dtype
) -> None:
    """The whole cache is filled with NaN first; with a window, so stays what lies before it."""
    shape = attention_shape(3, 2, 32, window)
    table = shuffled_table(1, 20)
    everywhere = layout_of([Span(sequence=0, start=0, rows=320)], table)
    caches: list[Tensor] = []
    for poison in (math.nan, 0.0):
        cache = native.allocate_kv(kv_shape(shape, 20, dtype))
        torch.manual_seed(1)
        step(native, cache, shape, everywhere, torch.full((320, qkv_width(shape)), poison, dtype=dtype))
        first = 0 if window is None else 270 - window
        spans = [Span(sequence=0, start=first, rows=270 - first), Span(sequence=0, start=270, rows=1)]
        for span in spans:
            out = step(
                native, cache, shape, layout_of([span], table), random(span.rows, qkv_width(shape), dtype=dtype)
            )
        caches.append(out)
    assert not caches[0].isnan().any()
    assert torch.equal(*caches)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [math.nan, pytest.param(math.inf, marks=pytest.mark.full)])
@pytest.mark.parametrize("group, window", [(1, None), (3, 20), (8, 300)])
def test_a_value_that_is_no_number_counts_for_the_rows_that_see_it_alone(
    native: NativeBackend, group: int, window: int | None, poison: float, dtype: torch.dtype
) -> None:
    """A row has the bits that it has alone, whoever of its company sees that value."""
    shape, tokens = attention_shape(group, 2, 32, window), 600
    table = shuffled_table(1, 40)
    qkv = random(tokens, qkv_width(shape), dtype=dtype)
    qkv[(253, 300), -5] = poison
    alone, together = (
        prefill(native, native.allocate_kv(kv_shape(shape, 40, dtype)), shape, table, qkv, cuts)
        for cuts in ([*range(tokens + 1)], [0, tokens])
    )
    assert_close(together, alone, rtol=0, atol=0, equal_nan=True)
    assert alone[:253].isfinite().all()
    assert not alone[253:].isfinite().all()


def test_a_cache_the_kernels_cannot_read_is_refused(native: NativeBackend) -> None:
    with pytest.raises(ConfigError, match="block_size that is a multiple of 16, not 24"):
        native.allocate_kv(kv_shape(attention_shape(1, 1, 16), 1, torch.float32, block_size=24))
    with pytest.raises(ConfigError, match="head_dim that is a multiple of 16, not 40"):
        native.allocate_kv(kv_shape(attention_shape(1, 1, 40), 1, torch.float32))
    with pytest.raises(ConfigError, match="the KV cache is float16"):
        native.allocate_kv(kv_shape(attention_shape(1, 1, 16), 1, torch.float16))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_layout_matches_the_reference(native_alone: NativeBackend, data: st.DataObject) -> None:
    """Random ragged steps, float32, with sequences cut at random and a random window."""
    shape = attention_shape(data.draw(st.integers(1, 5)), 1, 16, data.draw(st.none() | st.integers(1, 400)))
    lengths = data.draw(st.lists(st.integers(1, 330), min_size=1, max_size=4))
    fresh = [data.draw(st.integers(1, length)) for length in lengths]
    table = shuffled_table(len(lengths), 21, seed=data.draw(st.integers(0, 9)))
    steps = [
        [
            Span(sequence=s, start=0, rows=n - f)
            for s, (n, f) in enumerate(zip(lengths, fresh, strict=True))
            if n > f
        ],
        [Span(sequence=s, start=n - f, rows=f) for s, (n, f) in enumerate(zip(lengths, fresh, strict=True))],
    ]
    inputs = [random(sum(span.rows for span in spans), qkv_width(shape)) for spans in steps]
    outs = []
    for backend in (native_alone, REFERENCE):
        cache = backend.allocate_kv(kv_shape(shape, table.numel(), torch.float32))
        for spans, qkv in zip(steps, inputs, strict=True):
            if spans:
                out = step(backend, cache, shape, layout_of(spans, table), qkv, rotary_angles(16))
        outs.append(out)
    assert_close(outs[0], outs[1], rtol=1e-5, atol=1e-5)


def test_a_backend_without_threads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 1 thread, not 0"):
        NativeBackend(tmp_path / "never-read.so", num_threads=0)


def test_a_file_that_is_no_library_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "kernels.so"
    path.write_text("not a library")
    with pytest.raises(ConfigError, match=str(path)):
        NativeBackend(path, num_threads=1)


@pytest.mark.parametrize(
    ("isa", "bfloat16", "float32", "low_bit"),
    [
        (Isa.AMX, range(16, 64, 16), range(6, 64, 6), range(6, 64, 6)),
        (Isa.AVX512_BF16, range(6, 64, 6), range(6, 64, 6), range(6, 64, 6)),
        (Isa.AVX2, range(4, 64, 4), range(4, 64, 4), (5, *range(8, 64, 4))),
    ],
)
def test_the_edges_of_tiles_are_those_of_the_products_that_hold_most_weights(
    isa: Isa, bfloat16: range, float32: range, low_bit: Sequence[int], library_of: LibraryOf
) -> None:
    """The largest weight decides; a router in float32 has no say."""
    if isa not in runnable_isas():
        pytest.skip(f"this CPU does not run {isa}")
    path = library_of(isa)
    blocks = random_blocks("Q8_0", 64, 32)
    for weight, edges in (
        (random(64, 32, dtype=torch.bfloat16), bfloat16),
        (random(64, 32), float32),
        (blocks, low_bit),
    ):
        backend = NativeBackend(path, num_threads=1)
        backend.pack(random(16, 32, dtype=torch.bfloat16))
        backend.pack(random(15, 32))
        backend.pack(weight)
        assert backend.row_edges(64) == tuple(edges)
