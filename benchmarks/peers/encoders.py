"""Texts a second of an encoder: FASER, sentence-transformers and llama.cpp, with the same weights and threads.

    python -m venv VENV && VENV/bin/pip install sentence-transformers
    python -m benchmarks peers.encoders MODEL --python VENV/bin/python [--llama-server PATH --gguf MODEL.gguf]

MODEL is a folder of sentence-transformers; the GGUF file has the same weights, from llama.cpp's own converter.
Each round asks each system for the vectors of the same texts, first of all of them at once, then of a few one by
one. The texts are real prompts of mixed lengths, cut to what the model reads. FASER and llama.cpp are asked by
HTTP, sentence-transformers in its own process, without HTTP, in batches of each size of --batches of which the
best counts. Vectors are compared with those of sentence-transformers in float32. Processor seconds are of the
system's processes, and say more than wall seconds on a machine with other work.
"""

import base64
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from benchmarks.prompts import load_prompts
from benchmarks.runner import PROMPTS_VARIABLE, about, command_line, interleaved, numbers, write_json
from benchmarks.servers import Recipe, Server, free_port
from faser.engine.text.tokenizer import load_tokenizer

_ORACLE = "sentence-transformers"
_SINGLE = 8  # texts that are asked for one by one
_TIMEOUT_S = 1200.0
# Answers each line, {"texts": …, "batch": …}, with {"vectors": base64 of float32}.
_LIBRARY = """
import base64, json, sys, torch
from sentence_transformers import SentenceTransformer
path, dtype, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
model = SentenceTransformer(path, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
for line in sys.stdin:
    asked = json.loads(line)
    found = model.encode(asked["texts"], batch_size=asked["batch"], show_progress_bar=False)
    print(json.dumps({"vectors": base64.b64encode(found.astype("<f4").tobytes()).decode()}), flush=True)
"""

Ask = Callable[[Sequence[str], int], Any]  # texts and the size of a batch to vectors [N, D]


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A system that runs. sizes: of batches to try. cpu_s: processor seconds of its processes so far."""

    ask: Ask
    cpu_s: Callable[[], float]
    awake: Callable[[], contextlib.AbstractContextManager[None]]
    sizes: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One round of one system, of the batch size with the fewest processor seconds. vectors: [N, D]."""

    wall_s: float
    cpu_s: float
    single_s: float
    batch: int
    vectors: Any


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = command_line(__doc__)
    prompts = os.environ.get(PROMPTS_VARIABLE)
    parser.add_argument("model", type=Path, help="a folder of sentence-transformers")
    parser.add_argument("--python", type=Path, required=True, help="of an environment with sentence-transformers")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server")
    parser.add_argument("--gguf", type=Path, help="the model for llama.cpp")
    parser.add_argument("--prompts", type=Path, default=prompts and Path(prompts), required=not prompts)
    parser.add_argument("--texts", type=int, default=64, help="of one request [%(default)s]")
    parser.add_argument("--batches", type=numbers, default=[8, 32], help="of sentence-transformers [8,32]")
    parser.add_argument("--rounds", type=int, default=5, help="[%(default)s]")
    parser.add_argument("--threads", type=int, default=2, help="[%(default)s]")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/encoders-cpu.json"))
    given = parser.parse_args(arguments)
    cores = sorted(os.sched_getaffinity(0))[: given.threads]
    os.sched_setaffinity(0, cores)
    tokenizer = load_tokenizer(given.model)
    limit = json.loads((given.model / "sentence_bert_config.json").read_text())["max_seq_length"]
    texts = [
        tokenizer.decode(tokenizer.encode(each.text, most=limit - 16)) for each in load_prompts(given.prompts)
    ]
    counts = [len(tokenizer.encode(each)) for each in texts]
    print(
        f"{len(texts)} texts of {statistics.mean(counts):.0f} tokens on average, {max(counts)} at most", flush=True
    )
    with contextlib.ExitStack() as stack:
        systems = {
            "faser": _served(stack, _faser(given, "float32")),
            "faser-bfloat16": _served(stack, _faser(given, "bfloat16")),
            _ORACLE: _library(stack, given, "float32"),
            f"{_ORACLE}-bfloat16": _library(stack, given, "bfloat16"),
        }
        if given.llama_server is not None:
            systems["llamacpp"] = _served(stack, _llamacpp(given))

        def run(_: Mapping[str, Any], name: str, number: int) -> Found:
            return _round(
                systems[name], [texts[(number * given.texts + at) % len(texts)] for at in range(given.texts)]
            )

        cells = interleaved([{"texts": given.texts}], list(systems), given.rounds, run)
    runs = cells[0].runs
    rows = {name: _summary(found, runs) for name, found in runs.items()}
    for name, row in rows.items():
        print(f"{name:32} {row}")
    head = about("peers.encoders", arguments or sys.argv[1:], cores)
    tokens = {"mean": round(statistics.mean(counts), 1), "most": max(counts)}
    write_json(given.out, {**head, "model": given.model.name, "tokens_a_text": tokens, "systems": rows})
    return 0


