"""`faser run-batch -i IN.jsonl -o OUT.jsonl [MODEL]`: reads the flags, loads the model, answers the requests."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from fastapi import FastAPI

from faser.api.middleware.keys import ApiKeys
from faser.cli.batch.batch_file import ResultsFile, read_lines
from faser.cli.batch.runner import Totals, run_lines
from faser.cli.console.progress import ProgressReporter, runs_bar
from faser.cli.flags.parser import CommandParser, parse
from faser.cli.flags.sources import SETTINGS, Findings, UsageError, add_environment, add_file, settle
from faser.cli.serve.application import build_application, make_metrics
from faser.cli.serve.command import read_chat_template
from faser.cli.serve.fetch import fetch_model
from faser.config.declaration import settings_of
from faser.config.engine import EngineConfig
from faser.config.groups import MODEL, OUTPUT
from faser.config.server import ServerConfig
from faser.engine.client.async_engine import AsyncEngine
from faser.processes import exit_on_sigterm

PROG = "faser run-batch"

_TERMINATED = 143

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
    parsed = parse(PROG, rest, SETTINGS)
    _refuse_network_flags(parsed.findings)
    add_environment(parsed.findings, SETTINGS)
    if parsed.config_file is not None:
        add_file(parsed.findings, parsed.config_file, SETTINGS)
    engine_config, server_config = settle(parsed.findings, (EngineConfig, ServerConfig))
    for warning in parsed.findings.warnings:
        print(f"{PROG}: warning: {warning}", file=sys.stderr)
    with exit_on_sigterm(_TERMINATED), asyncio.Runner() as runner:
        return runner.run(
            _run(files, parsed.findings, cast(EngineConfig, engine_config), cast(ServerConfig, server_config))
        )


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
) -> AsyncIterator[tuple[AsyncEngine, FastAPI]]:
    """An engine that is ready, and its application; the engine is stopped on exit."""
    with ProgressReporter() as report:
        directory = await fetch_model(engine_config, report)
        keys = ApiKeys(())
        metrics = make_metrics(engine_config, server_config)
        engine, app = await build_application(
            directory, engine_config, server_config, keys, chat_template, metrics, report
        )
        await engine.start()
        try:
            await engine.wait_ready()
        except BaseException:
            await engine.stop()
            raise
    try:
        yield engine, app
    finally:
        await engine.stop()


async def _while_alive(working: Coroutine[Any, Any, Totals], engine: AsyncEngine) -> Totals:
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
