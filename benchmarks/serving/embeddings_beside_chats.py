"""Time between tokens of running chats while one request for many embeddings arrives, or one with a long prompt.

    python -m benchmarks serving.embeddings_beside_chats [MODEL] [--texts 64] [--chats 4] [--out FILE]

In every round the chats run alone, beside the embeddings, and beside one prompt made of the same texts, cut at
--prompt-tokens, in turn. The other request is sent once each chat has its first tokens. The texts are other real
prompts, cut at --most-chars.
"""

import asyncio
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.prompts import load_prompts
from benchmarks.runner import (
    PROMPTS_VARIABLE,
    about,
    command_line,
    end_servers_on_sigterm,
    interleaved,
    write_json,
)
from benchmarks.servers import Server, faser_recipe

_ALONE, _EMBEDDINGS, _PROMPT = _ARMS = ("alone", "embeddings", "prompt")
_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One run. gaps_s: between pieces of text, of all chats, while the other request ran; if there is none, from
    the moment on at which it would have been sent. other_s: until it ended; 0: there is none.
    """

    gaps_s: tuple[float, ...]
    other_s: float

    def percentile(self, share: float) -> float:
        return float(np.percentile(self.gaps_s, share))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = command_line(__doc__)
    prompts = os.environ.get(PROMPTS_VARIABLE)
    parser.add_argument("model", nargs="?", help="default: the embedded one")
    parser.add_argument("--prompts", type=Path, default=prompts and Path(prompts), required=not prompts)
    parser.add_argument("--texts", type=int, default=64, help="[%(default)s]")
    parser.add_argument("--most-chars", type=int, default=2000, help="of a text [%(default)s]")
    parser.add_argument("--chats", type=int, default=4, help="[%(default)s]")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer [%(default)s]")
    parser.add_argument("--prompt-tokens", type=int, default=4096, help="of the long prompt [%(default)s]")
    parser.add_argument("--rounds", type=int, default=5, help="[%(default)s]")
    parser.add_argument("--faser-args", default="", help="more flags for `faser serve`, as one string")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/embeddings-beside-chats.json"))
    given = parser.parse_args(arguments)
    end_servers_on_sigterm()
    texts = [each.text[: given.most_chars] for each in load_prompts(given.prompts)]
    flags = (*([given.model] if given.model else []), *given.faser_args.split())
    with tempfile.TemporaryDirectory() as folder, Server(faser_recipe("faser", flags, Path(folder))) as server:
        server.wait_until_healthy()

        def run(_: Mapping[str, Any], arm: str, number: int) -> Found:
            first = number * (given.texts + given.chats)
            asked = [texts[(first + at) % len(texts)] for at in range(given.texts + given.chats)]
            other = _other(arm, asked[given.chats :], given.prompt_tokens)
            return asyncio.run(_run(server.url, asked[: given.chats], other, given.tokens, salt=f"{number}/{arm}"))

        run({}, _EMBEDDINGS, given.rounds)  # warms up
        cells = interleaved([{"chats": given.chats}], _ARMS, given.rounds, run)
    runs = cells[0].runs
    rows = {arm: _summary(found, runs[_PROMPT]) for arm, found in runs.items()}
    for arm, row in rows.items():
        print(f"{arm:10} {row}")
    head = about("serving.embeddings_beside_chats", arguments or sys.argv[1:])
    write_json(given.out, {**head, "model": Path(given.model or "default").name, "arms": rows})
    return 0


def _summary(found: Sequence[Found], prompts: Sequence[Found]) -> dict[str, float]:
    """Return medians over rounds, times in milliseconds. max_to_prompt: largest gap over that beside a prompt."""
    largest = [max(each.gaps_s) for each in found]
    ratios = [mine / max(each.gaps_s) for mine, each in zip(largest, prompts, strict=True)]
    return {
        "gap_p50_ms": round(1000 * statistics.median(each.percentile(50) for each in found), 2),
        "gap_p99_ms": round(1000 * statistics.median(each.percentile(99) for each in found), 2),
        "gap_max_ms": round(1000 * statistics.median(largest), 2),
        "gap_max_of_all_ms": round(1000 * max(largest), 2),
        "max_to_prompt": round(statistics.median(ratios), 3),
        "other_s": round(statistics.median(each.other_s for each in found), 3),
    }


def _other(arm: str, texts: Sequence[str], prompt_tokens: int) -> tuple[str, dict[str, Any]] | None:
    """Return route and body of the request beside the chats; None: there is none."""
    if arm == _EMBEDDINGS:
        return "/v1/embeddings", {"input": list(texts), "encoding_format": "base64"}
    if arm == _PROMPT:
        body = {"prompt": "\n".join(texts), "truncate_prompt_tokens": prompt_tokens, "max_tokens": 1}
        return "/v1/completions", body
    return None


async def _run(
    url: str, chats: Sequence[str], other: tuple[str, dict[str, Any]] | None, num_tokens: int, *, salt: str
) -> Found:
    """Run the chats, and send the other request as soon as all of them have begun."""
    begun = asyncio.Semaphore(0)
    limits = httpx.Limits(max_connections=len(chats) + 1)
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, limits=limits, trust_env=False) as http:

        async def chat(text: str) -> list[float]:
            body = {
                "messages": [{"role": "user", "content": text}],
                "max_tokens": num_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "cache_salt": salt,
            }
            times_s: list[float] = []
            async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if '"content"' in line:
                        times_s.append(time.perf_counter())
                        if len(times_s) == 4:
                            begun.release()
            return times_s

        running = [asyncio.create_task(chat(text)) for text in chats]
        for _ in chats:
            await begun.acquire()
        began_s, ended_s = time.perf_counter(), math.inf
        if other is not None:
            route, body = other
            (await http.post(route, json={**body, "cache_salt": salt})).raise_for_status()
            ended_s = time.perf_counter()
        answers = await asyncio.gather(*running)
    gaps_s = [
        later - earlier
        for times_s in answers
        for earlier, later in pairwise(times_s)
        if later > began_s and earlier < ended_s
    ]
    return Found(gaps_s=tuple(gaps_s), other_s=0.0 if other is None else ended_s - began_s)