def _summary(found: Sequence[Found], runs: Mapping[str, Sequence[Found]]) -> dict[str, Any]:
    """Return medians over rounds; ratios are of FASER in float32 to this system, round by round."""
    mine, oracle = runs["faser"], runs[_ORACLE]
    count = len(found[0].vectors)
    return {
        "texts_per_s": round(count / statistics.median(each.wall_s for each in found), 2),
        "cpu_ms_per_text": round(1000 * statistics.median(each.cpu_s for each in found) / count, 3),
        "single_text_ms": round(1000 * statistics.median(each.single_s for each in found), 2),
        "faser_texts_ratio": round(
            statistics.median(each.wall_s / one.wall_s for one, each in zip(mine, found, strict=True)), 3
        ),
        "faser_cpu_ratio": round(
            statistics.median(each.cpu_s / one.cpu_s for one, each in zip(mine, found, strict=True)), 3
        ),
        "largest_difference": float(
            f"{max(np.abs(one.vectors - each.vectors).max() for one, each in zip(oracle, found, strict=True)):.3g}"
        ),
        "least_cosine": round(
            min(float((one.vectors * each.vectors).sum(1).min()) for one, each in zip(oracle, found, strict=True)),
            6,
        ),
        "batch": found[-1].batch,
        "rounds": [[round(each.wall_s, 4), round(each.cpu_s, 4), round(each.single_s, 4)] for each in found],
    }


def _round(system: System, texts: Sequence[str]) -> Found:
    with system.awake():
        system.ask(texts[:1], system.sizes[0])
        tried = []
        for size in system.sizes:
            began_s, cpu_before_s = time.perf_counter(), system.cpu_s()
            vectors = system.ask(texts, size)
            tried.append((system.cpu_s() - cpu_before_s, time.perf_counter() - began_s, size, vectors))
        cpu_s, wall_s, size, vectors = min(tried, key=lambda each: each[0])
        singles = []
        for text in texts[:_SINGLE]:
            began_s = time.perf_counter()
            system.ask([text], size)
            singles.append(time.perf_counter() - began_s)
    return Found(wall_s=wall_s, cpu_s=cpu_s, single_s=statistics.median(singles), batch=size, vectors=vectors)


def _served(stack: contextlib.ExitStack, recipe: Recipe) -> System:
    """Start a server, and freeze it until it is measured."""
    server = stack.enter_context(Server(recipe))
    print(f"{recipe.name} is up after {server.wait_until_healthy(_TIMEOUT_S):.0f} s", flush=True)
    server.freeze()
    http = stack.enter_context(httpx.Client(base_url=server.url, timeout=_TIMEOUT_S, trust_env=False))

    def ask(texts: Sequence[str], _size: int) -> Any:
        body = {"model": "bench", "input": list(texts), "encoding_format": "base64"}
        answer = http.post("/v1/embeddings", json=body).raise_for_status().json()["data"]
        data = sorted(answer, key=lambda each: each["index"])
        return np.stack([np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in data])

    return System(ask=ask, cpu_s=server.cpu_s, awake=server.awake)


def _faser(given: Any, dtype: str) -> Recipe:
    port = free_port()
    command = (
        *(sys.executable, "-m", "faser", "serve", str(given.model), "--served-model-name", "bench"),
        *("--dtype", dtype, "--num-threads", str(given.threads), "--port", str(port)),
    )
    return _recipe(f"faser-{dtype}", command, port)


def _llamacpp(given: Any) -> Recipe:
    port, tokens = free_port(), 512
    command = (
        *(str(given.llama_server), "--model", str(given.gguf), "--embedding", "--pooling", "mean"),
        *("--threads", str(given.threads), "--threads-batch", str(given.threads), "--port", str(port)),
        *("--parallel", "16", "--ctx-size", str(16 * tokens), "--batch-size", "2048", "--ubatch-size", "2048"),
    )
    return _recipe("llamacpp", command, port)


def _recipe(name: str, command: tuple[str, ...], port: int) -> Recipe:
    log = Path(tempfile.gettempdir(), f"encoders-{name}.log")
    return Recipe(name=name, command=command, base_url=f"http://127.0.0.1:{port}", log_path=log)


def _library(stack: contextlib.ExitStack, given: Any, dtype: str) -> System:
    """Start sentence-transformers in its environment; it costs nothing while it is not asked."""
    command = [str(given.python), "-c", _LIBRARY, str(given.model), dtype, str(given.threads)]
    process = psutil.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stack.callback(process.kill)

    def ask(texts: Sequence[str], size: int) -> Any:
        process.stdin.write(json.dumps({"texts": list(texts), "batch": size}) + "\n")
        process.stdin.flush()
        vectors = base64.b64decode(json.loads(process.stdout.readline())["vectors"])
        return np.frombuffer(vectors, "<f4").reshape(len(texts), -1)

    def cpu_s() -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    return System(ask=ask, cpu_s=cpu_s, awake=contextlib.nullcontext, sizes=tuple(given.batches))
