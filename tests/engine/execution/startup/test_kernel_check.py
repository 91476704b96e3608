"""What is reported of kernels that FlashInfer has yet to compile."""

from pathlib import Path

import pytest
import torch

from faser.engine.checkpoints.families import decoder_spec
from faser.engine.execution.startup.kernel_check import check_kernels
from faser.engine.execution.startup.sizing import CachedModel
from faser.errors import ConfigError
from faser.kernels.cuda.flashinfer.build import (
    Attention,
    Module,
    folder_of_compiled,
    modules_dir,
    needed_modules,
    package_of_modules,
)
from tests.checkpoints import tiny_llama_config

ARCH = "9.0a"
ATTENTION = Attention(head_dim=64, window=False, dtype="bfloat16", fp8=False, decodes=True)

pytestmark = pytest.mark.skipif(package_of_modules(), reason="a package of compiled modules is installed")


def model(
    dtype: torch.dtype = torch.bfloat16,
    heads: tuple[int, int] = (4, 2),
    kv_dtype: torch.dtype | None = None,
    **changes: object,
) -> CachedModel:
    """kv_dtype: None: as dtype."""
    sizes = {"head_dim": 64, "num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    return CachedModel(
        spec=decoder_spec(tiny_llama_config() | sizes | changes), dtype=dtype, kv_dtype=kv_dtype or dtype
    )


def said(models: list[CachedModel], folder: Path, *, may_compile: bool = True) -> list[str]:
    stages: list[str] = []
    check_kernels(
        models,
        ARCH,
        lambda stage, _done, _total: stages.append(stage),
        kernels=folder,
        workspace=folder / "workspace",
        may_compile=may_compile,
    )
    return stages


def put(folder: Path, *modules: Module) -> None:
    for each in modules:
        (folder / each.own_name).mkdir(parents=True)
        (folder / each.own_name / f"{each.own_name}.so").touch()


def test_all_that_is_missing_is_listed_once_with_the_time_it_takes(tmp_path: Path) -> None:
    assert said([model(), model()], tmp_path) == [
        "compiling kernels for 9.0a, about 3 minutes on one core: prefill_64, decode_64"
    ]


def test_large_groups_of_heads_decode_with_the_kernel_for_prompts(tmp_path: Path) -> None:
    (found,) = said([model(heads=(8, 2))], tmp_path)
    assert found.endswith("prefill_64")


def test_a_draft_models_kernels_count_and_so_do_types(tmp_path: Path) -> None:
    (found,) = said([model(), model(torch.float16, heads=(8, 1), head_dim=128)], tmp_path)
    assert found.endswith("prefill_64, decode_64, prefill_128 of float16")


def test_8_bit_keys_and_values_have_kernels_of_their_own(tmp_path: Path) -> None:
    (found,) = said([model(kv_dtype=torch.float8_e4m3fn)], tmp_path)
    assert found.endswith("prefill_64_fp8, decode_64_fp8")


def test_nothing_is_reported_where_everything_was_compiled_ahead_or_by_an_earlier_start(tmp_path: Path) -> None:
    put(modules_dir(tmp_path, ARCH), Module(name="decode_64"))
    (found,) = said([model()], tmp_path)
    assert found.endswith("about 2 minutes on one core: prefill_64")
    put(folder_of_compiled(tmp_path / "workspace", ARCH), Module(name="prefill_64"))
    assert said([model()], tmp_path) == []


def test_what_an_earlier_start_compiled_does_not_count_where_nothing_may_be_compiled(tmp_path: Path) -> None:
    """FlashInfer asks ninja whether it is up to date, which counts as compiling."""
    put(folder_of_compiled(tmp_path / "workspace", ARCH), *needed_modules([ATTENTION]))
    assert said([model()], tmp_path) == []
    with pytest.raises(ConfigError, match="these are missing: prefill_64, decode_64;"):
        said([model()], tmp_path, may_compile=False)


def test_what_may_not_be_compiled_is_refused_with_the_command_that_does(tmp_path: Path) -> None:
    ahead = modules_dir(tmp_path, ARCH)
    ahead.mkdir()
    with pytest.raises(ConfigError) as caught:
        said([model()], tmp_path, may_compile=False)
    assert str(caught.value) == (
        f"no kernels may be compiled, and these are missing: prefill_64, decode_64; looked in {ahead}; "
        "faser env --build-kernels --arch 9.0a --only prefill_64,decode_64"
    )
    with pytest.raises(ConfigError, match=r"use --dtype bfloat16 or --compile-kernels$"):
        said([model(torch.float16)], tmp_path, may_compile=False)
    put(ahead, Module(name="prefill_64"), Module(name="decode_64"))
    assert said([model()], tmp_path, may_compile=False) == []
