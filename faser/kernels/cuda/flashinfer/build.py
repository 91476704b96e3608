"""FlashInfer's CUDA modules: which a model needs, which exist, and compiling them ahead of time, without a GPU.

Owns the list of modules that the flashinfer backend loads, their names and places, the call of the compiler. The
results are in DIR/NAME/NAME.so, where FlashInfer looks for modules before it compiles any. Existing modules are
kept, so an interrupted build continues where it stopped. As a program this module is the child process that
compiles: FlashInfer reads its settings from the environment when it is imported.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from faser.errors import ConfigError
from faser.kernels.cpu.build import find_compiler
from faser.processes import python_command

VERSION = "0.7.4"  # modules of one version do not load into another, and its plans are read by their places
ARCH = "9.0a"
HEAD_DIMS = (64, 128, 256, 512)
# Attention is compiled for each head size; sliding windows, caps on scores and 8-bit keys and values each need
# modules of their own.
MODULES = tuple(f"{kind}_{size}" for kind in ("decode", "prefill") for size in HEAD_DIMS)
ENDINGS = tuple(map("".join, product(("", "_window"), ("", "_capped"), ("", "_fp8"))))
# Of products, which no model needs: torch has its own. By the names of FlashInfer's modules.
PRODUCTS = {"cublaslt": "mm_bf16_cublaslt", "tinygemm": "tinygemm2"}
# Of weights in 8-bit floats with scales of blocks; for Hopper alone, and Triton has a product of them for all.
BLOCK_PRODUCTS = {"blockscale": "fp8_blockscale_gemm_90"}
ALL_MODULES = (*(name + ending for ending in ENDINGS for name in MODULES), *PRODUCTS, *BLOCK_PRODUCTS)
_TYPES = {"bfloat16": "bf16", "float16": "f16"}
_FP8 = "e4m3"
# Approximate seconds to compile, for one arch on one core; docs/gpu.md has the measurements.
_SECONDS = {"decode": 29, "prefill": 123, "cublaslt": 19, "tinygemm": 26, "blockscale": 150}
_TINYGEMM_MAJOR = 9
_ERROR_LINES = 12
_NO_PACKAGE = 3  # exit status of the child process
Announce = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Attention:
    """A kind of attention that modules are compiled for. dtype: of queries and results, without "torch.".

    capped: scores have a cap. fp8: keys and values are 8-bit floats; else they have the dtype of queries.
    decodes: single rows use a kernel of their own, without tensor cores.
    """

    head_dim: int
    window: bool
    capped: bool
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
        if found := (PRODUCTS | BLOCK_PRODUCTS).get(self.name):
            return found
        kind, size, *options = self.name.split("_")
        letters = _TYPES[self.dtype]
        stored = _FP8 if "fp8" in options else letters
        window, capped = "window" in options, "capped" in options
        types = f"dtype_q_{letters}_dtype_kv_{stored}_dtype_o_{letters}_dtype_idx_i32"
        shape = f"head_dim_qk_{size}_head_dim_vo_{size}_posenc_0_use_swa_{window}_use_logits_cap_{capped}"
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
        options = (("_window", each.window), ("_capped", each.capped), ("_fp8", each.fp8))
        suffix = "".join(option for option, has in options if has)
        kinds = ("prefill", "decode") if each.decodes else ("prefill",)
        for name in (f"{kind}_{each.head_dim}{suffix}" for kind in kinds):
            found[f"{name} {each.dtype}"] = Module(name=name, dtype=each.dtype)
    return tuple(found.values())


def known_modules() -> tuple[Module, ...]:
    """All modules that a supported model can need."""
    attention = [name for name in ALL_MODULES if name not in PRODUCTS | BLOCK_PRODUCTS]
    products = (*product_modules(ARCH), *(Module(name=name) for name in BLOCK_PRODUCTS))
    return (*(Module(name=name, dtype=dtype) for dtype in _TYPES for name in attention), *products)


def product_modules(archs: str) -> tuple[Module, ...]:
    """The modules of products that devices of these archs have, such as 9.0a; for bfloat16."""
    major = max(int(arch.partition(".")[0]) for arch in archs.split())
    return tuple(Module(name=name) for name in PRODUCTS if name != "tinygemm" or major >= _TINYGEMM_MAJOR)


def compile_time(modules: Sequence[Module]) -> str:
    """The approximate time to compile them one after the other, as text."""
    minutes = round(sum(each.seconds for each in modules) / 60)
    return f"about {minutes} minutes" if minutes > 1 else "about a minute"


def arch_of(capability: tuple[int, int]) -> str:
    """The compiler's name of a compute capability; from Hopper on with the instructions of that one alone."""
    major, minor = capability
    return f"{major}.{minor}" + ("a" if major >= 9 else "")


