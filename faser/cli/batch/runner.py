"""Answers the lines of a batch with the application of a server, called in this process.

So each line means what it means to a server: the same checks, errors and answers. A queue that is full, and an
engine that is being started again, are waited for.
"""

import asyncio
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
from starlette.types import ASGIApp

from faser.cli.batch.batch_file import BatchLine, ResultsFile

_BUSY = (429, 503)
_WAIT_S = 1.0  # where an answer does not say how long


@dataclass(slots=True)
class Totals:
    """Numbers of lines, and tokens of the answers."""

    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0


async def run_lines(
    app: ASGIApp,
    lines: Iterator[BatchLine],
    results: ResultsFile,
    *,
    at_once: int,
    on_result: Callable[[], None],
) -> Totals:
    """Answer all lines, some at once; results are written in the order in which they finish.

    lines: those to be answered. on_result: is called after each result.
    """
    totals = Totals()
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None) as client:

        async def work() -> None:
            for line in lines:
                results.write(await _result(client, line, totals))
                on_result()

        async with asyncio.TaskGroup() as workers:
            for _ in range(at_once):
                workers.create_task(work())
    return totals


async def _result(client: httpx.AsyncClient, line: BatchLine, totals: Totals) -> dict[str, Any]:
    result: dict[str, Any] = {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": line.custom_id,
        "response": None,
        "error": None,
    }
    if line.problem:
        totals.failed += 1
        result["error"] = {"code": "invalid_line", "message": f"line {line.number}: {line.problem}"}
        return result
    answer = await _answer(client, line)
    body = msgspec.json.decode(answer.content)
    result["response"] = {
        "status_code": answer.status_code,
        "request_id": answer.headers["x-request-id"],
        "body": body,
    }
    if answer.status_code == httpx.codes.OK:
        totals.answered += 1
        _count(body.get("usage") or {}, totals)
    else:
        totals.failed += 1
        error = body["error"]
        result["error"] = {"code": error["type"], "message": error["message"]}
    return result


async def _answer(client: httpx.AsyncClient, line: BatchLine) -> httpx.Response:
    while True:
        headers = {"Content-Type": "application/json"}
        answer = await client.post(line.url, content=line.body, headers=headers)
        if answer.status_code not in _BUSY:
            return answer
        await asyncio.sleep(float(answer.headers.get("retry-after", _WAIT_S)))


def _count(usage: dict[str, Any], totals: Totals) -> None:
    totals.prompt_tokens += usage.get("prompt_tokens", usage.get("input_tokens", 0))
    totals.generated_tokens += usage.get("completion_tokens", usage.get("output_tokens", 0))
