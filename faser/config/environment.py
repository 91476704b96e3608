"""Environment variables: the only module that reads or writes them."""

import os
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from faser.config.declaration import Setting
from faser.errors import ConfigError

LONGEST_STEP_TIMES_S = 600.0


def cache_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder of models, compiled kernels and step times: FASER_CACHE_DIR, else in the user's cache folder."""
    if own := environment.get("FASER_CACHE_DIR"):
        return Path(own).expanduser()
    shared = Path(environment.get("XDG_CACHE_HOME", ""))
    if shared.is_absolute():  # its specification ignores others: kernels must not come from the working directory
        return shared / "faser"
    return Path.home() / ".cache" / "faser"


def cpu_isa(environment: Mapping[str, str] = os.environ) -> str | None:
    """The instruction set that FASER_CPU_ISA asks for. None: it asks for none."""
    return environment.get("FASER_CPU_ISA") or None


def step_times_s(usual_s: float, environment: Mapping[str, str] = os.environ) -> float:
    """For how long a start that finds no step times measures them: FASER_STEP_TIMES_SECONDS, else usual_s.

    Raises ConfigError for what is no number of seconds up to LONGEST_STEP_TIMES_S.
    """
    text = environment.get("FASER_STEP_TIMES_SECONDS")
    if not text:
        return usual_s
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= LONGEST_STEP_TIMES_S:
        raise ConfigError(
            f"FASER_STEP_TIMES_SECONDS is {text!r}; it must be above 0 and at most {LONGEST_STEP_TIMES_S:g}"
        )
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """A process that torchrun has started, `life` times before. host, port: of the store where its ranks meet.

    local: its number among those of this machine.
    """

    rank: int
    size: int
    host: str
    port: int
    life: str
    local: int = 0


def rank_place(environment: Mapping[str, str] = os.environ) -> RankPlace | None:
    """Return the rank and address that torchrun has given this process; None: torchrun has not started it."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    return RankPlace(
        rank=int(environment["RANK"]),
        size=int(environment["WORLD_SIZE"]),
        host=environment["MASTER_ADDR"],
        port=int(environment["MASTER_PORT"]),
        life=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        local=int(environment.get("LOCAL_RANK", "0")),
    )


def ranks_here(size: int, environment: Mapping[str, str] = os.environ) -> int:
    """Return how many of `size` ranks share this machine: all, unless torchrun has put them on several."""
    started = "TORCHELASTIC_RUN_ID" in environment
    return int(environment.get("LOCAL_WORLD_SIZE", size)) if started else size


def keep_on_loopback(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let NCCL's ranks of one machine meet on the loopback interface, unless the operator names another one."""
    environment.setdefault("NCCL_SOCKET_IFNAME", "lo")


def child_environment(environment: Mapping[str, str] = os.environ, *, gpus: Sequence[int] = ()) -> dict[str, str]:
    """Return the environment of a child: this one's without keys, which children do not use.

    Python programs that the child starts, such as build tools, import nothing from the working directory either.

    gpus: those of the visible ones that the process sees; none: all of them.
    """
    found = {name: value for name, value in environment.items() if name not in _SECRETS}
    found["PYTHONSAFEPATH"] = "1"
    if gpus:
        visible = found.get(_GPUS, "").split(",") if found.get(_GPUS) else []
        found[_GPUS] = ",".join(visible[gpu] if gpu < len(visible) else str(gpu) for gpu in gpus)
    return found


_GPUS = "CUDA_VISIBLE_DEVICES"


_SECRETS = (
    "FASER_API_KEY",
    "VLLM_API_KEY",
    "OTEL_EXPORTER_OTLP_HEADERS",
    "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
)


def traces_protocol(environment: Mapping[str, str] = os.environ) -> tuple[str, str | None]:
    """(variable, value) of the protocol in which OpenTelemetry is to send spans; None: it is not set."""
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if value := environment.get(name):
            return name, value
    return "", None


def proxy(environment: Mapping[str, str] = os.environ) -> tuple[str, str] | None:
    """(variable, URL without user and password) of the proxy for https; None: there is none."""
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        if url := environment.get(name):
            scheme, separator, rest = url.rpartition("://")
            return name, scheme + separator + rest.rpartition("@")[2]
    return None


def cuda_environment(environment: MutableMapping[str, str] = os.environ, *, compile_kernels: bool = True) -> None:
    """Set the variables that CUDA and FlashInfer read, but none that the operator has set.

    Call it before the process uses CUDA for the first time, and before flashinfer is imported.
    """
    wanted = {
        # Queues between this process and the GPU: streams that share one wait for each other.
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        _WORKSPACE: str(flashinfer_workspace(environment)),
    }
    if not compile_kernels:
        wanted[_NO_COMPILING] = "1"
    for name, value in wanted.items():
        environment.setdefault(name, value)


def may_compile_kernels(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether FlashInfer compiles missing kernels. Any text forbids it, even 0: FlashInfer reads it so."""
    return not environment.get(_NO_COMPILING)


def flashinfer_workspace(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder of the kernels that FlashInfer compiles."""
    return Path(environment.get(_WORKSPACE) or cache_dir(environment) / "kernels")


_NO_COMPILING, _WORKSPACE = "FLASHINFER_DISABLE_JIT", "FLASHINFER_WORKSPACE_BASE"


def flag_environment(
    settings: Iterable[Setting], environment: Mapping[str, str] = os.environ
) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """(variable, text) of each setting that a variable gives, by name; and unknown FASER_* variables."""
    by_variable = {each.variable: each.name for each in settings}
    given, unknown = {}, []
    for variable, name in _VLLM_VARIABLES.items():
        if variable in environment and name in by_variable.values():
            given[name] = (variable, environment[variable])
    for variable, text in sorted(environment.items()):
        if variable in by_variable:
            given[by_variable[variable]] = (variable, text)
        elif variable.startswith("FASER_") and variable not in _OTHER_VARIABLES:
            unknown.append(variable)
    return given, unknown


_VLLM_VARIABLES = {
    "VLLM_API_KEY": "api_key",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "allow_runtime_lora_updating",
}
_OTHER_VARIABLES = ("FASER_CACHE_DIR", "FASER_CPU_ISA", "FASER_STEP_TIMES_SECONDS")
