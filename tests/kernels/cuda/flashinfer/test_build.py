"""How FlashInfer calls its modules, and where they are looked for.

Compiling ahead of time. The child process gets a package named flashinfer that compiles nothing.

Bugs these tests have been seen to catch: modules compiled again, a variable left in place that forbids compiling,
another arch than was asked for, windows forgotten, what a compiler says taken for a result.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest

from faser.config.environment import child_environment
from faser.errors import ConfigError
from faser.kernels.cuda.flashinfer.build import (
    ALL_MODULES,
    ARCH,
    BLOCK_PRODUCTS,
    MODULES,
    PRODUCTS,
    VERSION,
    Attention,
    BuiltModule,
    Module,
    arch_of,
    build_modules,
    compile_time,
    folder_of_compiled,
    known_modules,
    modules_dir,
    needed_modules,
    precompiled_folders,
)
from tests.kernels.cuda.flashinfer.signatures import VERSION as SIGNED_VERSION

LAST = "dtype_idx_i32_head_dim_qk_64_head_dim_vo_64_posenc_0"
NAMES = {
    Module(name="decode_64"): (
        f"batch_decode_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_{LAST}_use_swa_False_use_logits_cap_False"
    ),
    Module(name="decode_64_window", dtype="float16"): (
        f"batch_decode_with_kv_cache_dtype_q_f16_dtype_kv_f16_dtype_o_f16_{LAST}_use_swa_True_use_logits_cap_False"
    ),
    Module(name="prefill_64"): (
        f"batch_prefill_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_{LAST}_use_swa_False_use_logits_cap_False"
        "_f16qk_False_kv_stride_equal"
    ),
    Module(name="decode_64_window_fp8"): (
        f"batch_decode_with_kv_cache_dtype_q_bf16_dtype_kv_e4m3_dtype_o_bf16_{LAST}_use_swa_True_use_logits_cap_False"
    ),
    Module(name="prefill_64_fp8", dtype="float16"): (
        f"batch_prefill_with_kv_cache_dtype_q_f16_dtype_kv_e4m3_dtype_o_f16_{LAST}_use_swa_False_use_logits_cap_False"
        "_f16qk_False_kv_stride_equal"
    ),
}


@pytest.mark.parametrize("module", NAMES, ids=lambda each: each.label)
def test_a_module_has_flashinfers_name(module: Module) -> None:
    assert module.own_name == NAMES[module]


@pytest.mark.skipif(find_spec("flashinfer") is None, reason="flashinfer is not installed")
@pytest.mark.parametrize("name", ALL_MODULES)
def test_flashinfer_itself_calls_the_module_so(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Oracle: the package."""
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    from faser.kernels.cuda.flashinfer.build import spec_of

    assert spec_of(name).name == Module(name=name).own_name


def test_every_module_that_can_be_compiled_has_a_time() -> None:
    assert all(each.seconds > 0 for each in known_modules())
    assert {each.name for each in known_modules() if each.dtype == "bfloat16"} == set(ALL_MODULES)
    halves = {each.name for each in known_modules() if each.dtype == "float16"}
    assert halves == set(ALL_MODULES).difference(PRODUCTS, BLOCK_PRODUCTS)


def test_a_model_needs_each_module_once() -> None:
    whole = Attention(head_dim=64, window=False, capped=False, dtype="bfloat16", fp8=False, decodes=True)
    window = Attention(head_dim=64, window=True, capped=False, dtype="bfloat16", fp8=False, decodes=False)
    small = Attention(head_dim=64, window=True, capped=False, dtype="bfloat16", fp8=True, decodes=True)
    assert [each.label for each in needed_modules([whole, window, whole, small])] == [
        "prefill_64",
        "decode_64",
        "prefill_64_window",
        "prefill_64_window_fp8",
        "decode_64_window_fp8",
    ]


def test_modules_are_looked_for_where_flashinfer_looks(tmp_path: Path) -> None:
    """Modules compiled ahead of time replace those that came with the package."""
    compiled = tmp_path / ".cache" / "flashinfer" / VERSION / "90a" / "cached_ops"
    assert folder_of_compiled(tmp_path, "9.0a") == compiled
    own = modules_dir(tmp_path, "9.0a")
    assert precompiled_folders(tmp_path, "9.0a")[0] == own
    assert len(precompiled_folders(tmp_path, "9.0a")) == 1 + (find_spec("flashinfer") is not None)
    own.mkdir()
    assert precompiled_folders(tmp_path, "9.0a") == (own,)


def test_times_are_given_in_minutes() -> None:
    assert compile_time([Module(name="decode_64")]) == "about a minute"
    assert compile_time([Module(name="decode_64"), Module(name="prefill_64")]) == "about 3 minutes"


NVCC = Path("/usr/local/cuda/bin/nvcc")

# What a module holds: the arch and whether the module is for sliding windows. decode_64 has an error in it.
SPECS = """
import os
from pathlib import Path

class Spec:
    def __init__(self, name):
        self.name = name
        self.jit_library_path = Path(os.environ["FLASHINFER_WORKSPACE_BASE"]) / (name + ".so")

    def build(self, verbose):
        print("a compiler talks")
        if self.name.startswith("decode_bf16_64"):
            raise RuntimeError("ninja:\\n  decode.cu(3): error: no such thing\\nstopped")
        assert "FLASHINFER_DISABLE_JIT" not in os.environ
        self.jit_library_path.write_text(self.name + " for " + os.environ["FLASHINFER_CUDA_ARCH_LIST"])
"""


