"""Which environment variables are read and written, and which wins."""

from pathlib import Path

import pytest

from faser.config.declaration import settings_of
from faser.config.engine import EngineConfig
from faser.config.environment import (
    cache_dir,
    child_environment,
    cpu_isa,
    cuda_environment,
    flag_environment,
    flashinfer_workspace,
    keep_on_loopback,
    may_compile_kernels,
    rank_place,
    step_times_s,
)
from faser.config.server import ServerConfig
from faser.errors import ConfigError

ALL = settings_of(EngineConfig) + settings_of(ServerConfig)


def test_the_cache_is_where_the_environment_says() -> None:
    assert cache_dir({}) == Path.home() / ".cache" / "faser"
    assert cache_dir({"XDG_CACHE_HOME": "/x"}) == Path("/x/faser")
    assert cache_dir({"XDG_CACHE_HOME": "x"}) == cache_dir({"XDG_CACHE_HOME": ""}) == cache_dir({})
    assert cache_dir({"XDG_CACHE_HOME": "/x", "FASER_CACHE_DIR": "/own"}) == Path("/own")


def test_the_instruction_set_is_the_one_asked_for_if_any() -> None:
    assert cpu_isa({}) is cpu_isa({"FASER_CPU_ISA": ""}) is None
    assert cpu_isa({"FASER_CPU_ISA": "avx2"}) == "avx2"
    assert flag_environment(ALL, {"FASER_CPU_ISA": "avx2"}) == ({}, [])


def test_a_start_measures_steps_as_long_as_the_environment_says() -> None:
    variable = "FASER_STEP_TIMES_SECONDS"
    assert step_times_s(3.5, {}) == step_times_s(3.5, {variable: ""}) == 3.5
    assert step_times_s(3.5, {variable: "0.5"}) == 0.5
    assert flag_environment(ALL, {variable: "1"}) == ({}, [])
    for text in ("0", "-1", "nan", "601", "long"):
        with pytest.raises(ConfigError, match=f"{variable} is '{text}'; it must be above 0 and at most 600"):
            step_times_s(3.5, {variable: text})


def test_a_child_has_no_keys_and_its_own_children_import_nothing_from_the_working_directory() -> None:
    environment = {"FASER_API_KEY": "secret", "VLLM_API_KEY": "secret", "FASER_CACHE_DIR": "/own"}
    environment |= {"OTEL_EXPORTER_OTLP_HEADERS": "k=secret", "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "k=secret"}
    assert child_environment(environment) == {"FASER_CACHE_DIR": "/own", "PYTHONSAFEPATH": "1"}


def test_our_own_key_variable_wins_over_vllms() -> None:
    theirs = {"VLLM_API_KEY": "theirs"}
    assert flag_environment(ALL, theirs)[0]["api_key"] == ("VLLM_API_KEY", "theirs")
    assert flag_environment(ALL, theirs | {"FASER_API_KEY": "ours"})[0]["api_key"] == ("FASER_API_KEY", "ours")


def test_vllms_leave_to_change_adapters_is_taken() -> None:
    name, variable = "allow_runtime_lora_updating", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
    assert flag_environment(ALL, {variable: "True"}) == ({name: (variable, "True")}, [])


def test_cudas_environment_is_filled_where_nothing_was_set() -> None:
    environment = {"FASER_CACHE_DIR": "/own", "CUDA_DEVICE_MAX_CONNECTIONS": "8", "PATH": "/bin"}
    cuda_environment(environment)
    assert environment == {
        "FASER_CACHE_DIR": "/own",
        "PATH": "/bin",
        "CUDA_DEVICE_MAX_CONNECTIONS": "8",
        "FLASHINFER_WORKSPACE_BASE": "/own/kernels",
    }
    assert may_compile_kernels(environment)


def test_compiling_is_forbidden_by_the_setting_or_by_flashinfers_own_variable() -> None:
    environment: dict[str, str] = {}
    cuda_environment(environment, compile_kernels=False)
    assert not may_compile_kernels(environment)
    assert not may_compile_kernels({"FLASHINFER_DISABLE_JIT": "0"})
    assert may_compile_kernels({"FLASHINFER_DISABLE_JIT": ""})


def test_kernels_of_flashinfer_lie_where_the_operator_wants_them() -> None:
    assert flashinfer_workspace({"FASER_CACHE_DIR": "/own"}) == Path("/own/kernels")
    own = {"FASER_CACHE_DIR": "/own", "FLASHINFER_WORKSPACE_BASE": "/theirs"}
    assert flashinfer_workspace(own) == Path("/theirs")


def test_a_child_sees_the_gpus_that_it_is_given_of_the_visible_ones() -> None:
    for visible, gpus, seen in (("", (2, 3), "2,3"), ("5,7,9", (1, 2), "7,9"), ("5", (0, 1), "5,1")):
        assert child_environment({"CUDA_VISIBLE_DEVICES": visible}, gpus=gpus)["CUDA_VISIBLE_DEVICES"] == seen
    assert child_environment({"CUDA_VISIBLE_DEVICES": "5"})["CUDA_VISIBLE_DEVICES"] == "5"


def test_ranks_know_their_place_on_a_machine_and_stay_on_it() -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "x", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    place = rank_place(torchrun | {"MASTER_ADDR": "host", "MASTER_PORT": "1"})
    assert place is not None
    assert (place.rank, place.local, place.size) == (5, 1, 8)
    for given, kept in (({}, "lo"), ({"NCCL_SOCKET_IFNAME": "eth0"}, "eth0")):
        environment: dict[str, str] = dict(given)
        keep_on_loopback(environment)
        assert environment["NCCL_SOCKET_IFNAME"] == kept
