"""Backends over the native kernels, which are compiled once and kept between test runs."""

from pathlib import Path

import pytest
import torch

from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import Isa, library_path, runnable_isas


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


@pytest.fixture(scope="session", params=tested_isas())
def native(request: pytest.FixtureRequest, kernel_cache: Path) -> NativeBackend:
    """A backend of two threads for every instruction set worth testing here."""
    return NativeBackend(library_path(request.param, cache_dir=kernel_cache), num_threads=2)


@pytest.fixture(scope="session")
def native_alone(kernel_cache: Path) -> NativeBackend:
    """A backend of one thread, on the best instruction set."""
    return NativeBackend(library_path(cache_dir=kernel_cache), num_threads=1)


@pytest.fixture
def seeded() -> None:
    """The same random tensors in every test."""
    torch.manual_seed(0)
