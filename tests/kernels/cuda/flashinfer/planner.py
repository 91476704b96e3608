"""FlashInfer's planner of the prefill kernel, run without a GPU: host code of a compiled module.

It asks the CUDA runtime for the number of processors and for copies, so a stand-in of that is loaded first, under
its name (cuda_runtime.c). Needs a compiler, the module and FlashInfer; see `missing`.
"""

import ctypes
import subprocess
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from shutil import which
from typing import Any

import torch
from torch import Tensor

from faser.config.environment import cache_dir
from faser.kernels.cuda.flashinfer.build import modules_dir

HEAD_DIM = 128
MODULE = (
    "batch_prefill_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_head_dim_qk_128_head_dim_vo_128"
    "_posenc_0_use_swa_False_use_logits_cap_False_f16qk_False_kv_stride_equal"
)
MODULES = modules_dir(cache_dir() / "kernels", "9.0a")
PAGE_SIZE = 16
_SOURCE = Path(__file__).with_name("cuda_runtime.c")
_CHUNK_SIZE_AT, _SPLIT_AT = 9, 14  # in what a plan returns: where the size of pieces is, and whether there are any


def missing() -> str:
    """What is not there, if anything."""
    if find_spec("flashinfer") is None:
        return "flashinfer is not installed"
    if which("gcc") is None:
        return "there is no gcc"
    if torch.version.cuda is not None:
        return "torch brings the CUDA runtime itself"
    if not module_file().exists():
        return "not compiled: faser env --build-kernels --arch 9.0a --only prefill_128"
    return ""


def module_file() -> Path:
    return MODULES / MODULE / f"{MODULE}.so"


def stand_in(folder: Path) -> ctypes.CDLL:
    """The runtime, compiled into a folder. Whatever is loaded from now on and wants the runtime gets this one."""
    library, versions = folder / "libcudart.so.13", folder / "versions"
    versions.write_text("libcudart.so.13 { global: *; };")
    flags = ["-shared", "-fPIC", f"-Wl,-soname,{library.name}", f"-Wl,--version-script={versions}"]
    subprocess.run(["gcc", *flags, "-o", str(library), str(_SOURCE)], check=True)
    return ctypes.CDLL(str(library))


@dataclass(frozen=True, kw_only=True)
class Layout:
    """rows, pages: of every sequence. most_rows: of a captured graph; None: an eager plan.

    rows_each: that every sequence of every plan has; 0: any number. head_dim: any that a module could have.
    decodes: planned by FlashInfer's wrapper for decoding, where every sequence always has one row.
    """

    rows: tuple[int, ...]
    pages: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    most_rows: int | None = None
    window_left: int = -1
    rows_each: int = 0
    head_dim: int = HEAD_DIM
    decodes: bool = False


@dataclass(frozen=True, kw_only=True)
class Plan:
    """launch_arguments: the numbers of the plan that enter a launch. chunk_tokens: of the pieces of a sequence.

    bytes: of a workspace. numbers: the beginning of the plan, as bytes.
    """

    launch_arguments: tuple[int, ...]
    chunk_tokens: int
    bytes: int
    numbers: Tensor = field(compare=False)

    def blocks(self) -> list[tuple[int, int, int]]:
        """Sequence, tile of its rows and piece of its positions of every block that has work."""
        count, at = self.grid, self.launch_arguments
        columns = [self.numbers[at[i] : at[i] + 4 * count].view(torch.int32).tolist() for i in (4, 5, 6)]
        valid = self.numbers[at[12] : at[12] + count].tolist()
        return [each for each, works in zip(zip(*columns, strict=True), valid, strict=True) if works]

    @property
    def grid(self) -> int:
        """Blocks a KV head."""
        return self.launch_arguments[0]

    @property
    def splits(self) -> bool:
        return bool(self.launch_arguments[_SPLIT_AT])


class Planner:
    """Plan for a device of num_processors processors."""

    def __init__(self, folder: Path) -> None:
        self._runtime = stand_in(folder)
        self._module: Any = import_module("tvm_ffi").load_module(str(module_file()))
        self._floats = torch.empty(1 << 30, dtype=torch.uint8)
        self._numbers, self._staging = (torch.empty(8 << 20, dtype=torch.uint8) for _ in range(2))

    def plan(self, layout: Layout, *, colocated: int = 0, num_processors: int = 132) -> Plan:
        ctypes.c_int.in_dll(self._runtime, "processors").value = num_processors
        arguments = (
            _starts(layout.rows),
            _starts(layout.pages),
            torch.ones(len(layout.rows), dtype=torch.int32),
            layout.most_rows or sum(layout.rows),
            len(layout.rows),
            layout.num_heads,
            layout.num_kv_heads,
            PAGE_SIZE,
            layout.most_rows is not None,
            layout.head_dim,
            layout.head_dim,
            True,
            layout.window_left,
            -1,
            False,
            colocated,
            1 if layout.decodes else layout.rows_each,
            layout.decodes,
        )
        launch_arguments = tuple(self._module.plan(self._floats, self._numbers, self._staging, *arguments))
        num_bytes, _ = self._module.workspace_size(self._floats, *arguments)
        at = launch_arguments[_CHUNK_SIZE_AT]
        chunk_tokens = int(self._numbers[at : at + 4].view(torch.int32))
        return Plan(
            launch_arguments=launch_arguments,
            chunk_tokens=chunk_tokens,
            bytes=num_bytes,
            numbers=self._staging[: 1 << 16].clone(),
        )


def _starts(counts: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
