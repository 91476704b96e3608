"""Low-bit products, and attention over int8, by tiles of bytes: on the hardware, or emulated where there is none.

Oracles: the definition of low-bit products; and VNNI, which the same library uses where tiles do not pay. Bits are
the same in all, so a test that compares has to have as many rows as make tiles pay.

Bugs these tests have been seen to catch: a last tile of rows that begins at the next multiple, whose first
rows are added twice, or that is a row short; a group of a short span left out, or its scales read where those
of a whole span lie; the configuration of whole tiles or of other groups; x, keys or values at another stride;
the scale of the neighbouring group, chunk or span; minimums of the group before, and sums without their
scales; sums of the job before overwritten, or stored by another tile; codes that are no signed bytes; more
rows than a block without tiles holds; another panel's bias; signed bytes for unsigned ones; stale weights
beside the last; offsets and units of the first rows for others; chunks taken for neighbours; tiles as deep as
the head is not.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from faser.kernels.cpu import library
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import Isa, runnable_isas
from faser.kernels.interface.low_bit.formats import FORMATS
from faser.kernels.interface.low_bit.rows import (
    INT4,
    INT8,
    FloatRows,
    LowBitRows,
    Scheme,
    group_rows,
    stack_low_bit,
)
from faser.kernels.interface.shapes import AttentionShape
from tests.kernels.conftest import LibraryOf
from tests.kernels.cpu.test_blocks import HIDDEN
from tests.kernels.cpu.test_experts import added, experts_of, with_shared
from tests.kernels.cpu.test_low_bit import DEFINITION, GROUPS, product, random
from tests.kernels.interface.low_bit.blocks import extreme_blocks, random_blocks
from tests.kernels.interface.low_bit.group_weights import random_groups
from tests.kernels.layouts import Span, attention_shape, kv_shape, layout_of, qkv_width, shuffled_table, step

pytestmark = pytest.mark.skipif(Isa.AMX not in runnable_isas(), reason="neither has nor emulates tiles")
TILES = library.HARDWARE_TILES if runnable_isas()[0] is Isa.AMX else library.ALL_EMULATED_TILES
ROWS = (1, 11, 12, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 79)


@pytest.fixture(scope="module")
def tiles(library_of: LibraryOf) -> Iterator[NativeBackend]:
    backend = NativeBackend(library_of(Isa.AMX), num_threads=2)
    yield backend
    library.use_tiles(backend._library)


@pytest.fixture(autouse=True)
def _in_tiles(tiles: NativeBackend) -> None:
    tiles._library.faser_use_tiles(TILES)


def without_tiles(tiles: NativeBackend, x: Tensor, weight: LowBitRows) -> Tensor:
    tiles._library.faser_use_tiles(library.EMULATED_TILES)
    found = product(tiles, x, weight, torch.empty(len(x), weight.shape[0]))
    tiles._library.faser_use_tiles(TILES)
    return found


def defined(x: Tensor, weight: LowBitRows, bias: Tensor | None = None) -> Tensor:
    return product(DEFINITION, x, weight, torch.empty(len(x), weight.shape[0]), bias)


def check_every_number_of_rows(tiles: NativeBackend, weight: LowBitRows, bias: Tensor | None = None) -> None:
    x, columns = random(max(ROWS), weight.shape[1]), weight.shape[0]
    packed, wanted = tiles.pack(weight, bias), defined(x, weight, bias)
    for rows in ROWS:
        found = tiles.linear(x[-rows:], packed, torch.full((rows, columns), math.nan))
        assert torch.equal(found, wanted[-rows:]), rows


@pytest.mark.parametrize("name", FORMATS)
def test_a_product_has_the_bits_of_its_definition(tiles: NativeBackend, name: str) -> None:
    """Of spans whose scales are another's; the last panels are short and empty."""
    check_every_number_of_rows(tiles, random_blocks(name, 70, 768))


@pytest.mark.parametrize("depth", [32, 96, 128, 160, 288, 480, 800])
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"])
def test_depths_that_end_within_a_span_or_a_stretch_are_whole(tiles: NativeBackend, name: str, depth: int) -> None:
    """The product before leaves sums and scales of a whole span."""
    product(tiles, random(64, 512), random_blocks(name, 16, 512), torch.empty(64, 16))
    check_every_number_of_rows(tiles, random_blocks(name, 17, depth))


@pytest.mark.parametrize("bits, options", GROUPS)
def test_codes_with_scales_have_the_bits_of_their_definition(
    tiles: NativeBackend, bits: int, options: dict[str, Any]
) -> None:
    check_every_number_of_rows(tiles, random_groups(bits, 40, 768, **options), random(40, seed=3))


@pytest.mark.parametrize("depth", [96, 576])
@pytest.mark.parametrize("bits", [4, 8])
def test_one_scale_a_row_reaches_the_end_of_a_short_span(tiles: NativeBackend, bits: int, depth: int) -> None:
    check_every_number_of_rows(tiles, random_groups(bits, 33, depth, group_size=depth, has_minimums=True))


