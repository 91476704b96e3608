"""`faser run-batch -i IN.jsonl -o OUT.jsonl [MODEL]`: answers the requests of a file without a server.

The format of both files is OpenAI's and vLLM's. Each line is answered by the application of a server, called in
this process, so it means what it means to a server: the same checks, errors and answers. A queue that is full, and
an engine that is being started again, are waited for.
"""

import asyncio
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import httpx
from starlette.types import ASGIApp

from faser.api.middleware.keys import ApiKeys
from faser.cli.application import make_metrics, started, while_alive
from faser.cli.batch.lines import BatchLine, ResultsFile, Totals, answer_line, read_lines
from faser.cli.batch.on_ray import Cluster, answer_on_ray
from faser.cli.console import TERMINATED, ProgressReporter, runs_bar
from faser.cli.preparation import read_chat_template
from faser.config.declaration import MODEL, OUTPUT, settings_of
from faser.config.engine import EngineConfig
from faser.config.server import ServerConfig
from faser.config.sources import SETTINGS, CommandParser, Findings, UsageError, parse, server_settings
from faser.errors import ConfigError
from faser.optional import or_else
from faser.processes import exit_on_sigterm

PROG = "faser run-batch"

_HELP = """usage: faser run-batch -i IN.jsonl -o OUT.jsonl [MODEL] [flags]

Answer the requests of a file, one a line, in the format of OpenAI's Batch API and of vLLM's run-batch:

  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}

  -i, --input-file IN     the requests; url is /v1/chat/completions, /v1/completions, /v1/responses,
                          /v1/messages, /v1/embeddings, /v1/rerank or /v1/score
  -o, --output-file OUT   the answers, one a line, written as they finish: find them by custom_id
  --resume                keep the answers that OUT has already, and try all others
  --requests-at-once N    of each engine [twice --max-num-seqs]
  --ray                   with engines on a Ray cluster: pip install 'faser[ray]'
  --ray-address ADDRESS   of its head, or auto [this machine alone]
  --ray-replicas N        engines [one for each node]
  --ray-cpus N            that Ray sets apart for an engine [--num-threads, or 1]
  --ray-gpus N            the same [1 with --device cuda, or 0]
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


# Answers lines and writes their results. The bar is to be shown once the engines are ready.
Answer = Callable[[Iterator[BatchLine], ResultsFile, "_Bar"], Totals]


def run_batch(arguments: Sequence[str]) -> int:
    """Answer a file; returns the exit status. Raises ConfigError before the start, or EngineError."""
    parser = _own_parser()
    own, rest = parser.parse_known_args(arguments)
    if own.help:
        print(_HELP)
        return 0
    if problems := _own_problems(own):
        raise UsageError(problems)
    findings = parse(PROG, rest, SETTINGS)
    _refuse_network_flags(findings)
    engine_config, server_config = server_settings(findings)
    template = read_chat_template(server_config.chat_template, findings.label("chat_template"))
    for warning in findings.warnings:
        print(f"{PROG}: warning: {warning}", file=sys.stderr)
    at_once = own.requests_at_once or 2 * engine_config.max_num_seqs
    if own.ray:
        answer = _on_ray(own, rest, engine_config, at_once)
    else:
        answer = partial(_here, engine_config, server_config, template, at_once)
    with exit_on_sigterm(TERMINATED):
        return _run(Path(own.input_file), Path(own.output_file), own.resume, answer)


def _own_parser() -> CommandParser:
    parser = CommandParser(PROG)
    parser.add_argument("--input-file", "-i")
    parser.add_argument("--output-file", "-o")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--requests-at-once", type=int)
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--ray-address")
    parser.add_argument("--ray-replicas", type=int)
    parser.add_argument("--ray-cpus", type=float)
    parser.add_argument("--ray-gpus", type=float)
    parser.add_argument("--help", "-h", action="store_true")
    return parser


def _own_problems(own: Namespace) -> list[str]:
    problems = [
        f"{flag} is missing; it is required"
        for flag, given in (("-i", own.input_file), ("-o", own.output_file))
        if given is None
    ]
    for flag, given, least in (
        ("--requests-at-once", own.requests_at_once, 1),
        ("--ray-replicas", own.ray_replicas, 1),
        ("--ray-cpus", own.ray_cpus, 0),
        ("--ray-gpus", own.ray_gpus, 0),
    ):
        if given is not None and given < least:
            problems.append(f"{flag} is {given}; it must be at least {least}")
    for flag, given in (
        ("--ray-address", own.ray_address),
        ("--ray-replicas", own.ray_replicas),
        ("--ray-cpus", own.ray_cpus),
        ("--ray-gpus", own.ray_gpus),
    ):
        if given is not None and not own.ray:
            problems.append(f"{flag} is {given}; it needs --ray")
    return problems


def _refuse_network_flags(findings: Findings) -> None:
    """Flags on the command line; variables and files may be shared with a server."""
    kept = _KEPT | {each.name for each in settings_of(ServerConfig) if each.group in (MODEL, OUTPUT)}
    for each in settings_of(ServerConfig):
        if each.name not in kept and each.name in findings.given:
            findings.problems.append(f"{findings.label(each.name)} is for faser serve; run-batch opens no port")


def _run(requests: Path, results_path: Path, resume: bool, answer: Answer) -> int:
    num_lines = sum(1 for _ in read_lines(requests))
    with ResultsFile(results_path, resume=resume) as results:
        kept = results.answered
        left = (line for line in read_lines(requests) if line.problem or line.custom_id not in kept)
        bar = _Bar(total=num_lines, completed=len(kept))
        totals = answer(left, results, bar)
    print(
        f"{PROG}: {totals.answered} answered, {totals.failed} failed, {len(kept)} kept; "
        f"{totals.prompt_tokens} prompt and {totals.generated_tokens} generated tokens in {bar.seconds:.1f} s",
        file=sys.stderr,
    )
    return 1 if totals.failed else 0


@dataclass(slots=True, kw_only=True)
class _Bar:
    """total, completed: numbers of lines. seconds: that it has been shown."""

    total: int
    completed: int
    seconds: float = 0.0

    @contextmanager
    def shown(self) -> Iterator[Callable[[], None]]:
        """Within it, what is to be called after each result."""
        began_s = time.monotonic()
        with runs_bar() as bar:
            task = bar.add_task("answering", total=self.total, completed=self.completed)
            yield lambda: bar.advance(task)
        self.seconds = time.monotonic() - began_s


def _on_ray(own: Namespace, flags: Sequence[str], config: EngineConfig, at_once: int) -> Answer:
    """Raises ConfigError if Ray is missing."""
    missing = [each for each in ("ray", "pyarrow", "pandas") if find_spec(each) is None]
    if missing:
        raise ConfigError(f"--ray needs the package {missing[0]}, which is missing: pip install 'faser[ray]'")
    cluster = Cluster(
        address=own.ray_address,
        num_replicas=own.ray_replicas,
        num_cpus=or_else(own.ray_cpus, config.num_threads or 1),
        num_gpus=or_else(own.ray_gpus, float(config.device == "cuda")),
    )

    def answer(lines: Iterator[BatchLine], results: ResultsFile, bar: _Bar) -> Totals:
        with bar.shown() as on_result:
            return answer_on_ray(PROG, flags, cluster, list(lines), results, at_once=at_once, on_result=on_result)

    return answer


def _here(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    chat_template: str | None,
    at_once: int,
    lines: Iterator[BatchLine],
    results: ResultsFile,
    bar: _Bar,
) -> Totals:
    """Answer lines in this process, as an Answer does."""

    async def answer() -> Totals:
        metrics = make_metrics(engine_config, server_config)
        async with AsyncExitStack() as stack:
            with ProgressReporter() as report:
                loading = started(engine_config, server_config, ApiKeys(()), chat_template, metrics, report)
                loaded = await stack.enter_async_context(loading)
            with bar.shown() as on_result:
                working = run_lines(loaded.app, lines, results, at_once=at_once, on_result=on_result)
                return await while_alive(working, loaded.engine)

    return asyncio.run(answer())


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
                result = await answer_line(client, line)
                totals.count(result)
                results.write(result)
                on_result()

        async with asyncio.TaskGroup() as workers:
            for _ in range(at_once):
                workers.create_task(work())
    return totals
