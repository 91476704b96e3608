"""Products and attention in bfloat16 by the tiles of AMX, on hardware or emulated, from the kernels' own source.

Oracle: a model of tdpbf16ps in numpy, bit for bit. Its multiply-adds are rounded from float64 to float32,
which is one rounding in effect: a product of bfloat16 values is a float32, and 53 bits are more than twice 24.

Bugs these tests have been seen to catch: the last rows of a tile left out, and rows read beyond the last; the
rest of a depth not padded, or taken from the next panel; a stretch of depth that begins at 0 again or at the
first values; a configuration of the block before; rows at the distance of another tensor; odd and even places in
one chain; denormal numbers kept; tiles of values that begin at a window or hold the neighbour's; weights that do
not move with them; stale weights, values, keys and queries beside them.
"""

import ctypes
import math
import mmap
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from faser.kernels.cpu import library
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import Isa, runnable_isas
from faser.kernels.interface.shapes import AttentionShape
from tests.kernels.conftest import LibraryOf
from tests.kernels.layouts import (
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

Floats = npt.NDArray[np.float32]
pytestmark = pytest.mark.skipif(Isa.AMX not in runnable_isas(), reason="neither has nor emulates tiles")


@pytest.fixture(scope="module")
def tiles(library_of: LibraryOf) -> NativeBackend:
    return NativeBackend(library_of(Isa.AMX), num_threads=2)


def flushed(x: Floats) -> Floats:
    """Denormal numbers as zeros of their sign."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x).astype(np.float32)


def multiply_add(a: Floats, b: Floats, c: Floats) -> Floats:
    with np.errstate(all="ignore"):
        return flushed((a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32))


def model(x: Floats, w: Floats, step: int = 32) -> Floats:
    """x [M, K] times w [N, K] transposed, as tdpbf16ps adds up: a chain of even and one of odd places a tile."""
    depth = -(-x.shape[1] // step) * step
    x, w = (flushed(np.pad(each, ((0, 0), (0, depth - each.shape[1])))) for each in (x, w))
    total = np.zeros((len(x), len(w)), np.float32)
    for first in range(0, depth, step):
        chains = np.zeros((2, *total.shape), np.float32)
        for k in range(first, first + step):
            chains[k % 2] = multiply_add(x[:, k, None], w[None, :, k], chains[k % 2])
        with np.errstate(all="ignore"):
            total = flushed(total + flushed(chains[0] + chains[1]))
    return total


def numbers(kind: str, *size: int) -> Tensor:
    """bfloat16: near 1; so small that products underflow; or any bits, infinities and NaN among them."""
    if kind == "any":
        return torch.randint(-(2**15), 2**15, size, dtype=torch.int16).view(torch.bfloat16)
    exponents = torch.randint(-4, 4, size) if kind == "near" else torch.randint(-80, -55, size)
    return (torch.randn(size) * 2.0**exponents).bfloat16()


def as_floats(x: Tensor) -> Floats:
    return x.float().numpy()


def same_bits(found: Floats, wanted: Floats) -> bool:
    """All alike; what is no number in one is none in the other."""
    return bool(np.all((found.view(np.int32) == wanted.view(np.int32)) | (np.isnan(found) & np.isnan(wanted))))


ROWS = (1, 2, 7, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65, 80)


@pytest.mark.parametrize("kind", ["near", "small", "any"])
@pytest.mark.parametrize("columns, depth", [(16, 62), (70, 96), (130, 66), (33, 2), (20, 1056), (16, 2080)])
def test_a_product_has_the_bits_of_the_instruction(
    tiles: NativeBackend, kind: str, columns: int, depth: int
) -> None:
    """Depths: less than a step, several, a rest after a longer one, more than one stretch and a rest of it.

    Rows lie in a wider tensor.
    """
    torch.manual_seed(0)
    weight, x = numbers(kind, columns, depth), numbers(kind, max(ROWS), depth + 20)[:, 6 : 6 + depth]
    packed, wanted = tiles.pack(weight), model(as_floats(x), as_floats(weight))
    for rows in ROWS:
        found = tiles.linear(x[-rows:], packed, torch.full((rows, columns), math.nan))
        assert same_bits(found.numpy(), wanted[-rows:]), rows


def test_rows_of_more_than_one_block_have_the_bits_they_have_alone(tiles: NativeBackend) -> None:
    torch.manual_seed(0)
    weight, x = numbers("near", 48, 160), numbers("near", 600, 160)
    packed = tiles.pack(weight)
    together = tiles.linear(x, packed, torch.empty(600, 48))
    for first, last in ((0, 1), (255, 258), (250, 283), (500, 600), (17, 290)):
        alone = tiles.linear(x[first:last], packed, torch.empty(last - first, 48))
        assert torch.equal(alone, together[first:last]), (first, last)


def attended(
    backend: NativeBackend,
    shape: AttentionShape,
    qkv: Tensor,
    *,
    block_size: int,
    cuts: Sequence[int],
    turned: bool = True,
) -> Tensor:
    """What attention gives for a sequence in steps that end at the cuts. Blocks are scattered, and full of NaN."""
    num_blocks = -(-len(qkv) // block_size)
    cache = backend.allocate_kv(kv_shape(shape, num_blocks, torch.bfloat16, block_size))
    table, angles = shuffled_table(1, num_blocks), rotary_angles(shape.head_dim) if turned else None
    everything = Span(sequence=0, start=0, rows=num_blocks * block_size)
    poison = torch.full((everything.rows, qkv_width(shape)), math.nan).bfloat16()
    step(backend, cache, shape, layout_of([everything], table), poison, block_size=block_size)
    found = []
    for first, end in pairwise(cuts):
        layout = layout_of([Span(sequence=0, start=first, rows=end - first)], table)
        found.append(step(backend, cache, shape, layout, qkv[first:end], angles, block_size))
    return torch.cat(found)


@pytest.mark.parametrize("rows", [1, 17, 40, 49])
def test_nothing_is_read_beyond_the_last_row(tiles: NativeBackend, rows: int) -> None:
    """The rows end where memory does."""
    depth, page = 96, mmap.PAGESIZE
    memory = mmap.mmap(-1, 4 * page)
    whole = np.frombuffer(memory, np.int16)
    libc = ctypes.CDLL(None, use_errno=True)
    address = whole.ctypes.data
    assert libc.mprotect(ctypes.c_void_p(address + 3 * page), ctypes.c_size_t(page), 0) == 0
    last = whole[3 * page // 2 - rows * depth : 3 * page // 2]
    last[:] = numbers("near", rows * depth).view(torch.int16).numpy()
    x, packed = (
        torch.from_numpy(last).view(torch.bfloat16).view(rows, depth),
        tiles.pack(numbers("near", 33, depth)),
    )
    found = tiles.linear(x, packed, torch.empty(rows, 33))
    assert torch.equal(found, tiles.linear(x.clone(), packed, torch.empty(rows, 33)))


@pytest.mark.parametrize("group, head_dim, window", [(1, 16, None), (3, 64, 41), (2, 80, None), (6, 128, 300)])
def test_attention_has_the_same_bits_for_every_size_of_blocks_and_of_steps(
    tiles: NativeBackend, group: int, head_dim: int, window: int | None
) -> None:
    torch.manual_seed(0)
    shape, tokens = attention_shape(group, 2, head_dim, window), 330
    qkv = torch.randn(tokens, qkv_width(shape)).bfloat16()
    whole = attended(tiles, shape, qkv, block_size=16, cuts=(0, tokens))
    for block_size in (16, 32, 48):
        for cuts in ((0, 64, 97, 200, tokens), (0, *range(250, 275), tokens)):
            assert torch.equal(attended(tiles, shape, qkv, block_size=block_size, cuts=cuts), whole)


@pytest.mark.parametrize("group, head_dim", [(40, 32), (2, 80), (3, 48)])
def test_attention_matches_the_formula(tiles: NativeBackend, group: int, head_dim: int) -> None:
    """More queries than two tiles hold, and heads that are no multiple of 32."""
    torch.manual_seed(0)
    shape = attention_shape(group, 1, head_dim)
    qkv = torch.randn(70, qkv_width(shape)).bfloat16()
    found = attended(tiles, shape, qkv, block_size=16, cuts=(0, 40, 41, 70), turned=False)
    assert_close(found.double(), naive_attention(qkv, shape), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("window", [None, 41])
def test_nothing_that_earlier_steps_left_is_multiplied(library_of: LibraryOf, window: int | None) -> None:
    """Weights of 0 times NaN would not be 0: neither stale values, nor weights, nor the rest of a width get in."""
    backend = NativeBackend(library_of(Isa.AMX), num_threads=1)
    torch.manual_seed(0)
    shape, tokens = attention_shape(2, 2, 80, window), 139
    qkv = torch.randn(tokens, qkv_width(shape)).bfloat16()
    cuts = (0, 50, 51, 60, 61, 120, tokens)
    before = attended(backend, shape, qkv, block_size=16, cuts=cuts)
    other = attention_shape(2, 2, 112)
    attended(
        backend, other, torch.full((300, qkv_width(other)), math.nan).bfloat16(), block_size=16, cuts=(0, 300)
    )
    assert not before.isnan().any()
    assert torch.equal(attended(backend, shape, qkv, block_size=16, cuts=cuts), before)


@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("window", [None, 41, 48])
def test_values_are_added_up_in_tiles_of_16_positions(
    tiles: NativeBackend, head_dim: int, window: int | None
) -> None:
    """Queries of zeros weigh all keys alike: the sum of values remains, in the order of the instruction."""
    torch.manual_seed(0)
    shape, tokens = attention_shape(1, 1, head_dim, window), 250
    qkv = torch.randn(tokens, qkv_width(shape)).bfloat16()
    qkv[:, :head_dim] = 0
    found = attended(tiles, shape, qkv, block_size=16, cuts=(0, 100, 101, 177, tokens))
    values = as_floats(qkv[:, -head_dim:])
    rows, columns = np.arange(tokens)[:, None], np.arange(tokens)
    seen = (columns <= rows) & (columns > rows - (window or tokens))
    scale = (np.float32(1) / seen.sum(1).astype(np.float32))[:, None]
    wanted = torch.from_numpy(model(seen.astype(np.float32), values.T.copy(), step=16) * scale).bfloat16()
    assert torch.equal(found, wanted)


def test_tiles_that_do_not_work_are_emulated_and_the_log_says_why(
    library_of: LibraryOf, caplog: pytest.LogCaptureFixture
) -> None:
    """On a CPU without tiles; where there are some, the hardware computes."""
    loaded = library.load(library_of(Isa.AMX))
    library.use_tiles(loaded)
    if runnable_isas()[0] is Isa.AMX:
        assert not caplog.messages
    else:
        assert "tiles of AMX are emulated, because the system refuses them" in caplog.text


@pytest.mark.skipif(runnable_isas()[0] is not Isa.AMX, reason="this CPU has no tiles")
def test_the_hardware_gives_the_bits_of_the_emulation(tiles: NativeBackend, library_of: LibraryOf) -> None:
    loaded = library.load(library_of(Isa.AMX))
    torch.manual_seed(0)
    weight, x = numbers("any", 70, 130), numbers("any", 80, 130)
    packed, found = tiles.pack(weight), []
    for kind in (library.HARDWARE_TILES, library.EMULATED_TILES):
        loaded.faser_use_tiles(kind)
        found.append(tiles.linear(x, packed, torch.empty(80, 70)).numpy())
    loaded.faser_use_tiles(library.HARDWARE_TILES)
    assert same_bits(*found)
