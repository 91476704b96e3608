"""Which compiled modules of FlashInfer a model needs, which of them exist, and how long the others take.

Knows how FlashInfer names its modules and where it looks for them, both read in its sources. Imports neither
FlashInfer nor torch. build.py compiles modules ahead of time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from faser.kernels.cuda.flashinfer.build import (
    FP8_MODULES,
    MODULES,
    VERSION,
    WINDOW_MODULES,
    modules_dir,
)

_TYPES = {"bfloat16": "bf16", "float16": "f16"}
_FP8 = "e4m3"
# Approximate seconds to compile, for one arch on one core; docs/gpu.md has the measurements.
_SECONDS = {"decode": 29, "prefill": 123}


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Attention:
    """A kind of attention that modules are compiled for. dtype: of queries and results, without "torch.".

    fp8: keys and values are 8-bit floats; else they have the dtype of queries.
    decodes: single rows use a kernel of their own, without tensor cores.
    """

    head_dim: int
    window: bool
    dtype: str
    fp8: bool
    decodes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """name: as in build.py, such as decode_64, decode_64_window or decode_64_fp8. dtype: see Attention."""

    name: str
    dtype: str = "bfloat16"

    @property
    def own_name(self) -> str:
        """FlashInfer's name of the module: of its folder and of the file in it."""
        kind, size, *options = self.name.split("_")
        letters = _TYPES[self.dtype]
        stored = _FP8 if "fp8" in options else letters
        window = "window" in options
        types = f"dtype_q_{letters}_dtype_kv_{stored}_dtype_o_{letters}_dtype_idx_i32"
        shape = f"head_dim_qk_{size}_head_dim_vo_{size}_posenc_0_use_swa_{window}_use_logits_cap_False"
        name = f"batch_{kind}_with_kv_cache_{types}_{shape}"
        return f"{name}_f16qk_False_kv_stride_equal" if kind == "prefill" else name

    @property
    def label(self) -> str:
        return self.name if self.dtype == "bfloat16" else f"{self.name} of {self.dtype}"

    @property
    def seconds(self) -> int:
        """Approximate time to compile it on one core."""
        return _SECONDS[self.name.partition("_")[0]]

    def is_in(self, folders: Sequence[Path]) -> bool:
        return any((folder / self.own_name / f"{self.own_name}.so").exists() for folder in folders)


def needed_modules(attention: Iterable[Attention]) -> tuple[Module, ...]:
    """The modules that models with these kinds of attention call."""
    found = {}
    for each in sorted(set(attention)):
        suffix = ("_window" if each.window else "") + ("_fp8" if each.fp8 else "")
        kinds = ("prefill", "decode") if each.decodes else ("prefill",)
        for name in (f"{kind}_{each.head_dim}{suffix}" for kind in kinds):
            found[f"{name} {each.dtype}"] = Module(name=name, dtype=each.dtype)
    return tuple(found.values())


def known_modules() -> tuple[Module, ...]:
    """All modules that a supported model can need."""
    names = MODULES + WINDOW_MODULES + FP8_MODULES
    return tuple(Module(name=name, dtype=dtype) for dtype in _TYPES for name in names)


def precompiled_folders(kernels: Path, arch: str) -> tuple[Path, ...]:
    """The folders in which FlashInfer looks for modules compiled ahead of time; they may not exist.

    kernels: the folder of compiled kernels; its modules replace those that came with FlashInfer.
    """
    own = modules_dir(kernels, arch)
    spec = None if own.exists() else find_spec("flashinfer")
    packaged = () if spec is None else spec.submodule_search_locations or ()
    return (own, *(Path(place) / "data" / "aot" for place in packaged))


def folder_of_compiled(workspace: Path, arch: str) -> Path:
    """The folder of modules that FlashInfer compiles at their first call, ignored if compiling is disabled.

    workspace: the folder that FLASHINFER_WORKSPACE_BASE names.
    """
    return workspace / ".cache" / "flashinfer" / VERSION / arch.replace(".", "") / "cached_ops"


def package_of_modules() -> bool:
    """Whether a package of compiled modules is installed. Only FlashInfer knows which modules it holds."""
    return find_spec("flashinfer_jit_cache") is not None


def compile_time(modules: Sequence[Module]) -> str:
    """The approximate time to compile them one after the other, as text."""
    minutes = round(sum(each.seconds for each in modules) / 60)
    return f"about {minutes} minutes" if minutes > 1 else "about a minute"
