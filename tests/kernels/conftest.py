"""Backends over the native kernels, which are compiled once and kept between test runs."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import COMPILERS, Isa, library_path, runnable_isas

LibraryOf = Callable[[Isa], Path]
_QUICK = Path(__file__).with_name("quick_compiler.sh")


def tested_isas() -> list[Isa]:
    """What this CPU runs best, tiles (perhaps emulated), and the widest set without instructions for bfloat16."""
    runnable = runnable_isas()
    wide = (Isa.AMX, Isa.AVX512_BF16, Isa.AVX512_VNNI, Isa.AVX512, Isa.AVX2_VNNI)
    tiles = [Isa.AMX] if Isa.AMX in runnable else []
    return list(dict.fromkeys([runnable[0], *tiles, *([Isa.AVX2] if runnable[0] in wide else [])]))


# Sets that this CPU may have besides those of the fixture `native`, with the features that decide.
_OTHERS = {Isa.AVX512: ("avx512f", "avx512bw"), Isa.AVX2_VNNI: ("avx_vnni", "f16c"), Isa.GENERIC: ()}


def other_isas() -> list[Isa]:
    cpuinfo = Path("/proc/cpuinfo")
    features = cpuinfo.read_text().split() if cpuinfo.exists() else []
    return [isa for isa, needed in _OTHERS.items() if set(needed) <= set(features)]


@pytest.fixture(scope="session")
def library_of(kernel_cache: Path, full: bool) -> LibraryOf:
    """Return the library for an instruction set.

    Those that this CPU would not choose are compiled in a third of the time, unless with --full: to the same bits,
    as no flag lets the compiler reorder what the source says.
    """

    def compiled(isa: Isa) -> Path:
        quick = not full and isa is not runnable_isas()[0] and shutil.which("c++") is not None
        return library_path(isa, cache_dir=kernel_cache, compilers=(str(_QUICK),) if quick else COMPILERS)

    return compiled


@pytest.fixture(scope="session", params=tested_isas())
def native(request: pytest.FixtureRequest, library_of: LibraryOf) -> NativeBackend:
    """A backend of two threads for every instruction set worth testing here."""
    return NativeBackend(library_of(request.param), num_threads=2)


@pytest.fixture(scope="session")
def native_alone(kernel_cache: Path) -> NativeBackend:
    """A backend of one thread, on the best instruction set."""
    return NativeBackend(library_path(cache_dir=kernel_cache), num_threads=1)


@pytest.fixture
def seeded() -> None:
    """The same random tensors in every test."""
    torch.manual_seed(0)
