"""Stalls of another client's tokens by the worst grammars and schemas, with drafts and without.

    python -m benchmarks.serving.grammar_stall [--model MODEL] [--seconds 8] [--out FILE]

A bystander streams an answer without structure; its largest gap between two tokens is the stall. `base`: nothing
else runs. `beside`: an ordinary schema's answer runs beside it, which costs a row in each step and nothing more.
Then each of ten grammars by itself, and all ten at once. The grammars were found by a search over ambiguous rules,
long optional chains, enumerations, counted repetitions and lexers with many states, for the largest times of one
mask; the prompts and biases lead their answers there.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.runner import Json, about, command_line, write_json
from benchmarks.servers import Server, faser_recipe

_ARMS = {"drafts": (), "none": ("--speculative-config", '{"policy": "off"}')}
_BIAS = 40.0
_TIMEOUT_S = 120.0
_LETTERS = "abcdefghij"


def _rules(count: int, letter: str, *, unit: bool) -> str:
    """Rules each of which is read as any two others; unit: as any other one, too."""
    pairs = [" | ".join(f"e{j} e{(i * 7 + j * 3) % count}" for j in range(count)) for i in range(count)]
    ones = " | ".join(f"e{j}" for j in range(count)) + " | e0 e1"
    return "\n".join(f'e{i}: "{letter}" | {ones if unit else pairs[i]}' for i in range(count))


def _schema(properties: Json) -> Json:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def worst() -> dict[str, tuple[Json, str]]:
    """Return by name a field of the request, and the text that the answer is led to repeat."""
    chain = {f"p{i}": {"type": "integer"} for i in range(200)}
    variants = [
        {"type": "object", "properties": {_LETTERS[i % 10] * (1 + i // 10): {"type": "array"}}} for i in range(60)
    ]
    return {
        "pairs": ({"grammar": 'start: e\ne: " x" | e e'}, " x"),
        "triples": ({"grammar": 'start: e\ne: " x" | e e | e e e'}, " x"),
        "three readings of a run": (
            {"grammar": 'start: (a | b | c)*\na: " x"+\nb: " x" " x"*\nc: " x" | " x" c'},
            " x",
        ),
        "ten rules of pairs": ({"grammar": f'start: " a" e0\n{_rules(10, " x", unit=False)}'}, " x"),
        "five rules of runs": ({"grammar": f'start: " a" " b" e0\n{_rules(5, "=", unit=True)}'}, "="),
        "twenty rules of runs": ({"grammar": f'start: " a" " b" e0\n{_rules(20, "=", unit=True)}'}, "="),
        "two hundred optional properties": ({"json": _schema(chain)}, ' "p1'),
        "sixty objects": ({"json": {"type": "array", "items": {"anyOf": variants}}}, " ["),
        "counted repetitions": ({"regex": "( x[a-z]{1,40}[0-9]{1,40}){1,40}"}, " x"),
        "a lexer of many states": ({"regex": "(.*a.{30}|.*b.{29}|.*c.{28})"}, " a"),
    }


_ORDINARY: Json = {"json": {"type": "array", "items": {"type": "string"}, "minItems": 200}}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="")
    parser.add_argument("--seconds", type=float, default=8.0, help="how long the bystander streams in each cell")
    parser.add_argument("--out", type=Path, help="file for the milliseconds, as JSON")
    options = parser.parse_args()
    cells: list[Json] = []
    for arm, flags in _ARMS.items():
        model = (options.model,) if options.model else ()
        with tempfile.TemporaryDirectory() as folder:
            recipe = faser_recipe(arm, (*model, *flags), Path(folder))
            with Server(recipe) as server:
                server.wait_until_healthy(route="/ready")
                cells += asyncio.run(_measure(server.url, arm, options.seconds))
    found = {**about("benchmarks.serving.grammar_stall"), "cells": cells}
    if options.out is not None:
        write_json(options.out, found)


async def _measure(url: str, arm: str, seconds: float) -> list[Json]:
    grammars = worst()
    cases: dict[str, Sequence[tuple[Json, str]]] = {
        "base": (),
        "beside": ((_ORDINARY, " x"),),
        **{name: (each,) for name, each in grammars.items()},
        "all ten": tuple(grammars.values()),
    }
    cells = []
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S) as http:
        await _gaps(http, 2.0)  # warms up
        for name, asked in cases.items():
            asking = [asyncio.create_task(_ask(http, *each)) for each in asked]
            gaps = await _gaps(http, seconds)
            said = [each.result() if each.done() else "still running" for each in asking]
            for each in asking:
                each.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            cell = {
                "arm": arm,
                "case": name,
                "largest_gap_ms": round(1e3 * max(gaps), 1),
                "median_gap_ms": round(1e3 * sorted(gaps)[len(gaps) // 2], 1),
                "tokens": len(gaps),
                "answers": said,
            }
            print(json.dumps(cell), flush=True)
            cells.append(cell)
    return cells


async def _ask(http: httpx.AsyncClient, asked: Json, text: str) -> str:
    """An answer led along the text, again and again; says how it ended."""
    found = await http.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
    bias = {str(token_id): _BIAS for token_id in found.json()["tokens"]}
    body = {
        "prompt": " a" + text * 16,
        "max_tokens": 400,
        "temperature": 0,
        "logit_bias": bias,
        "ignore_eos": True,
    }
    while True:
        answer = await http.post("/v1/completions", json={**body, "structured_outputs": asked})
        said: dict[str, Any] = answer.json()
        if answer.status_code != 200:
            return str(said.get("error", said))[:200]
        if said["usage"]["completion_tokens"] > 1:
            return f"{said['choices'][0]['finish_reason']} after {said['usage']['completion_tokens']} tokens"


async def _gaps(http: httpx.AsyncClient, seconds: float) -> list[float]:
    """Seconds between the tokens of a bystander's answers, the first tokens left out."""
    gaps: list[float] = []
    ends_s = time.perf_counter() + seconds
    body = {"prompt": "The sea is", "max_tokens": 2000, "temperature": 1.0, "ignore_eos": True, "stream": True}
    while time.perf_counter() < ends_s:
        last_s = None
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                now_s = time.perf_counter()
                if not line.startswith("data: {"):
                    continue
                if last_s is not None:
                    gaps.append(now_s - last_s)
                last_s = now_s
                if now_s > ends_s:
                    break
    return gaps


if __name__ == "__main__":
    main()