def modules_dir(kernels: Path, arch: str) -> Path:
    """The folder of modules for arch, under the folder of compiled kernels."""
    return kernels / f"flashinfer-{VERSION}-sm{arch.replace('.', '')}"


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
    """Return whether a package of compiled modules is installed. Only FlashInfer knows which modules it holds."""
    return find_spec("flashinfer_jit_cache") is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModule:
    """The result of one module. kept: it existed before. error: the compiler's first lines; None: success."""

    name: str
    kept: bool
    seconds: float
    bytes: int
    error: str | None


def build_modules(
    names: Sequence[str], *, arch: str, out: Path, environment: Mapping[str, str], announce: Announce
) -> list[BuiltModule]:
    """Compile modules (those of known_modules) for bfloat16 into out; announce each result.

    environment: of the child process; its CUDA_HOME is where nvcc is, else /usr/local/cuda.

    Raises ConfigError for an unknown name, without nvcc or a C compiler, and if a module failed.
    """
    for name in names:
        if name not in ALL_MODULES:
            raise ConfigError(f"--only names {name}; there are {', '.join(ALL_MODULES)}")
    cuda_home = Path(environment.get("CUDA_HOME", "/usr/local/cuda"))
    if not (cuda_home / "bin" / "nvcc").exists():
        raise ConfigError(f"no CUDA compiler at {cuda_home / 'bin' / 'nvcc'}; set CUDA_HOME")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="faser-cuda-") as work:
        request = {"names": list(names), "out": str(out.resolve())}
        settings = _settings(environment, cuda_home, arch, Path(work))
        found = []
        for module in _child(request, settings):
            announce(_line(module))
            found.append(module)
    failed = [each for each in found if each.error is not None]
    if failed:
        raise ConfigError(f"{', '.join(each.name for each in failed)} could not be compiled")
    return found


def _settings(environment: Mapping[str, str], cuda_home: Path, arch: str, work: Path) -> dict[str, str]:
    """The environment in which FlashInfer compiles."""
    # CUDA toolkits from wheels are incomplete; the headers of torch's own CUDA libraries fill the gaps.
    include = " ".join(f"-I{found}" for entry in sys.path for found in Path(entry).glob("nvidia/*/include"))
    libraries = f"-L{_driver_stub(cuda_home, work)} -L{_cublas_links(work)}"
    settings = {name: value for name, value in environment.items() if name != "FLASHINFER_DISABLE_JIT"}
    return settings | {
        "CUDA_HOME": str(cuda_home),
        "FLASHINFER_CUDA_ARCH_LIST": arch,  # this machine may have no GPU
        "FLASHINFER_WORKSPACE_BASE": str(work),
        "FLASHINFER_EXTRA_LDFLAGS": libraries,
        "FLASHINFER_EXTRA_CUDAFLAGS": include,
        "FLASHINFER_EXTRA_CFLAGS": include,
        "FLASHINFER_LOGGING_LEVEL": "error",
        "MAX_JOBS": environment.get("MAX_JOBS", "1"),  # a compiler takes some GB of memory
    }


def _driver_stub(cuda_home: Path, work: Path) -> Path:
    """A folder with a libcuda for the linker: the link line names it, though no module uses its symbols."""
    stubs = cuda_home / "lib64" / "stubs"
    if (stubs / "libcuda.so").exists():
        return stubs
    compiler = find_compiler()
    if compiler is None:
        raise ConfigError("no C++ compiler found; install g++")
    source = work / "stub.cpp"
    source.write_text("")
    flags = ("-shared", "-fPIC", "-Wl,-soname,libcuda.so.1")
    subprocess.run([compiler, *flags, "-o", str(work / "libcuda.so"), str(source)], check=True)
    return work


