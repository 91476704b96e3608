"""How FlashInfer calls its modules, and where they are looked for."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from faser.kernels.cuda.flashinfer.build import (
    FP8_MODULES,
    MODULES,
    VERSION,
    WINDOW_MODULES,
    Attention,
    Module,
    compile_time,
    folder_of_compiled,
    known_modules,
    modules_dir,
    needed_modules,
    precompiled_folders,
)

KNOWN = MODULES + WINDOW_MODULES + FP8_MODULES
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
@pytest.mark.parametrize("name", KNOWN)
def test_flashinfer_itself_calls_the_module_so(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Oracle: the package."""
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    from faser.kernels.cuda.flashinfer.build import spec_of

    assert spec_of(name).name == Module(name=name).own_name


def test_every_module_that_can_be_compiled_has_a_time() -> None:
    assert all(each.seconds > 0 for each in known_modules())
    for dtype in ("bfloat16", "float16"):
        assert {each.name for each in known_modules() if each.dtype == dtype} == set(KNOWN)


def test_a_model_needs_each_module_once() -> None:
    whole = Attention(head_dim=64, window=False, dtype="bfloat16", fp8=False, decodes=True)
    window = Attention(head_dim=64, window=True, dtype="bfloat16", fp8=False, decodes=False)
    small = Attention(head_dim=64, window=True, dtype="bfloat16", fp8=True, decodes=True)
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


def test_times_are_told_in_minutes() -> None:
    assert compile_time([Module(name="decode_64")]) == "about a minute"
    assert compile_time([Module(name="decode_64"), Module(name="prefill_64")]) == "about 3 minutes"
