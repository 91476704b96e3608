"""What is reported of kernels that FlashInfer has yet to compile.

What auto stands for on machines with and without GPUs, and what is refused.
"""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from faser.config.engine import EngineConfig
from faser.engine.checkpoints.families import decoder_spec
from faser.engine.execution.startup.device import auto_device, check_kernels, device_of_rank, resolve_device
from faser.engine.execution.startup.memory import CachedModel
from faser.errors import ConfigError
from faser.kernels.cuda.device import CudaFacts
from faser.kernels.cuda.flashinfer.build import (
    Attention,
    Module,
    folder_of_compiled,
    modules_dir,
    needed_modules,
    package_of_modules,
    product_modules,
)
from tests.checkpoints import tiny_llama_config

ARCH = "9.0a"
ATTENTION = Attention(head_dim=64, window=False, capped=False, dtype="bfloat16", fp8=False, decodes=True)

pytestmark = pytest.mark.skipif(package_of_modules(), reason="a package of compiled modules is installed")


def model(
    dtype: torch.dtype = torch.bfloat16,
    heads: tuple[int, int] = (2, 2),
    kv_dtype: torch.dtype | None = None,
    **changes: object,
) -> CachedModel:
    """kv_dtype: None: as dtype."""
    sizes = {"head_dim": 64, "num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    return CachedModel(
        spec=decoder_spec(tiny_llama_config() | sizes | changes), dtype=dtype, kv_dtype=kv_dtype or dtype
    )


def said(models: list[CachedModel], folder: Path, *, may_compile: bool = True, products: bool = True) -> list[str]:
    """products: their modules were compiled by an earlier start."""
    if products:
        put(folder_of_compiled(folder / "workspace", ARCH), *product_modules(ARCH))
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
        (folder / each.own_name).mkdir(parents=True, exist_ok=True)
        (folder / each.own_name / f"{each.own_name}.so").touch()


def test_products_are_compiled_for_bfloat16_where_the_start_may_compile(tmp_path: Path) -> None:
    """torch has products of its own, so nothing is refused without them."""
    put(modules_dir(tmp_path, ARCH), *needed_modules([ATTENTION, replace(ATTENTION, dtype="float16")]))
    assert said([model()], tmp_path, products=False) == [
        "compiling kernels for 9.0a, about a minute on one core: cublaslt, tinygemm"
    ]
    assert said([model(torch.float16)], tmp_path, products=False) == []
    assert said([model()], tmp_path, may_compile=False, products=False) == []


def test_all_that_is_missing_is_listed_once_with_the_time_it_takes(tmp_path: Path) -> None:
    assert said([model(), model()], tmp_path) == [
        "compiling kernels for 9.0a, about 3 minutes on one core: prefill_64, decode_64"
    ]


@pytest.mark.parametrize("heads", [(4, 2), (9, 3), (8, 2)])
def test_groups_of_heads_decode_with_the_kernel_for_prompts(tmp_path: Path, heads: tuple[int, int]) -> None:
    """Its planned pieces may be empty; the other kernel reads beyond the sequence then."""
    (found,) = said([model(heads=heads)], tmp_path)
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


NOTHING = CudaFacts(build=None, capabilities=())
NO_GPU = CudaFacts(build="13.0", capabilities=())
HOPPER = CudaFacts(build="13.0", capabilities=((9, 0), (9, 0)))
OLD = CudaFacts(build="13.0", capabilities=((7, 5),))


def resolved(facts: CudaFacts, options: dict[str, object], *, flashinfer: bool = True) -> EngineConfig:
    config = EngineConfig(**options)  # type: ignore[arg-type]
    return resolve_device(config, lambda: facts, lambda: flashinfer)


@pytest.mark.parametrize(
    "facts, options, device, backend",
    [
        (NOTHING, {}, "cpu", "auto"),
        (NO_GPU, {}, "cpu", "auto"),
        (HOPPER, {}, "cuda:0", "flashinfer"),
        (HOPPER, {"backend": "torch"}, "cuda:0", "torch"),
        (HOPPER, {"backend": "native"}, "cpu", "native"),
        (HOPPER, {"backend": "flashinfer"}, "cuda:0", "flashinfer"),
        (HOPPER, {"device": "cpu"}, "cpu", "auto"),
        (HOPPER, {"device": "cuda"}, "cuda:0", "flashinfer"),
        (HOPPER, {"device": "cuda:1", "backend": "torch"}, "cuda:1", "torch"),
    ],
)
def test_a_device_is_chosen_and_its_backend(
    facts: CudaFacts, options: dict[str, object], device: str, backend: str
) -> None:
    found = resolved(facts, options)
    assert (found.device, found.backend) == (device, backend)
    assert resolved(facts, {"device": found.device, "backend": found.backend}) == found


