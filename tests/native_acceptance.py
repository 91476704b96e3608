"""Native estimates of acceptance for tests that build a control plane."""

import ctypes
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from faser.engine.control.speculation.acceptance import Acceptance
from faser.kernels.cpu.acceptance import CompiledAcceptance
from faser.kernels.cpu.text_index import text_library

_KERNELS = (
    Path(__file__).parents[1] / ".pytest_cache" / "d" / "native-kernels"
)  # where pytest keeps what tests compile


def make_native(arrays: Mapping[str, NDArray[Any]], numbers: Mapping[str, float]) -> CompiledAcceptance:
    """See MakeNativeAcceptance."""
    return CompiledAcceptance(_library(), arrays, numbers)


def native_acceptance(num_slots: int, cap: int) -> Acceptance:
    return Acceptance(num_slots, cap, make_native)


@functools.cache
def _library() -> ctypes.CDLL:
    return text_library(_KERNELS)
