"""Settings: what can be, what cannot, and in which words."""

import dataclasses
from pathlib import Path

import msgspec
import pytest

from faser import config
from faser.config import EngineConfig, ServerConfig, cache_dir, child_environment, flag_environment
from faser.errors import ConfigError
from faser.setting import Kind, Setting, complaint, limits, read, settings_of, show_bytes

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
    sent = EngineConfig(model="m", kv_cache_memory=1 << 21, num_threads=2, enable_prefix_caching=False)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=EngineConfig) == sent


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0; it must be at least 1 and at most 4096"),
        ({"max_num_seqs": 4097}, "max_num_seqs is 4097; it must be at least 1 and at most 4096"),
        ({"block_size": 24}, "block_size is 24; it must be a multiple of 16, at least 16 and at most 256"),
        ({"dtype": "int8"}, "dtype is int8; it must be one of auto, bfloat16, float32"),
        ({"dtype": "float16"}, "dtype is float16; it is not computed on a CPU; use bfloat16 or float32"),
        ({"device": "cuda"}, "device is cuda; this build runs on the CPU only; use cpu"),
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
        EngineConfig(kv_cache_memory=1 << 50)


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
        EngineConfig(max_num_seqs=0, block_size=1, kv_cache_memory=1 << 50)
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
    if each.low is not None:
        assert (complaint(each, each.low) is None) is not each.above
        assert complaint(each, each.low - step) is not None
    if each.high is not None:
        assert complaint(each, each.high) is None
        assert complaint(each, each.high + step) is not None


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
    assert {each.group for each in ALL} == set(config.GROUPS)
    assert all(each.help.endswith(".") for each in ALL)


def test_configs_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().seed = 1  # type: ignore[misc]


def test_every_kind_is_used() -> None:
    assert {each.kind for each in ALL} == set(Kind)
