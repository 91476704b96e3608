"""Texts a second and latency of embeddings: FASER, sentence-transformers and llama.cpp, from one file of weights.

    python -m benchmarks peers.setup sentence-transformers llamacpp      # once
    python -m benchmarks peers.embeddings MODEL.gguf [--texts 64] [--out FILE]

Every round asks each system for the vectors of the same texts: of all in one request, and of single texts one by
one. The texts are real prompts of mixed lengths, other ones in each round; long ones are cut. The system under
measurement runs, the others are frozen. Processor seconds are there for machines that do other work meanwhile.
sentence-transformers gets the file's weights in bfloat16 or float32, which it computes faster than packed ones.

Nothing is timed unless all systems embed the same: before, their vectors of some texts are compared with those of
sentence-transformers in float32, or where that is not measured with the first system's. Rounding to 8 bits
moves single vectors, so the median cosine has to be 0.999, and the least one 0.99.
"""

import argparse
import base64
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.models.bfloat16_checkpoint import convert
from benchmarks.peers import llamacpp
from benchmarks.peers.setup import DEFAULT_DIRECTORY
from benchmarks.prompts import load_prompts
from benchmarks.runner import (
    PROMPTS_VARIABLE,
    Json,
    about,
    command_line,
    end_servers_on_sigterm,
    interleaved,
    write_json,
)
from benchmarks.servers import Recipe, Server, busy_s, free_port

