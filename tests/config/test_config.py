"""Settings: what can be, what cannot, and in which words."""

import dataclasses
from pathlib import Path

import msgspec
import pytest

from faser.config.declaration import Kind, Setting, complaint, limits, read, settings_of, show_bytes
from faser.config.engine import EngineConfig
from faser.config.environment import (
    cache_dir,
    child_environment,
    cuda_environment,
    flag_environment,
    flashinfer_workspace,
    may_compile_kernels,
)
from faser.config.groups import GROUPS
from faser.config.server import ServerConfig
from faser.errors import ConfigError

ALL = settings_of(EngineConfig) + settings_of(ServerConfig)


def named(name: str) -> Setting:
    return next(each for each in ALL if each.name == name)


def test_every_default_is_sound() -> None:
    EngineConfig()
    ServerConfig()


def test_no_two_settings_share_a_name_or_a_flag() -> None:
    flags = [flag for each in ALL for flag in (each.flag, *each.aliases)]
    assert len(set(flags)) == len(flags)


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
        (
            {"quantization": "awq"},
            "quantization is awq; only fp8 is implemented; use fp8 or an unquantized checkpoint",
        ),
        (
            {"quantization": "gguf"},
            "quantization is gguf; the type of a quantized checkpoint is read from its files; leave it out",
        ),
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype is fp4; it must be one of auto, fp8"),
        (
            {"kv_cache_dtype": "fp8_e5m2"},
            "kv_cache_dtype is fp8_e5m2; of 8-bit types only e4m3 is implemented; use fp8 or auto",
        ),
        (
            {"kv_cache_dtype": "bfloat16"},
            "kv_cache_dtype is bfloat16; keys and values are stored as they are computed, in --dtype, or in 8 bits"
            "; use auto or fp8",
        ),
        (
            {"kv_cache_dtype": "fp8", "device": "cpu", "backend": "native"},
            "kv_cache_dtype is fp8; no kernels for CPUs read 8-bit keys and values; use auto, or the torch backend"
            ", which is slow",
        ),
        ({"quantization": "int3"}, "quantization is int3; it must be one of fp8"),
        (
            {"cudagraph_capture_sizes": (8, 0)},
            "cudagraph_capture_sizes is 8 0; it must be at least 1 and at most 8192",
        ),
        (
            {"cudagraph_capture_sizes": (1, 512)},
            "cudagraph_capture_sizes has 512; no step has more rows than max_num_batched_tokens, which is 256",
        ),
        ({"cudagraph_capture_sizes": ()}, "cudagraph_capture_sizes is ; it must be whole numbers, such as 1 8 64"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization is 0.0; it must be above 0 and at most 1"),
        ({"kv_cache_memory": 100}, "kv_cache_memory is 100B; it must be at least 1MiB"),
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


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"port": 65536}, "port is 65536; it must be at least 0 and at most 65535"),
        ({"host": ""}, "host is ; it must be text"),
        ({"api_key": ("",)}, "api_key is ***; it must be text"),
        (
            {"chat_template": "/no/such"},
            "chat_template is /no/such; it must be the path of a file that can be read",
        ),
        ({"root_path": "x"}, "root_path is x; it must begin with /"),
        (
            {"override_generation_config": {"temprature": 1}},
            "override_generation_config: unknown key 'temprature'. Known keys: temperature, top_p, top_k, min_p, "
            "presence_penalty, frequency_penalty, repetition_penalty, max_tokens",
        ),
        (
            {"override_generation_config": {"temperature": 3.0}},
            "override_generation_config: temperature is 3.0; it must be at least 0.0 and at most 2.0",
        ),
        (
            {"override_generation_config": {"top_k": 1.5}},
            "override_generation_config: top_k is 1.5; it must be a whole number",
        ),
    ],
)
def test_an_impossible_server_setting_names_value_and_limit(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerConfig(**fields)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_a_certificate_needs_its_key(tmp_path: Path) -> None:
    certificate = tmp_path / "cert.pem"
    certificate.touch()
    with pytest.raises(ConfigError, match="it needs ssl_keyfile, which is not set"):
        ServerConfig(ssl_certfile=str(certificate))


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(device="cpu", max_num_seqs=0, block_size=1, kv_cache_memory=1 << 50)
    assert str(caught.value).count(" is ") >= 3


@pytest.mark.parametrize(
    "name, text, value",
    [
        ("max_model_len", "4096", 4096),
        ("max_model_len", "4k", 4000),
        ("max_model_len", "4K", 4096),
        ("max_model_len", "1.5k", 1500),
        ("max_model_len", "auto", None),
        ("max_model_len", "-1", None),
        ("kv_cache_memory", "2GiB", 2 << 30),
        ("kv_cache_memory", "512M", 512 << 20),
        ("kv_cache_memory", "512mb", 512 << 20),
        ("kv_cache_memory", "0.5g", 512 << 20),
        ("kv_cache_memory", "1048576", 1 << 20),
        ("seed", "-7", -7),
        ("seed", "9223372036854775807", 2**63 - 1),
        ("dtype", "half", "float16"),
        ("quantization", "none", None),
        ("kv_cache_dtype", "fp8_e4m3", "fp8"),
        ("kv_cache_dtype", "auto", "auto"),
        ("quantization", "fp8", "fp8"),
        ("cudagraph_capture_sizes", "8", (8,)),
        ("async_scheduling", "auto", None),
        ("async_scheduling", "off", False),
        ("generation_config", "vllm", "none"),
        ("enable_prefix_caching", "Off", False),
        ("enable_prefix_caching", "1", True),
        ("shutdown_timeout", "0", 0.0),
    ],
)
def test_a_text_stands_for_a_value(name: str, text: str, value: object) -> None:
    assert read(named(name), (text,)) == value


@pytest.mark.parametrize(
    "name, text",
    [
        ("max_num_seqs", "many"),
        ("max_num_seqs", "1.5"),
        ("max_num_seqs", "auto"),
        ("seed", "1.0"),
        ("kv_cache_memory", "2 gigabytes"),
        ("kv_cache_memory", "0.3"),
        ("enable_prefix_caching", "maybe"),
        ("enable_prefix_caching", "auto"),
        ("cudagraph_capture_sizes", "1.5"),
        ("cudagraph_capture_sizes", "few"),
        ("override_generation_config", "[1]"),
        ("override_generation_config", "{"),
        ("shutdown_timeout", "soon"),
    ],
)
def test_a_text_that_stands_for_nothing_says_what_is_expected(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=r"^it must be "):
        read(named(name), (text,))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_none_is_refused(value: float) -> None:
    assert complaint(named("shutdown_timeout"), value) == "it must be a number"


@pytest.mark.parametrize(
    "each", [each for each in ALL if limits(each) and not each.choices], ids=lambda each: each.name
)
def test_the_limits_themselves_are_allowed_and_what_lies_beyond_is_not(each: Setting) -> None:
    step = each.multiple_of or 1
    several = each.kind is Kind.COUNTS

    def problem(value: float) -> str | None:
        return complaint(each, (value,) if several else value)

    if each.low is not None:
        assert (problem(each.low) is None) is not each.above
        assert problem(each.low - step) is not None
    if each.high is not None:
        assert problem(each.high) is None
        assert problem(each.high + step) is not None


def test_sizes_are_shown_in_the_largest_unit_that_fits() -> None:
    assert [show_bytes(size) for size in (5, 1 << 10, 1536, 32 << 20, 3 << 40)] == [
        "5B",
        "1KiB",
        "1.5KiB",
        "32MiB",
        "3TiB",
    ]


def test_a_secret_is_never_shown() -> None:
    assert [each.name for each in ALL if each.secret] == ["api_key"]


def test_the_cache_is_where_the_environment_says() -> None:
    assert cache_dir({}) == Path.home() / ".cache" / "faser"
    assert cache_dir({"XDG_CACHE_HOME": "/x"}) == Path("/x/faser")
    assert cache_dir({"XDG_CACHE_HOME": "/x", "FASER_CACHE_DIR": "/own"}) == Path("/own")


def test_the_engines_process_gets_no_keys() -> None:
    environment = {"FASER_API_KEY": "secret", "VLLM_API_KEY": "secret", "FASER_CACHE_DIR": "/own"}
    assert child_environment(environment) == {"FASER_CACHE_DIR": "/own"}


def test_our_own_key_variable_wins_over_vllms() -> None:
    theirs = {"VLLM_API_KEY": "theirs"}
    assert flag_environment(ALL, theirs)[0]["api_key"] == ("VLLM_API_KEY", "theirs")
    assert flag_environment(ALL, theirs | {"FASER_API_KEY": "ours"})[0]["api_key"] == ("FASER_API_KEY", "ours")


def test_every_setting_has_a_place_in_help() -> None:
    assert {each.group for each in ALL} == set(GROUPS)
    assert all(each.help.endswith(".") for each in ALL)


def test_configs_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().seed = 1  # type: ignore[misc]


def test_every_kind_is_used() -> None:
    assert {each.kind for each in ALL} == set(Kind)


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
def test_steps_are_recorded_and_launched_ahead_on_gpus(
    fields: dict[str, object], on_gpu: bool, records: bool, ahead: bool
) -> None:
    config = EngineConfig(**fields)  # type: ignore[arg-type]
    assert (config.on_gpu, config.records_steps, config.schedules_async) == (on_gpu, records, ahead)


def test_a_cpus_memory_does_not_limit_a_gpus_cache() -> None:
    assert EngineConfig(device="cuda", kv_cache_memory=1 << 50).kv_cache_memory == 1 << 50


def test_cudas_environment_is_filled_where_nothing_was_set() -> None:
    environment = {"FASER_CACHE_DIR": "/own", "CUDA_DEVICE_MAX_CONNECTIONS": "8", "PATH": "/bin"}
    cuda_environment(environment)
    assert environment == {
        "FASER_CACHE_DIR": "/own",
        "PATH": "/bin",
        "CUDA_DEVICE_MAX_CONNECTIONS": "8",
        "FLASHINFER_USE_CUDA_NORM": "1",
        "FLASHINFER_WORKSPACE_BASE": "/own/kernels",
    }
    assert may_compile_kernels(environment)


def test_compiling_is_forbidden_by_the_setting_or_by_flashinfers_own_variable() -> None:
    environment: dict[str, str] = {}
    cuda_environment(environment, compile_kernels=False)
    assert not may_compile_kernels(environment)
    assert not may_compile_kernels({"FLASHINFER_DISABLE_JIT": "0"})
    assert may_compile_kernels({"FLASHINFER_DISABLE_JIT": ""})


def test_what_flashinfer_compiles_is_kept_where_the_operator_says() -> None:
    assert flashinfer_workspace({"FASER_CACHE_DIR": "/own"}) == Path("/own/kernels")
    own = {"FASER_CACHE_DIR": "/own", "FLASHINFER_WORKSPACE_BASE": "/theirs"}
    assert flashinfer_workspace(own) == Path("/theirs")
