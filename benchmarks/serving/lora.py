"""Price of LoRA adapters: tokens a second with none, one and eight of them, and gaps while another one is loaded.

    python -m benchmarks serving.lora QUESTIONS.jsonl OUT.json [--model MODEL] [--rank 16] [--rounds 5]
        [--concurrency 1,4,16] [--max-tokens 64] [--loads 5] [--stream-tokens 256] [--server-args 'FLAGS']
        [--llama-server PATH]

Adapters are random, of all linear layers, and small. Two servers with the same flags, one with --enable-lora and
eight adapters, take turns; the idle one is frozen. Arms: `off`, the server that knows no adapters; `none`, the
other one, whose requests name the model; `one`, all requests name one adapter; `eight`, they name eight in turn.
Nothing is drafted, since adapters change what the model says and so what drafts bring. Answers have --max-tokens
tokens, a run has a cache_salt of its own, rates are medians over rounds, ratios are over `off` in the same round.

Then eight streams of eight adapters run, and a ninth adapter is loaded by a client, as many times as --loads says:
the largest gap between two tokens of a stream while it is loaded, and in as many tokens before.

--llama-server measures llama.cpp too, with --lora and without, on MODEL, which must be a GGUF file then.
"""

import argparse
import asyncio
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.cells import Cell, Spread
from benchmarks.models.random_adapter import random_adapter
from benchmarks.peers.load import Exchange, Target, closed_loop
from benchmarks.prompts import Prompt, load_prompts, take
from benchmarks.runner import about, command_line, interleaved, numbers, write_json
from benchmarks.servers import Asking, Run, Server, ask_all, faser_recipe, frozen_servers
from faser.config.environment import cache_dir
from faser.engine.checkpoints.source import resolve

_NAMES = tuple(f"adapter-{number}" for number in range(8))
_NINTH = "ninth"
OFF, NONE, ONE, EIGHT = "off", "none", "one", "eight"
ARMS = {OFF: (), NONE: (), ONE: _NAMES[:1], EIGHT: _NAMES}
_LLAMA, _LLAMA_LORA = "llama.cpp", "llama.cpp --lora"
_COMMON = ("--speculative-policy", "off", "--max-num-seqs", "16", "--served-model-name", "model")
_REQUESTS = {1: 4, 4: 12}  # of a run, by requests at once; of others twice as many


def main(arguments: Sequence[str] | None = None) -> None:
    given = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))  # not without ending the servers
    model = resolve(given.model, cache_dir(), progress=lambda *_: None)
    prompts = load_prompts(given.QUESTIONS)
    conditions = about("serving.lora", arguments) | {"rank": given.rank, "max_tokens": given.max_tokens}
    with tempfile.TemporaryDirectory() as name, _servers(given, model, Path(name)) as servers:
        arms = [*ARMS, *(arm for arm in servers if arm in (_LLAMA, _LLAMA_LORA))]

        def run(labels: Mapping[str, Any], arm: str, number: int) -> Run:
            server = servers.get(arm, servers[NONE])
            asking = Asking(
                concurrency=labels["concurrency"],
                temperature=0,
                ignore_eos=True,
                max_tokens=given.max_tokens,
                salt=f"{number}/{labels['concurrency']}/{arm}",
                models=ARMS.get(arm, ()),
            )
            with server.awake():
                return ask_all(server.url, _questions(prompts, labels["concurrency"], number), asking)

        def write(cells: Sequence[Cell[Run]], gaps: Mapping[str, Any] | None = None) -> None:
            found = [_figures(cell, arms) for cell in cells]
            write_json(given.OUT, {**conditions, "cells": found, "load": gaps}, show=gaps is not None)

        settings = [{"concurrency": each} for each in given.concurrency]
        cells = interleaved(settings, arms, given.rounds, run, after_round=write)
        with servers[NONE].awake():
            write(cells, asyncio.run(_loads(servers[NONE], Path(name) / _NINTH, prompts, given)))


def _parser() -> argparse.ArgumentParser:
    parser = command_line(__doc__)
    parser.add_argument("QUESTIONS", type=Path)
    parser.add_argument("OUT", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=numbers, default=[1, 4, 16])
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--loads", type=int, default=5)
    parser.add_argument("--stream-tokens", type=int, default=256)
    parser.add_argument("--server-args", default="")
    parser.add_argument("--llama-server", type=Path)
    return parser


