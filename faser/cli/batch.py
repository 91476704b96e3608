"""`faser run-batch -i IN.jsonl -o OUT.jsonl [MODEL]`: answers the requests of a file without a server.

The format of both files is OpenAI's and vLLM's. Each line is answered by the application of a server, called in
this process, so it means what it means to a server: the same checks, errors and answers. A queue that is full, and
an engine that is being started again, are waited for.
"""

import asyncio
import json
import os
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
from fastapi import FastAPI
from starlette.types import ASGIApp

from faser.api.middleware.keys import ApiKeys
from faser.cli.application import build_application, fetch_model, make_metrics
from faser.cli.console import TERMINATED, ProgressReporter, runs_bar
from faser.cli.preparation import read_chat_template
from faser.config.declaration import MODEL, OUTPUT, settings_of
from faser.config.engine import EngineConfig
from faser.config.server import ServerConfig
from faser.config.sources import SETTINGS, CommandParser, Findings, UsageError, parse, server_settings
from faser.engine.client.async_engine import AsyncEngine
from faser.engine.client.replicas import Replicas
from faser.errors import ConfigError
from faser.processes import exit_on_sigterm

PROG = "faser run-batch"

_HELP = """usage: faser run-batch -i IN.jsonl -o OUT.jsonl [MODEL] [flags]

Answer the requests of a file, one a line, in the format of OpenAI's Batch API and of vLLM's run-batch:

  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}

  -i, --input-file IN     the requests; url is /v1/chat/completions, /v1/completions, /v1/responses
                          or /v1/messages
  -o, --output-file OUT   the answers, one a line, written as they finish: find them by custom_id
  --resume                keep the answers that OUT has already, and try all others
  --requests-at-once N    [twice --max-num-seqs]
  MODEL                   a directory, .gguf file or hub id [the embedded SmolLM2-135M-Instruct]

Flags of faser serve about the model, the engine and its answers may follow: faser serve --help=all.
A line that cannot be answered has an error in OUT and does not stop the others. The exit status is
0 if all lines are answered, 1 if some are not, 2 if nothing could be started."""

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_BUSY = (429, 503)
_WAIT_S = 1.0  # where an answer does not say how long