FASER = "faser"
_SYSTEMS = (FASER, "sentence-transformers", "llamacpp")
_MAX_TOKENS = 2048
_SINGLE = 8  # texts that are asked for one by one
_CHECKED = 16  # texts whose vectors are compared before anything is timed
_MEDIAN_COSINE, _LEAST_COSINE = 0.999, 0.99
_ORACLE = "sentence-transformers"
_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One round of one system. batch_s, batch_cpu_s, vectors [N, D]: of all texts. single_s: of each single one.

    others: cores that other processes used meanwhile.
    """

    batch_s: float
    batch_cpu_s: float
    single_s: tuple[float, ...]
    vectors: Any
    others: float

    @property
    def texts_per_s(self) -> float:
        return len(self.vectors) / self.batch_s

    @property
    def latency_s(self) -> float:
        return statistics.median(self.single_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = command_line(__doc__)
    prompts = os.environ.get(PROMPTS_VARIABLE)
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--prompts", type=Path, default=prompts and Path(prompts), required=not prompts)
    parser.add_argument("--systems", default=",".join(_SYSTEMS), help="[%(default)s]")
    parser.add_argument("--texts", type=int, default=64, help="of one request [%(default)s]")
    parser.add_argument("--most-chars", type=int, default=2000, help="of a text [%(default)s]")
    parser.add_argument("--rounds", type=int, default=5, help="[%(default)s]")
    parser.add_argument("--cores", type=int, default=2, help="[%(default)s]")
    parser.add_argument("--faser-args", default="", help="more flags for `faser serve`, as one string")
    parser.add_argument("--st-dtype", default="bfloat16", help="of sentence-transformers [%(default)s]")
    parser.add_argument("--st-batch", type=int, default=8, help="texts of its batches [%(default)s]")
    parser.add_argument("--directory", type=Path, default=DEFAULT_DIRECTORY, help="of the peers [%(default)s]")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/embeddings-cpu.json"))
    given = parser.parse_args(arguments)
    end_servers_on_sigterm()
    cores = sorted(os.sched_getaffinity(0))[: given.cores]
    os.sched_setaffinity(0, cores)
    given.directory.mkdir(parents=True, exist_ok=True)
    names = given.systems.split(",")
    texts = [each.text[: given.most_chars] for each in load_prompts(given.prompts)]
    wanted = {}
    if _ORACLE in names:
        exact = argparse.Namespace(**{**vars(given), "st_dtype": "float32"})
        with _started(_recipe(_ORACLE, exact, len(cores))) as server:
            wanted["float32"] = _vectors(_ORACLE, server, texts[:_CHECKED])
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(_started(_recipe(name, given, len(cores)))) for name in names}
        found = {name: _vectors(name, server, texts[:_CHECKED]) for name, server in servers.items()}
        agreement = check({**wanted, **found})

        def run(_: Mapping[str, Any], name: str, number: int) -> Found:
            return _round(name, servers, _taken(texts, number, given.texts), number)

        cells = interleaved([{"texts": given.texts}], names, given.rounds, run)
    runs = cells[0].runs
    rows = {name: _summary(found, runs) for name, found in runs.items()}
    for name, row in rows.items():
        print(f"{name:24} {row}")
    head = about("peers.embeddings", arguments or sys.argv[1:], cores)
    write_json(
        given.out,
        {
            **head,
            "model": given.model.name,
            "weights": llamacpp.contents(given.model),
            "commands": {name: server.recipe.shown for name, server in servers.items()},
            "agreement": agreement,
            "systems": rows,
        },
    )
    return 0


def _taken(texts: Sequence[str], number: int, count: int) -> list[str]:
    return [texts[(number * count + at) % len(texts)] for at in range(count)]


def check(vectors: Mapping[str, Any]) -> Json:
    """Compare the vectors [N, D] of all systems with those of the first one. Returns the cosines of each.

    Raises ValueError that names the system, the text and the cosines, where they are too small.
    """
    (first, wanted), *others = vectors.items()
    agreement = {}
    for name, found in others:
        cosines = _cosines(wanted, found)
        at, median, least = int(cosines.argmin()), float(np.median(cosines)), float(cosines.min())
        agreement[name] = {"with": first, "median_cosine": round(median, 5), "least_cosine": round(least, 5)}
        print(f"{name}: {agreement[name]}", flush=True)
        if not (median >= _MEDIAN_COSINE and least >= _LEAST_COSINE):
            raise ValueError(
                f"{name} and {first} do not embed the same: the median cosine is {median:.4f} and must be "
                f"{_MEDIAN_COSINE}; the least one, of text {at}, is {least:.4f} and must be {_LEAST_COSINE}"
            )
    return agreement


def _cosines(one: Any, other: Any) -> Any:
    """Return the cosine of each pair of rows, [N]."""
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    return (one * other).sum(axis=1) / lengths


def _summary(found: Sequence[Found], runs: Mapping[str, Sequence[Found]]) -> dict[str, Any]:
    """Return medians over rounds, and ratios to this system round by round."""
    mine = runs.get(FASER, found)
    return {
        "texts_per_s": round(statistics.median(each.texts_per_s for each in found), 3),
        "latency_ms": round(1000 * statistics.median(each.latency_s for each in found), 2),
        "faser_texts_ratio": round(
            statistics.median(one.texts_per_s / each.texts_per_s for one, each in zip(mine, found, strict=True)), 3
        ),
        "faser_latency_ratio": round(
            statistics.median(each.latency_s / one.latency_s for one, each in zip(mine, found, strict=True)), 3
        ),
        "cpu_s": round(statistics.median(each.batch_cpu_s for each in found), 2),
        "least_cosine": round(
            min(float(_cosines(one.vectors, each.vectors).min()) for one, each in zip(mine, found, strict=True)), 5
        ),
        "others_cores": round(max(each.others for each in found), 2),
        "rounds": [[round(each.batch_s, 3), [round(one, 4) for one in each.single_s]] for each in found],
    }


def _round(name: str, servers: Mapping[str, Server], texts: Sequence[str], number: int) -> Found:
    server = servers[name]
    with server.awake(), _client(server) as http:
        _ask(http, name, ["Hello."], "hello")
        busy_before_s, began_s = busy_s(list(servers.values())), time.perf_counter()
        before_s = server.cpu_s()
        batch_s, vectors = _ask(http, name, texts, f"{number}")
        batch_cpu_s = server.cpu_s() - before_s
        single = tuple(_ask(http, name, [each], f"{number}/single")[0] for each in texts[:_SINGLE])
        others = (busy_s(list(servers.values())) - busy_before_s) / (time.perf_counter() - began_s)
    return Found(
        batch_s=batch_s, batch_cpu_s=batch_cpu_s, single_s=single, vectors=vectors, others=max(0.0, others)
    )


def _vectors(name: str, server: Server, texts: Sequence[str]) -> Any:
    with server.awake(), _client(server) as http:
        return _ask(http, name, texts, "check")[1]


def _client(server: Server) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=_TIMEOUT_S, trust_env=False)


def _ask(http: httpx.Client, name: str, texts: Sequence[str], salt: str) -> tuple[float, Any]:
    """Return the seconds of one request, and the vectors [N, D]. salt: of FASER's prefix cache."""
    extra = {"cache_salt": salt} if name == FASER else {}
    body = {"model": "bench", "input": list(texts), "encoding_format": "base64", **extra}
    began_s = time.perf_counter()
    answer = http.post("/v1/embeddings", json=body)
    took_s = time.perf_counter() - began_s
    data = sorted(answer.raise_for_status().json()["data"], key=lambda each: each["index"])
    return took_s, np.stack([np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in data])


