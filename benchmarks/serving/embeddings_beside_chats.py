"""Time between tokens of running chats while one request for many embeddings arrives, against without it.

    python -m benchmarks serving.embeddings_beside_chats [MODEL] [--texts 64] [--chats 4] [--out FILE]

In every round the chats run twice, with and without the embeddings, in turn. The embeddings are asked for once
each chat has its first tokens. Their texts are other real prompts, cut at --most-chars.
"""

import asyncio
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
from benchmarks.runner import PROMPTS_VARIABLE, about, command_line, interleaved, write_json
from benchmarks.servers import Server, faser_recipe

_ARMS = ("without", "with")
_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One run. gaps_s: between pieces of text, of all chats. embeddings_s: until the vectors came; 0: none."""

    gaps_s: tuple[float, ...]
    embeddings_s: float

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
    parser.add_argument("--rounds", type=int, default=5, help="[%(default)s]")
    parser.add_argument("--faser-args", default="", help="more flags for `faser serve`, as one string")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/embeddings-beside-chats.json"))
    given = parser.parse_args(arguments)
    texts = [each.text[: given.most_chars] for each in load_prompts(given.prompts)]
    flags = (*([given.model] if given.model else []), *given.faser_args.split())
    with tempfile.TemporaryDirectory() as folder, Server(faser_recipe("faser", flags, Path(folder))) as server:
        server.wait_until_healthy()

        def run(_: Mapping[str, Any], arm: str, number: int) -> Found:
            first = number * (given.texts + given.chats)
            asked = [texts[(first + at) % len(texts)] for at in range(given.texts + given.chats)]
            embedded = asked[given.chats :] if arm == "with" else []
            salt = f"{number}/{arm}"
            return asyncio.run(_run(server.url, asked[: given.chats], embedded, given.tokens, salt))

        run({}, "with", given.rounds)  # warms up
        cells = interleaved([{"chats": given.chats}], _ARMS, given.rounds, run)
    runs = cells[0].runs
    rows = {arm: _summary(runs[arm]) for arm in _ARMS}
    for arm, row in rows.items():
        print(f"{arm:8} {row}")
    head = about("serving.embeddings_beside_chats", arguments or sys.argv[1:])
    write_json(given.out, {**head, "model": Path(given.model or "default").name, "arms": rows})
    return 0


def _summary(found: Sequence[Found]) -> dict[str, float]:
    """Return medians over rounds, in milliseconds; gap_max_ms is the largest of all."""
    return {
        "gap_p50_ms": round(1000 * statistics.median(each.percentile(50) for each in found), 2),
        "gap_p99_ms": round(1000 * statistics.median(each.percentile(99) for each in found), 2),
        "gap_max_ms": round(1000 * max(max(each.gaps_s) for each in found), 2),
        "embeddings_s": round(statistics.median(each.embeddings_s for each in found), 3),
    }


async def _run(url: str, chats: Sequence[str], texts: Sequence[str], num_tokens: int, salt: str) -> Found:
    """Run the chats, and ask for the embeddings as soon as all of them have begun."""
    begun = asyncio.Semaphore(0)
    gaps_s: list[float] = []
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

        async def embed() -> float:
            if not texts:
                return 0.0
            for _ in chats:
                await begun.acquire()
            began_s = time.perf_counter()
            body = {"input": list(texts), "cache_salt": salt, "encoding_format": "base64"}
            (await http.post("/v1/embeddings", json=body)).raise_for_status()
            return time.perf_counter() - began_s

        running = [asyncio.create_task(chat(text)) for text in chats]
        embeddings_s = await embed()
        answers = await asyncio.gather(*running)
    for times_s in answers:
        gaps_s += [later - earlier for earlier, later in pairwise(times_s[3:])]
    return Found(gaps_s=tuple(gaps_s), embeddings_s=embeddings_s)
