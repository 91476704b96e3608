"""A closed loop of chat requests against one FASER server: what came back, and how long all of it took."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.prompts import Prompt

_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How a run asks. salt: of the prefix cache and of the corpus of past answers, for all its requests."""

    concurrency: int
    temperature: float
    ignore_eos: bool
    max_tokens: int
    salt: str

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """The request. Its seed is the question's, so that every arm samples the same answer."""
        return {
            "messages": [{"role": "user", "content": prompt.text}],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": prompt.question_id,
            "cache_salt": self.salt,
            "ignore_eos": self.ignore_eos,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One run. tokens: output tokens of all answers. drafted, accepted: tokens, as `metrics.faser` counts them.

    texts: the answers, in the order of the prompts.
    """

    tokens: int
    seconds: float
    drafted: int
    accepted: int
    texts: tuple[str, ...]


def ask_all(url: str, prompts: Sequence[Prompt], asking: Asking) -> Answered:
    """Answers to all prompts. Raises httpx.HTTPError where one is refused or does not come in ten minutes."""
    try:
        return asyncio.run(_closed_loop(url, prompts, asking))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None  # one client's trouble is enough to end all


async def _closed_loop(url: str, prompts: Sequence[Prompt], asking: Asking) -> Answered:
    waiting = iter(enumerate(prompts))
    answers: dict[int, dict[str, Any]] = {}

    async def client(http: httpx.AsyncClient) -> None:
        for number, prompt in waiting:
            response = await http.post("/v1/chat/completions", json=asking.body(prompt))
            response.raise_for_status()
            answers[number] = response.json()

    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, trust_env=False) as http:
        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as clients:
            for _ in range(asking.concurrency):
                clients.create_task(client(http))
        seconds = time.perf_counter() - began_s
    counted = [(answer.get("metrics") or {}).get("faser") or {} for answer in answers.values()]
    return Answered(
        tokens=sum(answer["usage"]["completion_tokens"] for answer in answers.values()),
        seconds=seconds,
        drafted=sum(each.get("drafted", 0) for each in counted),
        accepted=sum(each.get("accepted", 0) for each in counted),
        texts=tuple(answers[number]["choices"][0]["message"]["content"] for number in range(len(prompts))),
    )