@contextmanager
def _servers(given: argparse.Namespace, model: Path, folder: Path) -> Iterator[dict[str, Server]]:
    """All servers by arm, frozen; that of NONE serves ONE and EIGHT too."""
    for seed, name in enumerate((*_NAMES, _NINTH)):
        random_adapter(folder / name, model, rank=given.rank, seed=seed)
    flags = (str(model), *_COMMON, *shlex.split(given.server_args))
    modules = [f"{name}={folder / name}" for name in _NAMES]
    adapted = ("--max-loras", "8", "--max-cpu-loras", "16", "--allow-runtime-lora-updating", "--lora-modules")
    with frozen_servers({OFF: flags, NONE: (*flags, *adapted, *modules)}, folder, 16) as servers:
        if given.llama_server is None:
            yield servers
            return
        adapter = folder / "adapter.gguf"
        random_adapter(adapter, model, rank=given.rank, seed=0)
        common = (
            str(given.llama_server),
            "-m",
            str(model),
            "-np",
            "16",
            "-c",
            str(16 * 2048),
            "--no-webui",
            "--metrics",
        )
        with (
            _llama_server(_LLAMA, common, folder) as plain,
            _llama_server(_LLAMA_LORA, (*common, "--lora", str(adapter)), folder) as with_lora,
        ):
            yield servers | {_LLAMA: plain, _LLAMA_LORA: with_lora}


@contextmanager
def _llama_server(name: str, command: Sequence[str], folder: Path) -> Iterator[Server]:
    recipe = faser_recipe(name, (), folder, *command)
    with Server(recipe) as server:
        server.wait_until_healthy()
        server.freeze()
        yield server


def _questions(prompts: tuple[Prompt, ...], concurrency: int, number: int) -> tuple[Prompt, ...]:
    """Every round has others, the same for all arms."""
    count = _REQUESTS.get(concurrency, 2 * concurrency)
    return take(prompts, number * count, count)


def _figures(cell: Cell[Run], arms: Sequence[str]) -> dict[str, Any]:
    def rate(run: Run) -> float:
        return run.tokens_per_s

    bases = {arm: _LLAMA if arm == _LLAMA_LORA else OFF for arm in arms if arm != _LLAMA}
    return {
        **cell.labels,
        "tokens_per_s": {arm: round(cell.median(arm, rate), 1) for arm in arms},
        "ratio": {arm: cell.ratio(arm, base, rate).rounded() for arm, base in bases.items() if arm != base},
    }


async def _loads(
    server: Server, adapter: Path, prompts: tuple[Prompt, ...], given: argparse.Namespace
) -> dict[str, Any]:
    """Load and unload an adapter, while a stream of each of the others runs. Times in milliseconds."""
    during, before, took = [], [], []
    async with httpx.AsyncClient(base_url=server.url, timeout=300, trust_env=False) as http:
        for number in range(given.loads):
            streams = asyncio.gather(
                *(
                    closed_loop(
                        _target(server.url, name, f"load-{number}"), [prompts[at].text], 1, given.stream_tokens
                    )
                    for at, name in enumerate(_NAMES)
                )
            )
            await _all_running(http)
            began_s = time.perf_counter()
            body = {"lora_name": _NINTH, "lora_path": str(adapter)}
            (await http.post("/v1/load_lora_adapter", json=body)).raise_for_status()
            ended_s = time.perf_counter()
            exchanges = [exchange for (exchange,) in await streams]
            (await http.post("/v1/unload_lora_adapter", json={"lora_name": _NINTH})).raise_for_status()
            took.append(1000 * (ended_s - began_s))
            during.append(_largest_gap_ms(exchanges, began_s, ended_s))
            before.append(_largest_gap_ms(exchanges, began_s - (ended_s - began_s), began_s))
    return {
        "streams": len(_NAMES),
        "load_ms": _spread(took),
        "largest_gap_ms": _spread(during),
        "largest_gap_before_ms": _spread(before),
    }


def _target(url: str, name: str, salt: str) -> Target:
    extra = {"ignore_eos": True, "stream_options": {"include_usage": True}, "cache_salt": salt}
    return Target(name="faser", base_url=url, model=name, extra_body=extra)


async def _all_running(http: httpx.AsyncClient) -> None:
    """Wait until all streams decode, and a second longer."""
    wanted = ",".join(_NAMES)
    while f'running_lora_adapters="{wanted}"' not in (await http.get("/metrics")).text:
        await asyncio.sleep(0.1)
    await asyncio.sleep(1.0)


def _largest_gap_ms(exchanges: Sequence[Exchange], began_s: float, ended_s: float) -> float:
    """Return the largest gap of any stream that overlaps with this time."""
    return 1000 * max(
        later - earlier
        for exchange in exchanges
        for earlier, later in zip(exchange.token_times_s, exchange.token_times_s[1:], strict=False)
        if later > began_s and earlier < ended_s
    )


def _spread(values: Sequence[float]) -> dict[str, float]:
    found = Spread.of(values)
    return {"median": round(found.median, 1), "low": round(found.low, 1), "high": round(found.high, 1)}
