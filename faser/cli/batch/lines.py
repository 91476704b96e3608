"""The lines of a batch: requests that are read from a file, and results that are written to another one.

The format of both files is OpenAI's and vLLM's. The file of results is the checkpoint: an answer that it has is
not computed again. Knows no engine, but an HTTP client.
"""

import asyncio
import json
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from faser.errors import ConfigError

URLS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/v1/embeddings", "/v1/rerank", "/rerank", "/v2/rerank", "/v1/score", "/score"),
)
_BUSY = (429, 503)
_WAIT_S = 1.0  # where an answer does not say how long


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLine:
    """One request. number: of the line, from 1. problem: why it cannot be sent; empty: it can."""

    number: int
    custom_id: str | None
    url: str = ""
    body: bytes = b""
    problem: str = ""


def read_lines(path: Path) -> Iterator[BatchLine]:
    """The requests of a file, in order, without its empty lines. Raises ConfigError if it cannot be read."""
    seen: set[str] = set()
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if raw.strip():
                    yield _read_line(number, raw, seen)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def _read_line(number: int, raw: bytes, seen: set[str]) -> BatchLine:
    try:
        fields = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        return BatchLine(number=number, custom_id=None, problem=f"it is not JSON: {error}")
    if not isinstance(fields, dict):
        return BatchLine(number=number, custom_id=None, problem="it must be a JSON object")
    custom_id, body = fields.get("custom_id"), fields.get("body")
    problem = _problem(fields, seen)
    if not isinstance(custom_id, str):
        custom_id = None
    else:
        seen.add(custom_id)
    if problem:
        return BatchLine(number=number, custom_id=custom_id, problem=problem)
    return BatchLine(number=number, custom_id=custom_id, url=fields["url"], body=msgspec.json.encode(body))


def _problem(fields: dict[str, Any], seen: set[str]) -> str:
    custom_id, body = fields.get("custom_id"), fields.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        return f"custom_id is {_shown(custom_id)}; it must be a string that no other line has"
    if custom_id in seen:
        return f"custom_id is {_shown(custom_id)}, as in a line before; it must be a string that no other line has"
    if fields.get("method") != "POST":
        return f"method is {_shown(fields.get('method'))}; it must be POST"
    if fields.get("url") not in URLS:
        return f"url is {_shown(fields.get('url'))}; it must be one of {', '.join(URLS)}"
    if not isinstance(body, dict):
        return f"body is {_shown(body)}; it must be an object"
    if body.get("stream"):
        return "body.stream is true; the answer to a line is one document"
    return ""


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:80]}…"


async def answer_line(client: httpx.AsyncClient, line: BatchLine) -> dict[str, Any]:
    """The result of a line. A queue that is full, and an engine that is being started again, are waited for."""
    result: dict[str, Any] = {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": line.custom_id,
        "response": None,
        "error": None,
    }
    if line.problem:
        result["error"] = {"code": "invalid_line", "message": f"line {line.number}: {line.problem}"}
        return result
    answer = await _answer(client, line)
    body = msgspec.json.decode(answer.content)
    result["response"] = {
        "status_code": answer.status_code,
        "request_id": answer.headers["x-request-id"],
        "body": body,
    }
    if answer.status_code != httpx.codes.OK:
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


@dataclass(slots=True)
class Totals:
    """Numbers of lines, and tokens of the answers."""

    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0

    def count(self, result: dict[str, Any]) -> None:
        if result["error"] is not None:
            self.failed += 1
            return
        self.answered += 1
        usage = result["response"]["body"].get("usage") or {}
        self.prompt_tokens += usage.get("prompt_tokens", usage.get("input_tokens", 0))
        self.generated_tokens += usage.get("completion_tokens", usage.get("output_tokens", 0))


class ResultsFile:
    """The answers, each written as soon as it is there. Use it in a `with`.

    resume: keep the answers of an earlier run, and drop its failures, which are to be tried again. A line that an
    interruption cut off is dropped too. Raises ConfigError for a file that is there already, or cannot be written.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.answered: set[str] = set()
        if path.exists() and not resume:
            raise ConfigError(f"{path} is there already; give --resume to go on with it, or another name")
        try:
            if path.exists():
                self._keep_answers(path)
            self._file = path.open("ab")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None

    def __enter__(self) -> "ResultsFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, result: dict[str, Any]) -> None:
        self._file.write(msgspec.json.encode(result) + b"\n")
        self._file.flush()

    def _keep_answers(self, path: Path) -> None:
        kept = path.with_name(f"{path.name}.kept")
        with path.open("rb") as before, kept.open("wb") as after:
            for raw in before:
                custom_id = _answered(raw)
                if custom_id is not None:
                    self.answered.add(custom_id)
                    after.write(raw)
        os.replace(kept, path)


def _answered(raw: bytes) -> str | None:
    """The custom_id of a result that is an answer."""
    if not raw.endswith(b"\n"):
        return None
    try:
        result = msgspec.json.decode(raw)
        custom_id, answered = result["custom_id"], result["response"]["status_code"] == 200
    except (msgspec.DecodeError, KeyError, TypeError):
        return None
    return custom_id if answered and isinstance(custom_id, str) else None
