"""What auto stands for on machines with and without GPUs, and what is refused."""

import logging

import pytest

from faser.config.engine import EngineConfig
from faser.engine.execution.startup.device import auto_device, resolve_device
from faser.errors import ConfigError
from faser.kernels.cuda.device import CudaFacts

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
            NO_GPU,
            {"spec_partition": "sm"},
            "^--spec-partition is sm, which divides a cuda device; the device is cpu$",
        ),
        (
            HOPPER,
            {"spec_partition": "cores"},
            "^--spec-partition is cores, which divides a cpu device; the device is cuda:0$",
        ),
        (
            HOPPER,
            {"early_prune": "auto"},
            "^--early-prune is auto; on a GPU a step that prunes replays no CUDA graph",
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


@pytest.mark.parametrize("mode, facts", [("auto", NO_GPU), ("on", HOPPER), ("off", HOPPER)])
def test_early_pruning_may_be_on_anywhere_and_auto_on_a_cpu(mode: str, facts: CudaFacts) -> None:
    assert resolved(facts, {"early_prune": mode}).early_prune == mode


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
