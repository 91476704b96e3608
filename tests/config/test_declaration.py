"""How settings are described, read from text, checked and shown, by all settings of engine and server."""

from pathlib import Path

import pytest

from faser.config.declaration import GROUPS, Kind, Setting, complaint, limits, read, settings_of, show_bytes
from faser.config.engine import EngineConfig
from faser.config.server import ServerConfig

ALL = settings_of(EngineConfig) + settings_of(ServerConfig)


def named(name: str) -> Setting:
    return next(each for each in ALL if each.name == name)


def test_no_two_settings_share_a_name_or_a_flag() -> None:
    flags = [flag for each in ALL for flag in (each.flag, *each.aliases)]
    assert len(set(flags)) == len(flags)


@pytest.mark.parametrize(
    "name, text, value",
    [
        ("max_model_len", "4096", 4096),
        ("max_model_len", "4k", 4000),
        ("max_model_len", "4K", 4096),
        ("max_model_len", "1.5k", 1500),
        ("max_model_len", "0.001k", 1),
        ("max_model_len", "9007199254740993", 9007199254740993),
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
        ("quantization", "none", "none"),
        ("kv_cache_dtype", "fp8_e4m3", "fp8"),
        ("kv_cache_dtype", "auto", "auto"),
        ("kv_cache_dtype", "int8", "int8"),
        ("kv_cache_dtype", "int8_per_token_head", "int8"),
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
def test_a_text_is_read_as_a_value(name: str, text: str, value: object) -> None:
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
def test_a_text_that_cannot_be_read_is_refused_with_what_is_expected(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=r"^it must be "):
        read(named(name), (text,))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_are_no_numbers(value: float) -> None:
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


def test_a_size_of_hundreds_of_digits_is_shown() -> None:
    assert show_bytes(10**400).endswith("TiB")


def test_a_file_to_write_may_be_new_but_its_folder_must_be_there(tmp_path: Path) -> None:
    trace = named("trace_steps")
    (tmp_path / "old").write_text("")
    assert complaint(trace, str(tmp_path / "old")) is None
    assert complaint(trace, str(tmp_path / "new")) is None
    assert complaint(trace, "/dev/null") is None
    problem = "it must be the path of a file that can be written, in a folder that exists"
    for path in (tmp_path, tmp_path / "no" / "new", tmp_path / "old" / "new"):
        assert complaint(trace, str(path)) == problem
    assert not (tmp_path / "new").exists()


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


def test_every_setting_has_a_place_in_help() -> None:
    assert {each.group for each in ALL} == set(GROUPS)
    assert all(each.help.endswith(".") for each in ALL)


def test_every_kind_is_used() -> None:
    assert {each.kind for each in ALL} == set(Kind)