@pytest.mark.parametrize("scheme", [INT8, INT4], ids=["int8", "int4"])
def test_weights_that_are_rounded_while_packed_have_the_bits_of_their_definition(
    tiles: NativeBackend, scheme: Scheme
) -> None:
    check_every_number_of_rows(tiles, LowBitRows(parts=(FloatRows(weight=random(37, 576), scheme=scheme),)))


def test_parts_of_several_formats_are_one_product(tiles: NativeBackend) -> None:
    weight = stack_low_bit([random_blocks(name, 21 + n, 256, seed=n) for n, name in enumerate(FORMATS)])
    check_every_number_of_rows(tiles, weight, random(weight.shape[0], seed=5))


@pytest.mark.parametrize("zero_point", [0, 100, 129, 200])
def test_codes_that_are_no_signed_bytes_keep_their_bits(tiles: NativeBackend, zero_point: int) -> None:
    """Not in tiles: 255 less 0 is no signed byte, nor is 0 less 129. Rows are more than a block without tiles."""
    rng = np.random.default_rng(0)
    codes, scales = rng.integers(0, 256, (20, 96), np.uint8), rng.uniform(0.005, 0.02, (20, 3)).astype(np.float32)
    part = group_rows(codes, bits=8, zero_point=zero_point, scales=scales)
    weight = stack_low_bit([random_blocks("Q4_0", 30, 96), LowBitRows(parts=(part,))])
    x = random(150, 96)
    assert torch.equal(product(tiles, x, weight, torch.empty(150, 50)), defined(x, weight))


@pytest.mark.parametrize("name", FORMATS)
def test_the_largest_codes_scales_and_activations_overflow_nothing(tiles: NativeBackend, name: str) -> None:
    x = torch.randint(120, 128, (64, 256), generator=torch.Generator().manual_seed(0)).float()
    x[:, ::32] = 127
    x[1::3] *= -1
    x[2::3, ::2] *= -1
    x[5], x[6] = 127, -127
    for fill in (0x00, 0xFF):
        weight = extreme_blocks(name, 16, 256, fill)
        assert torch.equal(product(tiles, x, weight, torch.empty(64, 16)), defined(x, weight))


