"""Price of LoRA adapters: tokens a second with none, one and eight of them, and gaps while another one is loaded.

    python -m benchmarks serving.lora QUESTIONS.jsonl OUT.json [--model MODEL] [--rank 16] [--minutes 4]
        [--concurrency 1,16] [--max-tokens 64] [--loads 3] [--server-args 'FLAGS']
        [--llama-server PATH] [--vllm PYTHON]

Adapters are random, of all linear layers, and small. Two servers with the same flags, one with --enable-lora and
eight adapters, take turns; the idle one is frozen. Arms: `off`, the server that knows no adapters; `none`, the
other one, whose requests name the model; `one`, all requests name one adapter; `eight`, they name eight in turn.
Nothing is drafted, since adapters change what the model says and so what drafts bring. Answers have --max-tokens
tokens, a run has a cache_salt of its own, and every server answers a short request before the clock runs. Rounds
go on for about --minutes; rates and ratios are medians over rounds, ratios are over the same system's arm without
adapters in the same round.

Then eight streams of eight adapters run, and a ninth adapter is loaded by a client, as many times as --loads says:
the largest gap between two tokens of a stream while it is loaded, and in as many tokens before.

--llama-server measures llama.cpp too, on MODEL, which must be a GGUF file then: a server without adapters, and one
with eight by --lora, whose requests choose by their field `lora`. --vllm measures vLLM's CPU build too, installed
by peers.setup: a server without adapters and one with eight. MODEL must be a checkpoint in bfloat16 then
(models.bfloat16_checkpoint).
"""

import argparse
import asyncio
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from benchmarks.cells import Cell, Spread, markdown
from benchmarks.models.random_adapter import random_adapter
from benchmarks.peers.load import Exchange, Target, closed_loop
from benchmarks.peers.systems import vllm_environment
from benchmarks.prompts import Prompt, load_prompts, take
from benchmarks.runner import about, command_line, end_servers_on_sigterm, interleaved, numbers, write_json
from benchmarks.servers import HELLO, Asking, Recipe, Run, Server, ask_all, faser_recipe, frozen_server
from faser.config.environment import cache_dir
from faser.engine.checkpoints.files import gguf_file
from faser.engine.checkpoints.source import resolve