def _cublas_links(work: Path) -> Path:
    """A folder with cuBLAS of torch's wheels by the names that a linker looks for, which the wheels lack."""
    links = work / "links"
    links.mkdir()
    for entry in sys.path:
        for library in Path(entry).glob("nvidia/*/lib/libcublas*.so.*"):
            link = links / f"{library.name.partition('.so')[0]}.so"
            if not link.exists():
                link.symlink_to(library)
    return links


def _child(request: dict[str, Any], environment: dict[str, str]) -> Iterator[BuiltModule]:
    """The results that the child process prints, as they come. Ends the child when the generator is closed."""
    command = python_command("faser.kernels.cuda.flashinfer.build", json.dumps(request))
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                if line.startswith("{"):  # other lines are the compiler's
                    yield BuiltModule(**json.loads(line))
        except BaseException:
            child.terminate()
            raise
    if child.returncode == _NO_PACKAGE:
        raise ConfigError(
            "flashinfer is not installed; install FASER with its extra cuda: pip install 'faser[cuda]'"
        )
    if child.returncode != 0:
        raise ConfigError(f"the compiling process ended with status {child.returncode}")


def _line(module: BuiltModule) -> str:
    if module.error is not None:
        return f"{module.name:<20} failed\n{module.error}"
    if module.kept:
        return f"{module.name:<20} is there already"
    return f"{module.name:<20} {module.seconds:6.1f} s {module.bytes / 1e6:6.2f} MB"


def _build(name: str, out: Path) -> BuiltModule:
    """Compile one module, in the child process."""
    start = time.monotonic()
    target = None
    try:
        spec = spec_of(name)
        target = out / spec.name / f"{spec.name}.so"
        kept = target.exists()
        if not kept:
            spec.build(verbose=False)
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_suffix(".partial")
            shutil.copyfile(spec.jit_library_path, partial)
            partial.replace(target)
    except Exception as error:  # any failure of the compiler: the other modules are still needed
        lines = f"{type(error).__name__}: {error}".splitlines()
        words = [line for line in lines if "error: " in line] or lines
        return BuiltModule(name=name, kept=False, seconds=0.0, bytes=0, error="\n".join(words[:_ERROR_LINES]))
    seconds = time.monotonic() - start
    return BuiltModule(name=name, kept=kept, seconds=seconds, bytes=target.stat().st_size, error=None)


def spec_of(name: str) -> Any:
    """FlashInfer's description of decode_64, prefill_128_window_fp8, cublaslt and the like.

    With fp8, keys and values are 8-bit.
    """
    if name == "cublaslt":
        from flashinfer.jit.gemm import gen_mm_bf16_cublaslt_module

        return gen_mm_bf16_cublaslt_module()
    if name == "tinygemm":
        from flashinfer.jit import gen_tinygemm2_module

        return gen_tinygemm2_module()
    if name == "blockscale":
        from flashinfer.jit.gemm import gen_fp8_blockscale_gemm_sm90_module

        return gen_fp8_blockscale_gemm_sm90_module()
    import torch
    from flashinfer.jit.attention import gen_batch_decode_module
    from flashinfer.jit.attention.modules import _gen_batch_prefill_primary_module

    kind, size, *options = name.split("_")
    stored = torch.float8_e4m3fn if "fp8" in options else torch.bfloat16
    types = (torch.bfloat16, stored, torch.bfloat16, torch.int32)
    # head size of keys and of values, no position encoding, sliding window, cap on scores
    shape = (*types, int(size), int(size), 0, "window" in options, "capped" in options)
    if kind == "decode":
        return gen_batch_decode_module(*shape)
    # The wrapper loads this variant, for equal strides of keys and values, not the one with a public name.
    return _gen_batch_prefill_primary_module("fa2", *shape, False)


def package_sources() -> Path:
    """Return the folder of FlashInfer's CUDA sources, from which DeepGEMM compiles a kernel at its first run."""
    from flashinfer.jit import env

    return Path(env.FLASHINFER_CSRC_DIR)


def main(arguments: Sequence[str]) -> int:
    """The child process: prints one line of JSON for every module."""
    if find_spec("flashinfer") is None:
        return _NO_PACKAGE
    request = json.loads(arguments[0])
    for name in request["names"]:
        sys.stdout.write(json.dumps(asdict(_build(name, Path(request["out"])))) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