def package(folder: Path) -> Path:
    """A folder to import flashinfer from, and in it a toolkit, whose nvcc is never called."""
    files = {
        "specs.py": SPECS,
        "torch.py": "bfloat16, float8_e4m3fn, int32 = 'bf16', 'e4m3', 'i32'",  # the real one takes seconds
        "flashinfer/__init__.py": "",
        "flashinfer/jit/__init__.py": "",
        "flashinfer/jit/attention/__init__.py": (
            "from specs import Spec\n"
            "def gen_batch_decode_module(*a): return Spec(f'decode_{a[1]}_{a[4]}_{a[6]}_{a[7]}_{a[8]}')"
        ),
        "flashinfer/jit/attention/modules.py": (
            "from specs import Spec\n"
            "def _gen_batch_prefill_primary_module(*a):\n"
            "    return Spec(f'{a[0]}_{a[2]}_{a[5]}_{a[7]}_{a[8]}_{a[9]}_{a[10]}')"
        ),
        "cuda/bin/nvcc": "",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def environment(folder: Path) -> dict[str, str]:
    own = {"PYTHONPATH": str(folder), "CUDA_HOME": str(folder / "cuda"), "FLASHINFER_DISABLE_JIT": "1"}
    return {**child_environment(), **own}


def test_modules_are_compiled_one_by_one_and_kept(tmp_path: Path) -> None:
    folder, out = package(tmp_path / "package"), tmp_path / "out"
    lines: list[str] = []

    def build(*names: str) -> list[BuiltModule]:
        return build_modules(names, arch="8.6", out=out, environment=environment(folder), announce=lines.append)

    first = build("prefill_128", "prefill_64_window")
    assert [(each.name, each.kept) for each in first] == [("prefill_128", False), ("prefill_64_window", False)]
    name = "fa2_bf16_128_0_False_False_False"
    assert (out / name / f"{name}.so").read_text() == f"{name} for 8.6"
    assert (out / "fa2_bf16_64_0_True_False_False" / "fa2_bf16_64_0_True_False_False.so").exists()
    again = build("decode_128", "prefill_128")
    assert [(each.name, each.kept) for each in again] == [("decode_128", False), ("prefill_128", True)]
    assert (out / "decode_bf16_128_0_False_False" / "decode_bf16_128_0_False_False.so").exists()
    assert [line.split()[0] for line in lines] == ["prefill_128", "prefill_64_window", "decode_128", "prefill_128"]
    assert lines[-1].endswith("is there already")
    build("prefill_64_fp8", "decode_128_window_fp8")
    assert (out / "fa2_e4m3_64_0_False_False_False").is_dir()
    assert (out / "decode_e4m3_128_0_True_False").is_dir()


def test_a_module_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    folder, out = package(tmp_path / "package"), tmp_path / "out"
    lines: list[str] = []
    with pytest.raises(ConfigError, match=r"^decode_64 could not be compiled$"):
        build_modules(
            ["decode_64", "prefill_64"], arch=ARCH, out=out, environment=environment(folder), announce=lines.append
        )
    assert lines[0].split() == ["decode_64", "failed", "decode.cu(3):", "error:", "no", "such", "thing"]
    assert [each.name for each in out.iterdir()] == ["fa2_bf16_64_0_False_False_False"]


@pytest.mark.skipif(find_spec("flashinfer") is not None, reason="flashinfer is installed")
def test_without_the_package_the_extra_is_named(tmp_path: Path) -> None:
    settings = environment(package(tmp_path)) | {"PYTHONPATH": ""}
    with pytest.raises(ConfigError, match=r"flashinfer is not installed; .* pip install 'faser\[cuda\]'"):
        build_modules(["decode_64"], arch=ARCH, out=tmp_path / "out", environment=settings, announce=print)


def test_what_is_missing_is_named_before_anything_starts(tmp_path: Path) -> None:
    for names, settings, problem in (
        (["norm"], {}, "--only names norm; there are decode_64, decode_128"),
        (["decode_64"], {"CUDA_HOME": str(tmp_path)}, f"no CUDA compiler at {tmp_path}/bin/nvcc"),
    ):
        with pytest.raises(ConfigError, match=problem):
            build_modules(names, arch=ARCH, out=tmp_path / "out", environment=settings, announce=print)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "capability, arch", [((8, 0), "8.0"), ((8, 9), "8.9"), ((9, 0), "9.0a"), ((10, 0), "10.0a")]
)
def test_modules_of_each_version_and_arch_have_a_folder(capability: tuple[int, int], arch: str) -> None:
    assert arch_of(capability) == arch
    name = modules_dir(Path("kernels"), arch).name
    assert name == f"flashinfer-{VERSION}-sm{arch.replace('.', '')}"
    assert VERSION == SIGNED_VERSION


def test_windows_caps_and_8_bit_keys_need_modules_of_their_own() -> None:
    bases = {f"{kind}_{size}" for kind in ("decode", "prefill") for size in (64, 128, 256, 512)}
    endings = {
        "",
        "_window",
        "_capped",
        "_fp8",
        "_window_capped",
        "_window_fp8",
        "_capped_fp8",
        "_window_capped_fp8",
    }
    assert set(MODULES) == bases
    products = ["blockscale", "cublaslt", "tinygemm"]
    assert sorted(ALL_MODULES) == sorted([*products, *(base + ending for base in bases for ending in endings)])
    assert {each.name for each in known_modules()} == set(ALL_MODULES)