_NAMES = tuple(f"adapter-{number}" for number in range(8))
_NINTH = "ninth"
_START_TIMEOUT_S = 1800.0  # vLLM compiles at its first start
_MAX_MODEL_LEN, _MOST_AT_ONCE = 2048, 16
_REQUESTS = {1: 2, 4: 8}  # of a run, by requests at once; of others one wave
_BY_NAME = tuple({"model": name} for name in _NAMES)
_BY_NUMBER = tuple({"lora": [{"id": number, "scale": 1.0}]} for number in range(len(_NAMES)))  # of llama.cpp


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to ask. in_turn: as in Asking. base: the arm that it is compared with; None: none."""

    server: str
    in_turn: tuple[Mapping[str, Any], ...] = ()
    base: str | None = None


FASER = {
    "off": Arm(server="off"),
    "none": Arm(server="lora", base="off"),
    "one": Arm(server="lora", in_turn=_BY_NAME[:1], base="off"),
    "eight": Arm(server="lora", in_turn=_BY_NAME, base="off"),
}
LLAMA = {
    "llama.cpp": Arm(server="llama.cpp"),
    "llama.cpp none": Arm(server="llama.cpp lora", base="llama.cpp"),
    "llama.cpp one": Arm(server="llama.cpp lora", in_turn=_BY_NUMBER[:1], base="llama.cpp"),
    "llama.cpp eight": Arm(server="llama.cpp lora", in_turn=_BY_NUMBER, base="llama.cpp"),
}
VLLM = {
    "vllm": Arm(server="vllm"),
    "vllm none": Arm(server="vllm lora", base="vllm"),
    "vllm one": Arm(server="vllm lora", in_turn=_BY_NAME[:1], base="vllm"),
    "vllm eight": Arm(server="vllm lora", in_turn=_BY_NAME, base="vllm"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    given = _parser().parse_args(arguments)
    end_servers_on_sigterm()
    model = resolve(given.model, cache_dir(), progress=lambda *_: None)
    prompts = tuple(replace(each, text=each.text[: given.most_chars]) for each in load_prompts(given.QUESTIONS))
    arms = {**FASER, **(LLAMA if given.llama_server else {}), **(VLLM if given.vllm else {})}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        servers: dict[str, Server] = {}
        for each in _recipes(given, model, folder):
            servers[each.name] = stack.enter_context(frozen_server(each, _MOST_AT_ONCE, _START_TIMEOUT_S))
            print(f"{each.name} is up", file=sys.stderr, flush=True)
        conditions = {
            **about("serving.lora", arguments),
            "commands": {name: each.recipe.shown for name, each in servers.items()},
            "rank": given.rank,
            "max_tokens": given.max_tokens,
        }

        def run(labels: Mapping[str, Any], arm: str, number: int) -> Run:
            concurrency = labels["concurrency"]
            asking = Asking(
                concurrency=concurrency,
                temperature=0,
                ignore_eos=True,
                max_tokens=given.max_tokens,
                salt=f"{number}-{concurrency}-{list(arms).index(arm)}",  # vLLM takes few characters
                in_turn=arms[arm].in_turn,
            )
            with servers[arms[arm].server].awake():
                url = servers[arms[arm].server].url
                ask_all(url, [HELLO] * (len(asking.in_turn) or 1), replace(asking, max_tokens=2))
                return ask_all(url, _questions(prompts, concurrency, number), asking)

        def write(cells: Sequence[Cell[Run]], gaps: Mapping[str, Any] | None = None) -> None:
            check(cells, arms)
            found = [figures(cell, arms) for cell in cells]
            write_json(given.OUT, {**conditions, "cells": found, "load": gaps})

        settings = [{"concurrency": each} for each in given.concurrency]
        cells = interleaved(settings, list(arms), given.rounds, run, seconds=60 * given.minutes, after_round=write)
        if given.loads:
            with servers["lora"].awake():
                write(cells, asyncio.run(_loads(servers["lora"], folder / _NINTH, prompts, given)))
    print(table(cells, arms))


def check(cells: Sequence[Cell[Run]], arms: Mapping[str, Arm]) -> None:
    """Raise ValueError for an arm whose adapters have changed no answer."""
    for name, arm in arms.items():
        if arm.base is None or not arm.in_turn:
            continue
        pairs = [pair for cell in cells for pair in zip(cell.runs[name], cell.runs[arm.base], strict=True)]
        if all(mine.texts == base.texts for mine, base in pairs):
            raise ValueError(f"{name} answers as {arm.base} does in all rounds: its adapters are not applied")


def table(cells: Sequence[Cell[Run]], arms: Mapping[str, Arm]) -> str:
    """Return medians as a table in Markdown: tokens a second, and the ratio to the arm without adapters."""
    columns = [figures(cell, arms)["arms"] for cell in cells]

    def shown(found: Mapping[str, Any]) -> str:
        rate = f"{found['tokens_per_s']['median']:.1f}"
        return f"{rate} ({found['ratio']['median']:.2f}x)" if "ratio" in found else rate

    header = ["tokens/s", *(f"{cell.labels['concurrency']} at once" for cell in cells)]
    return markdown(header, ([arm, *(shown(column[arm]) for column in columns)] for arm in arms))


def _parser() -> argparse.ArgumentParser:
    parser = command_line(__doc__)
    parser.add_argument("QUESTIONS", type=Path)
    parser.add_argument("OUT", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--minutes", type=float, default=4.0, help="of rounds [%(default)s]")
    parser.add_argument("--rounds", type=int, default=30, help="at most [%(default)s]")
    parser.add_argument("--concurrency", type=numbers, default=[1, _MOST_AT_ONCE])
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer [%(default)s]")
    parser.add_argument("--most-chars", type=int, default=240, help="of a question, cut there [%(default)s]")
    parser.add_argument("--loads", type=int, default=3, help="[%(default)s]")
    parser.add_argument("--stream-tokens", type=int, default=192, help="beside a load [%(default)s]")
    parser.add_argument("--server-args", default="", help="more flags for `faser serve`, as one string")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server")
    parser.add_argument("--vllm", type=Path, help="Python of an environment with vLLM's CPU build")
    parser.add_argument("--vllm-args", default="", help="more flags for vLLM's servers, as one string")
    return parser


def _recipes(given: argparse.Namespace, model: Path, folder: Path) -> Iterator[Recipe]:
    """Yield each server when it is to be started, since its port may be taken later. Their adapters are written.

    Raises ValueError for a model that a peer cannot read.
    """
    weights = gguf_file(model)
    if given.llama_server and weights is None:
        raise ValueError(f"{model} is no GGUF file, and llama.cpp reads no other")
    if given.vllm and weights is not None:
        raise ValueError(f"{model} is a GGUF file; models.bfloat16_checkpoint writes what vLLM reads")
    for seed, name in enumerate((*_NAMES, _NINTH)):
        random_adapter(folder / name, model, rank=given.rank, seed=seed)
    modules = ("--lora-modules", *(f"{name}={folder / name}" for name in _NAMES))
    common = (
        *("--served-model-name", "model", "--max-model-len", str(_MAX_MODEL_LEN)),
        *("--max-num-seqs", str(_MOST_AT_ONCE)),
    )
    cached = ("--max-loras", "8", "--max-cpu-loras", "16")
    flags = (str(model), *common, "--speculative-policy", "off", *shlex.split(given.server_args))
    yield faser_recipe("off", flags, folder)
    yield faser_recipe("lora", (*flags, *cached, "--allow-runtime-lora-updating", *modules), folder)
    if given.llama_server and weights is not None:
        yield from _llamacpp(given.llama_server, weights, folder, given.rank)
    if given.vllm:
        environment = vllm_environment(_cores(), given.vllm.parent.parent)
        program = (str(given.vllm), "-m", "vllm.entrypoints.cli.main", "serve", str(model))
        dense = (*common, "--dtype", "bfloat16", *shlex.split(given.vllm_args))
        adapted = ("--enable-lora", "--max-lora-rank", str(given.rank), *cached, *modules)
        for name, more in (("vllm", ()), ("vllm lora", adapted)):
            yield replace(faser_recipe(name, (*dense, *more), folder, *program), environment=environment)


def _llamacpp(program: Path, weights: Path, folder: Path, rank: int) -> Iterator[Recipe]:
    """Its servers without adapters and with all of them; a request that names none gets none."""
    paths = [folder / f"{name}.gguf" for name in _NAMES]
    for seed, path in enumerate(paths):
        random_adapter(path, weights, rank=rank, seed=seed)
    threads = str(len(_cores()))
    flags = (
        *("--model", str(weights)),
        *("--threads", threads, "--threads-batch", threads, "--parallel", str(_MOST_AT_ONCE)),
        *("--ctx-size", str(_MOST_AT_ONCE * _MAX_MODEL_LEN), "--metrics"),
        *("--no-cache-prompt", "--cache-ram", "0", "--no-ui"),
    )
    adapted = ("--lora", ",".join(map(str, paths)), "--lora-init-without-apply")
    yield faser_recipe("llama.cpp", flags, folder, str(program))
    yield faser_recipe("llama.cpp lora", (*flags, *adapted), folder, str(program))


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def _questions(prompts: tuple[Prompt, ...], concurrency: int, number: int) -> tuple[Prompt, ...]:
    """Every round has others, the same for all arms."""
    count = _REQUESTS.get(concurrency, concurrency)
    return take(prompts, number * count, count)


def figures(cell: Cell[Run], arms: Mapping[str, Arm]) -> dict[str, Any]:
    """Return rates and ratios of each arm: medians, ranges, and the rates of all rounds."""
    rates = {arm: cell.values(arm, lambda run: run.tokens_per_s) for arm in arms}
    found: dict[str, Any] = {}
    for arm, each in arms.items():
        found[arm] = {"tokens_per_s": _spread(rates[arm])}
        if each.base is not None:
            ratios = [mine / base for mine, base in zip(rates[arm], rates[each.base], strict=True)]
            found[arm]["ratio"] = _spread(ratios, 3)
        found[arm]["rounds"] = [round(rate, 1) for rate in rates[arm]]
    return {**cell.labels, "arms": found}


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


def _spread(values: Sequence[float], digits: int = 1) -> dict[str, float]:
    return {name: round(value, digits) for name, value in asdict(Spread.of(values)).items()}
