"""The native backend over keys and values in int8: against their definition, and a row's bits in any company."""

import math
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
from faser.kernels.cpu.build import Isa, library_path
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.kv_cache import dequantised, quantise_heads
from faser.kernels.interface.shapes import AttentionShape, KvCache
from faser.kernels.torch_backend import TorchBackend
from tests.kernels.conftest import other_isas
from tests.kernels.int8_bounds import most_off
from tests.kernels.layouts import (
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
DEFINITION = TorchBackend()
INT8 = torch.int8


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def random(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size).to(dtype)


def whole(backend: Backend, shape: AttentionShape, qkv: Tensor, cuts: list[int] | None = None) -> Tensor:
    """Attention of one sequence, computed in chunks that end at cuts; without rotation."""
    cuts = [0, len(qkv)] if cuts is None else cuts
    blocks = -(-len(qkv) // 16)
    cache, table = backend.allocate_kv(kv_shape(shape, blocks, INT8)), shuffled_table(1, blocks)
    parts = [
        step(backend, cache, shape, layout_of([Span(sequence=0, start=a, rows=b - a)], table), qkv[a:b])
        for a, b in pairwise(cuts)
    ]
    return torch.cat(parts)


def check_against_definition(native: Backend, shape: AttentionShape, qkv: Tensor, *, typical: float) -> None:
    """Some rows within the bound of interface/kv_cache.py; and all within `typical` as a root mean square."""
    off = (whole(native, shape, qkv) - whole(DEFINITION, shape, qkv)).abs().double()
    assert off.square().mean().sqrt() <= typical
    rows = [row for row in (0, 1, 15, 16, 40, 254, 255, 256, 257) if row < len(qkv)]
    rounding = qkv.abs().max() * (1e-5 if qkv.dtype is torch.float32 else 2.0**-7)
    assert (off[rows] <= most_off(qkv, shape, rows, stores=False, rounds=True) + rounding).all()


SHAPES = [(3, 3, 64, None), (1, 2, 80, 40), (8, 1, 128, None), (5, 1, 16, 300), (2, 1, 256, None)]


@pytest.mark.parametrize("group, num_kv_heads, head_dim, window", SHAPES)
def test_attention_is_as_near_to_its_definition_as_is_said(
    native: NativeBackend, group: int, num_kv_heads: int, head_dim: int, window: int | None
) -> None:
    """A row of 330 spans two spans of keys; the bound's own roundings are 1 % of what is expected of bf16."""
    shape = attention_shape(group, num_kv_heads, head_dim, window)
    check_against_definition(native, shape, random(330, qkv_width(shape)), typical=3e-5)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("isa", other_isas())
def test_every_other_instruction_set_is_as_near(isa: Isa, kernel_cache: Path) -> None:
    """Slow: compiles the kernels once more for sets that the other tests leave out."""
    native = NativeBackend(library_path(isa, cache_dir=kernel_cache), num_threads=1)
    for group, num_kv_heads, head_dim, window in SHAPES:
        shape = attention_shape(group, num_kv_heads, head_dim, window)
        check_against_definition(native, shape, random(270, qkv_width(shape)), typical=3e-5)
    check_bits_are_a_rows_own(native, torch.float32)


@pytest.mark.parametrize("spread, typical", [(1e-3, 3e-8), (30.0, 0.1)])
def test_scores_that_hardly_differ_or_leave_one_key(native: NativeBackend, spread: float, typical: float) -> None:
    shape = attention_shape(3, 1, 64)
    check_against_definition(native, shape, spread * random(300, qkv_width(shape)), typical=typical)


def test_bfloat16_is_rounded_once(native: NativeBackend) -> None:
    shape = attention_shape(3, 2, 64)
    check_against_definition(native, shape, random(300, qkv_width(shape), dtype=torch.bfloat16), typical=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 80, 128])
def test_a_row_that_sees_itself_gets_its_stored_value(
    native: NativeBackend, head_dim: int, dtype: torch.dtype
) -> None:
    """Oracle: the stored numbers; of all magnitudes, also where nothing but zeros is stored."""
    shape = attention_shape(2, 3, head_dim, window=1)
    qkv = random(40, qkv_width(shape), dtype=dtype)
    values = qkv.view(40, -1, head_dim)[:, -shape.num_kv_heads :]
    values *= 2.0 ** torch.linspace(-90, 90, 40)[:, None, None]
    values[7] = 0
    wanted = dequantised(*quantise_heads(values)).repeat_interleave(2, 1).view(40, -1)
    found = whole(native, shape, qkv)
    near = 1e-6 if dtype is torch.float32 else 2.0**-8
    assert_close(found.float(), wanted, rtol=near, atol=0)


@pytest.mark.parametrize("head_dim", [16, 80])
def test_keys_are_normalised_and_rotated_before_they_are_rounded(native: NativeBackend, head_dim: int) -> None:
    shape, rows = attention_shape(3, 2, head_dim), 20
    layout = layout_of([Span(sequence=0, start=0, rows=rows)], shuffled_table(1, 2))
    qkv, q_norm, k_norm = random(rows, qkv_width(shape)), random(head_dim), random(head_dim)

    def mixed(backend: Backend) -> Tensor:
        cache, plan = backend.allocate_kv(kv_shape(shape, 2, INT8)), backend.plan(layout, 16)
        queries = backend.rope_append(
            qkv.clone(), rotary_angles(head_dim), cache, 0, shape, plan, q_norm=q_norm, k_norm=k_norm
        )
        return backend.attend(queries, cache, 0, shape, plan, torch.empty(queries.shape))

    # A number at the middle between two codes may fall to either side.
    assert_close(mixed(native), mixed(DEFINITION), rtol=0, atol=5e-3)


def check_bits_are_a_rows_own(native: NativeBackend, dtype: torch.dtype) -> None:
    shape = attention_shape(3, 2, 64)
    qkv = random(300, qkv_width(shape), dtype=dtype)
    assert torch.equal(whole(native, shape, qkv), whole(native, shape, qkv, [*range(40), 255, 256, 257, 258, 300]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group, window", [(1, None), (3, None), (3, 70), (8, 300)])
def test_a_row_attends_to_the_same_bits_however_its_sequence_is_cut(
    native: NativeBackend, group: int, window: int | None, dtype: torch.dtype
) -> None:
    """One prefill of everything, against chunks of every small size, single rows, and rows around spans' edges."""
    shape = attention_shape(group, 2, 64, window)
    qkv = random(600, qkv_width(shape), dtype=dtype)
    together = whole(native, shape, qkv)
    for cuts in ([*range(60), 255, 256, 257, 258, 511, 512, 513, 600], [0, 7, 13, 100, 164, 413, 600]):
        assert torch.equal(whole(native, shape, qkv, cuts), together)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_attends_to_the_same_bits_with_any_other_rows_in_the_step(
    native: NativeBackend, dtype: torch.dtype
) -> None:
    """A long decode row alone is cut into spans over the threads; among others it is not."""
    shape, num_sequences, long = attention_shape(3, 3, 64), 24, 1500
    table = shuffled_table(num_sequences, 96)
    cache = native.allocate_kv(kv_shape(shape, table.numel(), INT8))
    lengths = [long] + [1 + 61 * s % 400 for s in range(1, num_sequences)]
    filled = [Span(sequence=s, start=0, rows=n) for s, n in enumerate(lengths)]
    step(native, cache, shape, layout_of(filled, table), random(sum(lengths), qkv_width(shape), dtype=dtype))
    spans = [Span(sequence=s, start=n, rows=1) for s, n in enumerate(lengths)]
    rows = random(num_sequences, qkv_width(shape), dtype=dtype)
    together = step(native, cache, shape, layout_of(spans, table), rows)
    for s in range(num_sequences):
        alone = step(native, cache, shape, layout_of(spans[s : s + 1], table), rows[s : s + 1])
        assert torch.equal(alone[0], together[s])


def test_two_threads_and_one_give_the_same_bits(native_alone: NativeBackend, kernel_cache: Path) -> None:
    two = NativeBackend(library_path(cache_dir=kernel_cache), num_threads=2)
    shape = attention_shape(3, 1, 64)
    qkv = random(701, qkv_width(shape), dtype=torch.bfloat16)
    assert torch.equal(*(whole(backend, shape, qkv, [0, 700, 701]) for backend in (native_alone, two)))


def poisoned(native: NativeBackend, shape: AttentionShape, table: Tensor, poison: float) -> KvCache:
    cache = native.allocate_kv(kv_shape(shape, table.numel(), INT8))
    rows = 16 * table.numel()
    everywhere = layout_of([Span(sequence=0, start=0, rows=rows)], table)
    step(native, cache, shape, everywhere, torch.full((rows, qkv_width(shape)), poison))
    return cache


@pytest.mark.parametrize("window", [None, 20])
def test_slots_that_no_row_sees_may_hold_anything(native: NativeBackend, window: int | None) -> None:
    """The whole cache is filled with NaN first; with a window, so stays what lies before it."""
    shape, table = attention_shape(3, 2, 32, window), shuffled_table(1, 20)
    first = 0 if window is None else 270 - window
    qkv = random(271 - first, qkv_width(shape))
    outs = []  # of the last row, which sees none of what came first
    for poison in (math.nan, 0.0):
        cache = poisoned(native, shape, table, poison)
        for start, rows in ((first, qkv[:-1]), (270, qkv[-1:])):
            layout = layout_of([Span(sequence=0, start=start, rows=len(rows))], table)
            out = step(native, cache, shape, layout, rows)
        outs.append(out)
    assert not outs[0].isnan().any()
    assert torch.equal(*outs)


@pytest.mark.parametrize(
    "part, poison",
    [
        *((part, math.nan) for part in ("query", "key", "value")),
        *((part, poison) for part in ("key", "value") for poison in (math.inf, -math.inf)),
    ],
)
def test_a_row_that_sees_no_number_is_none(native: NativeBackend, part: str, poison: float) -> None:
    """Row 20 has it: for itself only if it is a query, else for all from there on. An infinity is no number."""
    shape = attention_shape(1, 1, 16)
    qkv = random(300, qkv_width(shape))
    qkv[20, {"query": 0, "key": 16, "value": 32}[part] + 5] = poison
    found = whole(native, shape, qkv).isnan()
    wanted = torch.zeros(300, 16, dtype=torch.bool)
    wanted[20 : 21 if part == "query" else 300] = True
    assert torch.equal(found, wanted)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_layout_matches_the_definition(native_alone: NativeBackend, data: st.DataObject) -> None:
    """Random ragged steps with sequences cut at random, a random window, and blocks of 16 or 48."""
    shape = attention_shape(data.draw(st.integers(1, 5)), 1, 16, data.draw(st.none() | st.integers(1, 400)))
    block_size = data.draw(st.sampled_from([16, 48]))
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
    for backend in (native_alone, DEFINITION):
        cache = backend.allocate_kv(kv_shape(shape, table.numel(), INT8, block_size))
        for spans, qkv in zip(steps, inputs, strict=True):
            if spans:
                out = step(backend, cache, shape, layout_of(spans, table), qkv, block_size=block_size)
        outs.append(out)
    assert_close(outs[0], outs[1], rtol=0, atol=1e-3)


def test_heads_whose_sums_could_overflow_are_refused(native: NativeBackend) -> None:
    with pytest.raises(ConfigError, match="heads of up to 1024 in int8; head_dim is 1040"):
        native.allocate_kv(kv_shape(attention_shape(1, 1, 1040), 1, INT8))


def test_the_largest_sums_do_not_overflow(native: NativeBackend) -> None:
    """Heads of 1024 whose numbers are all as large as can be, of either sign."""
    shape = attention_shape(1, 1, 1024)
    qkv = torch.ones(260, qkv_width(shape))
    qkv[::2, 1024:] = -1
    assert_close(whole(native, shape, qkv), whole(DEFINITION, shape, qkv), rtol=0, atol=2e-3)
