"""What settings of the engine can be, alone and together, and the messages that refuse them."""

import dataclasses

import msgspec
import pytest

from faser.config.engine import EngineConfig
from faser.errors import ConfigError


def test_every_default_is_sound() -> None:
    """Unsound settings raise ConfigError."""
    assert EngineConfig() == EngineConfig()


def test_an_engine_config_survives_the_pipe() -> None:
    sent = EngineConfig(
        model="m",
        kv_cache_memory=1 << 21,
        num_threads=2,
        enable_prefix_caching=False,
        cudagraph_capture_sizes=(1, 8),
        async_scheduling=False,
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=EngineConfig) == sent


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0; it must be at least 1 and at most 4096"),
        ({"max_num_seqs": 4097}, "max_num_seqs is 4097; it must be at least 1 and at most 4096"),
        ({"block_size": 24}, "block_size is 24; it must be a multiple of 16, at least 16 and at most 256"),
        ({"dtype": "int8"}, "dtype is int8; it must be one of auto, bfloat16, float16, float32"),
        (
            {"dtype": "float16", "device": "cpu"},
            "dtype is float16; it is not computed on a CPU; use bfloat16 or float32",
        ),
        (
            {"dtype": "float32", "device": "cuda:1"},
            "dtype is float32; flashinfer computes in 16 bits; use bfloat16, float16 or the torch backend",
        ),
        ({"device": "tpu"}, "device is tpu; it must be one of auto, cpu, cuda, cuda:N"),
        ({"device": "cuda:x"}, "device is cuda:x; it must be one of auto, cpu, cuda, cuda:N"),
        ({"device": "cpu:0"}, "device is cpu:0; it must be one of auto, cpu, cuda, cuda:N"),
        (
            {"device": "cuda", "backend": "native"},
            "backend is native; it computes on cpu, and device is cuda",
        ),
        (
            {"device": "cpu", "backend": "flashinfer"},
            "backend is flashinfer; it computes on cuda, and device is cpu",
        ),
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype is fp4; it must be one of auto, fp8, int8"),
        (
            {"kv_cache_dtype": "fp8_e5m2"},
            "kv_cache_dtype is fp8_e5m2; the only supported 8-bit types are e4m3 and int8; use fp8, int8 or auto",
        ),
        (
            {"kv_cache_dtype": "bfloat16"},
            "kv_cache_dtype is bfloat16; keys and values are stored as they are computed, in --dtype, or in 8 bits"
            "; use auto, fp8 or int8",
        ),
        (
            {"kv_cache_dtype": "fp8", "device": "cpu", "backend": "native"},
            "kv_cache_dtype is fp8; no kernels for CPUs read 8-bit floats; use int8, auto, or the torch backend, "
            "which is slow",
        ),
        (
            {"kv_cache_dir": "/kv", "enable_prefix_caching": False},
            "kv_cache_dir is /kv; it is for prefix caching, and enable_prefix_caching is off",
        ),
        (
            {"kv_cache_dir": "/kv", "tensor_parallel_size": 2},
            "kv_cache_dir is /kv; it needs a model in one process, and tensor_parallel_size is 2",
        ),
        (
            {"kv_cache_dir": "/kv", "device": "cuda"},
            "kv_cache_dir is /kv; KV is kept for models on a CPU only, and device is cuda",
        ),
        (
            {"kv_cache_dtype": "int8", "device": "cuda"},
            "kv_cache_dtype is int8; no kernels for GPUs read keys and values in int8; use fp8, auto, or the "
            "torch backend",
        ),
        *(
            (
                {"quantization": "fp8", "device": "cpu", "backend": backend},
                "quantization is fp8; no kernels for CPUs multiply 8-bit numbers; leave it out, or use the torch "
                "backend, which is slow",
            )
            for backend in ("auto", "native")
        ),
        (
            {"quantization": "int3"},
            "quantization is int3; it must be one of none, fp8, gguf, int8, int4, awq, gptq, compressed-tensors, "
            "mxfp4",
        ),
        (
            {"cudagraph_capture_sizes": (8, 0)},
            "cudagraph_capture_sizes is 8 0; it must be at least 1 and at most 8192",
        ),
        (
            {"cudagraph_capture_sizes": (1, 512), "max_num_batched_tokens": 256},
            "cudagraph_capture_sizes has 512; no step has more rows than max_num_batched_tokens, which is 256",
        ),
        ({"cudagraph_capture_sizes": ()}, "cudagraph_capture_sizes is ; it must be whole numbers, such as 1 8 64"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization is 0.0; it must be above 0 and at most 1"),
        ({"kv_cache_memory": 100}, "kv_cache_memory is 100B; it must be at least 1MiB and at most 1024TiB"),
        ({"seed": True}, "seed is true; it must be a whole number"),
        ({"num_threads": 0}, "num_threads is 0; it must be at least 1 and at most 1024"),
        (
            {"max_num_batched_tokens": 32},
            "max_num_batched_tokens is 32; it must be at least max_num_seqs, which is 64",
        ),
    ],
)
def test_an_impossible_engine_setting_names_value_and_limit(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**fields)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_a_kv_cache_larger_than_the_memory_is_refused_with_both_sizes() -> None:
    with pytest.raises(
        ConfigError, match=r"^kv_cache_memory is 1024TiB; it must be at most .*iB, the memory this"
    ):
        EngineConfig(device="cpu", kv_cache_memory=1 << 50)


def test_a_cpus_memory_does_not_limit_a_gpus_cache() -> None:
    assert EngineConfig(device="cuda", kv_cache_memory=1 << 50).kv_cache_memory == 1 << 50


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(device="cpu", max_num_seqs=0, block_size=1, kv_cache_memory=1 << 50)
    assert str(caught.value).count(" is ") >= 3


def test_configs_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    "fields, on_gpu, records, ahead",
    [
        ({"device": "cpu"}, False, False, False),
        ({"device": "auto"}, False, False, False),
        ({"device": "cuda"}, True, True, True),
        ({"device": "cuda:3"}, True, True, True),
        ({"device": "cuda", "enforce_eager": True}, True, False, True),
        ({"device": "cuda", "async_scheduling": False}, True, True, False),
        ({"device": "cpu", "async_scheduling": True}, False, False, True),
    ],
)
def test_a_gpu_replays_graphs_and_schedules_asynchronously(
    fields: dict[str, object], on_gpu: bool, records: bool, ahead: bool
) -> None:
    config = EngineConfig(**fields)  # type: ignore[arg-type]
    assert (config.on_gpu, config.records_steps, config.schedules_async) == (on_gpu, records, ahead)


@pytest.mark.parametrize(
    "speculative, drafter",
    [
        ({}, "the default method drafts from text alone"),
        ({"method": "ngram"}, "method ngram drafts from text alone"),
    ],
)
def test_overlap_without_a_draft_model_is_refused_with_what_to_add(
    speculative: dict[str, str], drafter: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(spec_overlap="on", speculative_config=speculative)
    assert str(caught.value) == (
        f"spec_overlap is on, which needs a draft model, and {drafter}; "
        """add speculative_config '{"model": "DRAFT"}' or leave spec_overlap away"""
    )
    EngineConfig(spec_overlap="on", speculative_config={"model": "DRAFT"})
    EngineConfig(spec_overlap="on", speculative_config=speculative, speculative_policy="off")