@contextlib.contextmanager
def _started(recipe: Recipe) -> Iterator[Server]:
    with Server(recipe) as server:
        print(f"{recipe.name} is up after {server.wait_until_healthy(_TIMEOUT_S):.0f} s", flush=True)
        server.freeze()
        yield server


def _dense_model(given: Any) -> Path:
    """Return the file's weights as a checkpoint in bfloat16, written once."""
    directory: Path = given.directory / f"{given.model.parent.name}-{given.model.stem}-bf16"
    if not directory.exists():
        unfinished = directory.with_name(f".{directory.name}")
        convert(given.model, unfinished)
        unfinished.rename(directory)
    return directory


def _recipe(name: str, given: Any, threads: int) -> Recipe:
    """Return how a system is started. Raises ValueError for an unknown name."""
    port = free_port()
    address = ("--host", "127.0.0.1", "--port", str(port))
    match name:
        case "faser":
            command: tuple[str, ...] = (
                *(sys.executable, "-m", "faser", "serve", str(given.model), "--quantization", "gguf"),
                *("--served-model-name", "bench", "--num-threads", str(threads)),
                *("--max-model-len", str(_MAX_TOKENS), *given.faser_args.split(), *address),
            )
        case "sentence-transformers":
            python = given.directory.absolute() / "sentence-transformers" / "bin" / "python"
            command = (
                *(str(python), str(Path(__file__).with_name("sentence_server.py")), str(_dense_model(given))),
                *("--threads", str(threads), "--dtype", given.st_dtype, "--batch-size", str(given.st_batch)),
                *("--max-tokens", str(_MAX_TOKENS), *address),
            )
        case "llamacpp":
            command = (
                *(str(llamacpp.server_path(given.directory / "llamacpp")), "--model", str(given.model)),
                *("--embedding", "--pooling", "last", "--threads", str(threads), "--threads-batch", str(threads)),
                *("--parallel", "16", "--kv-unified", "--ctx-size", str(16 * _MAX_TOKENS)),
                *("--batch-size", str(_MAX_TOKENS), "--ubatch-size", str(_MAX_TOKENS)),
                *("--no-cache-prompt", "--cache-ram", "0", "--no-ui", *address),
            )
        case _:
            raise ValueError(f"{name} is no system; known are {', '.join(_SYSTEMS)}")
    log = given.directory / f"embeddings-{name}.log"
    return Recipe(name=name, command=command, base_url=f"http://127.0.0.1:{port}", log_path=log)