@pytest.mark.parametrize("rows", [257, 300, 530])
@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q8_0", "Q6_K"])
def test_rows_of_more_than_one_block_have_their_bits(tiles: NativeBackend, name: str, rows: int) -> None:
    weight, x = random_blocks(name, 35, 512), random(rows, 512)
    found = product(tiles, x, weight, torch.empty(rows, 35))
    assert torch.equal(found, without_tiles(tiles, x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Q4_0", "Q6_K"])
def test_bias_and_residual_are_added_before_the_one_rounding(
    tiles: NativeBackend, name: str, dtype: torch.dtype
) -> None:
    weight, bias = random_blocks(name, 40, 256), random(40, seed=1)
    x, residual = random(67, 256).to(dtype), random(67, 40, seed=2).to(dtype)
    wide = torch.zeros(67, 60, dtype=dtype)
    found = product(tiles, x, weight, wide[:, 10:50], bias, residual=residual)
    wanted = product(DEFINITION, x, weight, torch.empty(67, 40, dtype=dtype), bias, residual=residual)
    assert torch.equal(found, wanted)
    assert not wide[:, :10].any()
    assert not wide[:, 50:].any()


def test_a_row_that_is_no_number_leaves_the_others_alone(tiles: NativeBackend) -> None:
    """Neither a row of the same tile, nor those of the next, gets any of it."""
    weight, x = random_blocks("Q4_0", 33, 512), random(70, 512)
    x[13, 300] = math.nan
    found = product(tiles, x, weight, torch.empty(70, 33))
    assert found[13].isnan().all()
    x[13] = 0
    others = torch.arange(70) != 13
    assert torch.equal(found[others], defined(x, weight)[others])


@pytest.mark.parametrize("form", ["Q4_0", "Q8_0", "MXFP4"])
@pytest.mark.parametrize("shared", [False, True])
def test_experts_have_the_bits_they_have_without_tiles(tiles: NativeBackend, form: str, shared: bool) -> None:
    """Some groups of rows are large enough for tiles, others are not, and the shared expert's is."""
    block = experts_of(tiles, torch.float32, form, renormalise=True)
    block = with_shared(block, tiles, torch.float32, form) if shared else block
    for rows in (20, 60, 300):
        x = random(rows, HIDDEN, seed=7)
        found = added(tiles, block, x)
        tiles._library.faser_use_tiles(library.EMULATED_TILES)
        assert torch.equal(found, added(tiles, block, x)), rows
        tiles._library.faser_use_tiles(TILES)


def attended(
    tiles: NativeBackend,
    shape: AttentionShape,
    qkv: Tensor,
    cuts: Sequence[int],
    *,
    kind: int = TILES,
    block_size: int = 16,
    scattered: bool = True,
) -> Tensor:
    """What attention gives for a sequence in steps that end at the cuts. The cache is full of NaN first."""
    tiles._library.faser_use_tiles(kind)
    num_blocks = -(-len(qkv) // block_size)
    cache = tiles.allocate_kv(kv_shape(shape, num_blocks, torch.int8, block_size))
    table = shuffled_table(1, num_blocks) if scattered else torch.arange(num_blocks, dtype=torch.int32)[None]
    everything = layout_of([Span(sequence=0, start=0, rows=num_blocks * block_size)], table)
    poison = torch.full((num_blocks * block_size, qkv_width(shape)), math.nan, dtype=qkv.dtype)
    step(tiles, cache, shape, everything, poison, block_size=block_size)
    found = []
    for first, end in pairwise(cuts):
        layout = layout_of([Span(sequence=0, start=first, rows=end - first)], table)
        found.append(step(tiles, cache, shape, layout, qkv[first:end], block_size=block_size))
    return torch.cat(found)


HEADS = [
    (1, 1, 16, None),
    (3, 2, 64, None),
    (1, 2, 80, 41),
    (8, 1, 128, 300),
    (5, 1, 112, None),
    (2, 1, 160, 17),
    (2, 1, 256, None),
    (17, 1, 48, None),
    (40, 1, 32, None),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group, num_kv_heads, head_dim, window", HEADS)
def test_attention_over_int8_has_the_bits_it_has_without_tiles(
    tiles: NativeBackend, group: int, num_kv_heads: int, head_dim: int, window: int | None, dtype: torch.dtype
) -> None:
    """Depths of one tile, of several and of low ones. Steps of rows that need one tile, two or three, or none."""
    torch.manual_seed(0)
    shape, tokens = attention_shape(group, num_kv_heads, head_dim, window), 330
    qkv = torch.randn(tokens, qkv_width(shape)).to(dtype)
    wanted = attended(tiles, shape, qkv, (0, tokens), kind=library.EMULATED_TILES)
    assert not wanted.isnan().any()
    for cuts in ((0, tokens), (0, 7, 20, 37, 39, 100, 255, 259, 300, tokens), (0, 64, *range(65, 75), tokens)):
        assert torch.equal(attended(tiles, shape, qkv, cuts), wanted), cuts


@pytest.mark.parametrize("block_size", [16, 48, 64, 128])
@pytest.mark.parametrize("scattered", [False, True])
def test_values_are_read_in_tiles_wherever_blocks_lie(
    tiles: NativeBackend, block_size: int, scattered: bool
) -> None:
    """Tiles of 64 tokens lie together in larger blocks, and begin anywhere in them with a window."""
    torch.manual_seed(0)
    for head_dim, window in ((64, None), (128, 70)):
        shape = attention_shape(4, 2, head_dim, window)
        qkv = torch.randn(400, qkv_width(shape))
        wanted = attended(tiles, shape, qkv, (0, 400), kind=library.EMULATED_TILES)
        cuts = (0, 30, 31, 200, 256, 400)
        assert torch.equal(
            attended(tiles, shape, qkv, cuts, block_size=block_size, scattered=scattered), wanted
        ), window


def test_the_largest_sums_over_int8_do_not_overflow(tiles: NativeBackend) -> None:
    """Heads of 1024 whose numbers are all as large as can be, of either sign."""
    shape = attention_shape(1, 1, 1024)
    qkv = torch.ones(260, qkv_width(shape))
    qkv[::2, 1024:] = -1
    wanted = attended(tiles, shape, qkv, (0, 260), kind=library.EMULATED_TILES)
    assert torch.equal(attended(tiles, shape, qkv, (0, 260)), wanted)


def test_rows_that_see_no_number_are_none_and_the_others_keep_their_bits(tiles: NativeBackend) -> None:
    shape = attention_shape(4, 1, 64)
    torch.manual_seed(0)
    qkv = torch.randn(100, qkv_width(shape))
    wanted = attended(tiles, shape, qkv, (0, 100))
    qkv[20, 5], qkv[60, 4 * 64 + 5] = math.nan, math.inf
    found = attended(tiles, shape, qkv, (0, 100))
    none = torch.zeros(100, 4 * 64, dtype=torch.bool)
    none[20, :64], none[60:] = True, True
    assert torch.equal(found.isnan(), none)
    assert torch.equal(found[~none], wanted[~none])


@pytest.mark.parametrize(
    ("name", "edges"),
    [
        ("Q4_0", (6, 11, *range(16, 96, 16))),
        ("Q4_K", (6, 11, *range(16, 96, 16))),
        ("Q8_0", (*range(6, 63, 6), 63, 64, 80)),
        ("Q6_K", (*range(6, 63, 6), 63, 64, 80)),
    ],
)
def test_edges_are_where_tiles_begin_and_where_they_take_over(
    name: str, edges: tuple[int, ...], library_of: LibraryOf
) -> None:
    """The form that most weights have decides. Planted bug: the last one does."""
    backend = NativeBackend(library_of(Isa.AMX), num_threads=1)
    backend._library.faser_use_tiles(TILES)
    assert backend.row_edges(96) == ()
    backend.pack(stack_low_bit([random_blocks(name, 32, 256), random_blocks("Q5_0", 16, 256)]))
    backend.pack(random_blocks("Q4_0" if name.startswith(("Q6", "Q8")) else "Q8_0", 16, 256))
    assert backend.row_edges(96) == edges