def test_every_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun those of its machine count. Bug seen caught: the GPUs of all ranks on each machine."""
    found = resolved(HOPPER, {"tensor_parallel_size": 2})
    assert (found.device, found.schedules_async) == ("cuda:0", True)
    assert [device_of_rank(found.device, local) for local in range(2)] == ["cuda:0", "cuda:1"]
    assert device_of_rank("cuda:3", 2) == "cuda:5"
    assert device_of_rank("cpu", 2) == "cpu"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert resolved(HOPPER, {"tensor_parallel_size": 8}).device == "cuda:0"


def test_the_cpu_computes_where_the_gpu_cannot_and_the_reason_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="faser.engine"):
        assert resolved(OLD, {}).device == "cpu"
        assert resolved(HOPPER, {}, flashinfer=False).device == "cpu"
    assert [each.getMessage() for each in caplog.records] == [
        "computing on the CPU, though there is a GPU: the first GPU, of compute capability 7.5; at least 8.0 is "
        "needed",
        "computing on the CPU, though there is a GPU: flashinfer is not installed; pip install 'faser[cuda]'",
    ]


def test_torch_computes_on_a_gpu_without_flashinfer() -> None:
    assert auto_device("torch", HOPPER, has_flashinfer=False) == ("cuda:0", None)


@pytest.mark.parametrize(
    "facts, options, problem",
    [
        (NOTHING, {"device": "cuda"}, "^--device is cuda; torch .* is built without CUDA"),
        (
            NO_GPU,
            {"backend": "flashinfer"},
            "^--backend is flashinfer, which computes on GPUs; torch finds no CUDA device",
        ),
        (HOPPER, {"device": "cuda:2"}, "^--device is cuda:2; this machine has 2 CUDA devices"),
        (
            HOPPER,
            {"tensor_parallel_size": 4},
            "^--tensor-parallel-size is 4; the 4 ranks on this machine need 4 GPUs, one each, and CUDA shows 2 ",
        ),
        (
            HOPPER,
            {"device": "cuda:1", "tensor_parallel_size": 2},
            "is 2; the 2 ranks on this machine need 2 GPUs, one each from cuda:1 on, and CUDA shows 2 ",
        ),
        (
            NO_GPU,
            {"async_scheduling": True, "tensor_parallel_size": 2},
            "--async-scheduling on a CPU needs a model in one process$",
        ),
        (
            NO_GPU,
            {"spec_partition": "sm"},
            "^--spec-partition is sm, which divides a cuda device; the device is cpu$",
        ),
        (
            HOPPER,
            {"spec_partition": "cores"},
            "^--spec-partition is cores, which divides a cpu device; the device is cuda:0$",
        ),
        (OLD, {"device": "cuda"}, "at least 8.0 is needed"),
        (
            NO_GPU,
            {"dtype": "float16"},
            "^--dtype is float16; it is not computed on a CPU; use bfloat16 or float32",
        ),
        (
            HOPPER,
            {"dtype": "float32"},
            "^--dtype is float32; flashinfer computes in 16 bits; use bfloat16, float16 or",
        ),
        (
            NO_GPU,
            {"kv_cache_memory": 1 << 50},
            "^--kv-cache-memory is 1024TiB; it must be at most .*, the memory this",
        ),
    ],
)
def test_what_a_device_cannot_do_is_refused(facts: CudaFacts, options: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        resolved(facts, options)


def test_settings_of_a_gpu_log_a_warning_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, object] = {"enforce_eager": True, "gpu_memory_utilization": 0.5, "compile_kernels": True}
    with caplog.at_level(logging.WARNING, logger="faser.engine"):
        resolved(HOPPER, options)
        assert caplog.records == []
        resolved(NO_GPU, options)
    assert [each.getMessage() for each in caplog.records] == [
        "--gpu-memory-utilization has no effect on a CPU",
        "--enforce-eager has no effect on a CPU",
    ]


def test_no_gpu_is_looked_for_where_the_config_names_the_cpu() -> None:
    def find_devices() -> CudaFacts:
        raise AssertionError("no device is asked for")

    assert resolve_device(EngineConfig(device="cpu"), find_devices).device == "cpu"


def test_one_line_says_which_defaults_a_gpu_gets(caplog: pytest.LogCaptureFixture) -> None:
    facts = CudaFacts(build="13.0", capabilities=((9, 0),), memory_bytes=(140 << 30,))
    with caplog.at_level(logging.INFO, logger="faser.engine"):
        found = resolved(facts, {})
        assert resolved(facts, {"max_num_seqs": 64, "max_num_batched_tokens": 256}).max_num_seqs == 64
        assert resolved(NOTHING, {}).max_num_batched_tokens == 256
    assert (found.max_num_seqs, found.max_num_batched_tokens) == (256, 8192)
    assert [each.getMessage() for each in caplog.records] == [
        "for cuda:0: --max-num-seqs 256, --max-num-batched-tokens 8192"
    ]
