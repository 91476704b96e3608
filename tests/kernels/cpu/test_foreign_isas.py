"""Low-bit products of an aarch64 CPU under emulation. Oracle: their definition, bit for bit.

Needs the package ziglang and the program qemu-aarch64. A case, as foreign_products.cpp reads it: nine int64
numbers, the blocks, the activations in float32; its result is the product in float32.

Bugs these tests have been seen to catch: codes of eight bits that are not lowered for the signed instruction, sums
that do not start with what that leaves out.
"""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from faser.kernels.cpu.build import SOURCE_DIR, Isa, compiler_flags
from faser.kernels.cpu.low_bit import factors_of
from faser.kernels.interface.low_bit.formats import FORMATS
from faser.kernels.interface.low_bit.rows import BlockRows, LowBitRows
from faser.kernels.torch_backend import TorchBackend
from tests.kernels.interface.low_bit.blocks import random_blocks

QEMU = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
FLAGS = ("-O3", "-std=c++17", "-pthread", "-ffp-contract=off", "-fno-math-errno")
COLUMNS, DEPTHS = 37, (512, 768)
SMALL_DEPTHS = (32, 96, 352)  # of formats in blocks of 32


def compiled(isa: Isa, folder: Path) -> Path:
    """A static program, so that the emulator needs no libraries of that CPU.

    It is linked without the flags of the instruction set: zig compiles its C++ library once for every set of flags
    (a minute, kept in its cache), so all programs share one.
    """
    zig = (sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-musl")
    sources = [SOURCE_DIR / name for name in ("low_bit/product.cpp", "low_bit/pack.cpp", "linear.cpp")]
    objects: list[str] = []
    for source in (Path(__file__).with_name("foreign_products.cpp"), *sources):
        objects.append(str(folder / f"{source.stem}.o"))
        flags = (*FLAGS, *compiler_flags(isa), f"-I{SOURCE_DIR}")
        subprocess.run([*zig, *flags, "-c", str(source), "-o", objects[-1]], check=True)
    program = folder / "products"
    subprocess.run([*zig, "-static", *objects, "-o", str(program)], check=True)
    return program


def case(weight: LowBitRows, x: npt.NDArray[np.float32]) -> bytes:
    part, (columns, depth) = weight.parts[0], weight.shape
    assert isinstance(part, BlockRows)
    found = part.format
    flags = (found.form, found.zero_point, factors_of(found), found.has_minimums)
    numbers = (found.number, *flags, columns, depth, len(x), part.blocks.nbytes)
    return np.array(numbers, np.int64).tobytes() + part.blocks.tobytes() + x.tobytes()


@pytest.mark.slow
@pytest.mark.skipif(QEMU is None, reason="qemu-aarch64 is not installed")
@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="the package ziglang is not installed")
@pytest.mark.parametrize("isa", [Isa.DOTPROD, Isa.GENERIC])
def test_an_aarch64_cpu_gives_the_same_bits(isa: Isa, tmp_path: Path) -> None:
    """Slow: compiles, and emulates."""
    assert QEMU is not None
    rng = np.random.default_rng(0)
    given, wanted = [], []
    for seed, (name, found) in enumerate(FORMATS.items()):
        for depth in DEPTHS if found.values > 32 else (*SMALL_DEPTHS, *DEPTHS):
            for rows in (1, 2, 5, 13):
                weight = random_blocks(name, COLUMNS, depth, seed=seed)
                x = (rng.normal(size=(rows, depth)) * np.exp(rng.normal(size=(rows, depth)))).astype(np.float32)
                given.append(case(weight, x))
                backend = TorchBackend()
                out = torch.empty(rows, COLUMNS)
                wanted.append(backend.linear(torch.from_numpy(x), backend.pack(weight), out).numpy())
    program = compiled(isa, tmp_path)
    done = subprocess.run(
        [QEMU, "-cpu", "max", str(program)], input=b"".join(given), capture_output=True, check=True
    )
    found_bits = np.frombuffer(done.stdout, np.float32)
    assert np.array_equal(found_bits, np.concatenate([each.ravel() for each in wanted]))