# Settings of a server that have a meaning without one.
_KEPT = frozenset(
    {
        "strict_request_fields",
        "max_request_bytes",
        "request_timeout",
        "engine_restarts",
        "engine_timeout",
        "log_level",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFiles:
    """What the command itself is asked. at_once: None: as many as keep the engine busy."""

    requests: Path
    results: Path
    resume: bool
    at_once: int | None


def run_batch(arguments: Sequence[str]) -> int:
    """Answer a file; returns the exit status. Raises ConfigError before the start, or EngineError."""
    parser = _own_parser()
    own, rest = parser.parse_known_args(arguments)
    if own.help:
        print(_HELP)
        return 0
    missing = [flag for flag, given in (("-i", own.input_file), ("-o", own.output_file)) if given is None]
    if missing:
        raise UsageError([f"{flag} is missing; it is required" for flag in missing])
    if own.requests_at_once is not None and own.requests_at_once < 1:
        raise UsageError([f"--requests-at-once is {own.requests_at_once}; it must be at least 1"])
    files = BatchFiles(
        requests=Path(own.input_file),
        results=Path(own.output_file),
        resume=own.resume,
        at_once=own.requests_at_once,
    )
    findings = parse(PROG, rest, SETTINGS)
    _refuse_network_flags(findings)
    engine_config, server_config = server_settings(findings)
    for warning in findings.warnings:
        print(f"{PROG}: warning: {warning}", file=sys.stderr)
    with exit_on_sigterm(TERMINATED), asyncio.Runner() as runner:
        return runner.run(_run(files, findings, engine_config, server_config))


def _own_parser() -> CommandParser:
    parser = CommandParser(PROG)
    parser.add_argument("--input-file", "-i")
    parser.add_argument("--output-file", "-o")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--requests-at-once", type=int)
    parser.add_argument("--help", "-h", action="store_true")
    return parser


def _refuse_network_flags(findings: Findings) -> None:
    """Flags on the command line; variables and files may be shared with a server."""
    kept = _KEPT | {each.name for each in settings_of(ServerConfig) if each.group in (MODEL, OUTPUT)}
    for each in settings_of(ServerConfig):
        if each.name not in kept and each.name in findings.given:
            findings.problems.append(f"{findings.label(each.name)} is for faser serve; run-batch opens no port")


async def _run(
    files: BatchFiles, findings: Findings, engine_config: EngineConfig, server_config: ServerConfig
) -> int:
    chat_template = read_chat_template(server_config.chat_template, findings.label("chat_template"))
    num_lines = sum(1 for _ in read_lines(files.requests))
    with ResultsFile(files.results, resume=files.resume) as results:
        kept = results.answered
        left = (line for line in read_lines(files.requests) if line.problem or line.custom_id not in kept)
        at_once = files.at_once or 2 * engine_config.max_num_seqs
        async with _loaded(engine_config, server_config, chat_template) as (engine, app):
            began_s = time.monotonic()
            with runs_bar() as bar:
                task = bar.add_task("answering", total=num_lines, completed=len(kept))
                working = run_lines(app, left, results, at_once=at_once, on_result=lambda: bar.advance(task))
                totals = await _while_alive(working, engine)
            took_s = time.monotonic() - began_s
    print(
        f"{PROG}: {totals.answered} answered, {totals.failed} failed, {len(kept)} kept; "
        f"{totals.prompt_tokens} prompt and {totals.generated_tokens} generated tokens in {took_s:.1f} s",
        file=sys.stderr,
    )
    return 1 if totals.failed else 0


@asynccontextmanager
async def _loaded(
    engine_config: EngineConfig, server_config: ServerConfig, chat_template: str | None
) -> AsyncIterator[tuple[AsyncEngine | Replicas, FastAPI]]:
    """An engine that is ready, and its application; the engine is stopped on exit."""
    with ProgressReporter() as report:
        directory = await fetch_model(engine_config, report)
        keys = ApiKeys(())
        metrics = make_metrics(engine_config, server_config)
        built = await build_application(
            directory, engine_config, server_config, keys, chat_template, metrics, report
        )
        engine = built.engine
        await engine.start()
        try:
            await engine.wait_ready()
        except BaseException:
            await engine.stop()
            raise
    try:
        yield engine, built.app
    finally:
        await engine.stop()


async def _while_alive(working: "Coroutine[Any, Any, Totals]", engine: AsyncEngine | Replicas) -> "Totals":
    """The outcome of the work. Raises the error with which the engine ends for good."""
    work, death = asyncio.create_task(working), asyncio.create_task(engine.wait_dead())
    try:
        await asyncio.wait({work, death}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise death.result()
        return work.result()
    finally:
        work.cancel()
        death.cancel()
        await asyncio.gather(work, death, return_exceptions=True)


@dataclass(slots=True)
class Totals:
    """Numbers of lines, and tokens of the answers."""

    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0


async def run_lines(
    app: ASGIApp,
    lines: "Iterator[BatchLine]",
    results: "ResultsFile",
    *,
    at_once: int,
    on_result: Callable[[], None],
) -> "Totals":
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


async def _result(client: httpx.AsyncClient, line: "BatchLine", totals: Totals) -> dict[str, Any]:
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


async def _answer(client: httpx.AsyncClient, line: "BatchLine") -> httpx.Response:
    while True:
        headers = {"Content-Type": "application/json"}
        answer = await client.post(line.url, content=line.body, headers=headers)
        if answer.status_code not in _BUSY:
            return answer
        await asyncio.sleep(float(answer.headers.get("retry-after", _WAIT_S)))


def _count(usage: dict[str, Any], totals: Totals) -> None:
    totals.prompt_tokens += usage.get("prompt_tokens", usage.get("input_tokens", 0))
    totals.generated_tokens += usage.get("completion_tokens", usage.get("output_tokens", 0))


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
