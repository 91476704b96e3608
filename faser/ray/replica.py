"""Replica: one engine and its HTTP application in an actor of Ray Serve.

Ray Serve starts it, asks for its health, sends it calls, and ends it once its calls are answered. The engine is a
child process, which ends with the actor. Knows no HTTP connection: calls come from a gateway.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

import ray
from ray import serve
from starlette.types import ASGIApp, Message, Scope

from faser.api.middleware.keys import ApiKeys
from faser.cli.application import Application, make_metrics, started
from faser.cli.preparation import read_api_keys, read_chat_template
from faser.config.declaration import MODEL, OUTPUT, settings_of
from faser.config.server import ServerConfig
from faser.config.sources import SETTINGS, Findings, parse, server_settings
from faser.logs import FRONT_END, start_logging
from faser.ray.calls import AnswerStart, Call, Headers
from faser.types.engine import EngineState

PROG = "faser on Ray Serve"
_log = logging.getLogger("faser.ray")
_ERROR, _UNAVAILABLE = 500, 503
# Settings of a server that have a meaning without a connection, and that replicas need not agree on.
_KEPT = frozenset(
    {
        "api_key",
        "api_key_file",
        "share_cache_across_keys",
        "metrics_require_key",
        "allowed_hosts",
        "allowed_origins",
        "allowed_methods",
        "allowed_headers",
        "allow_credentials",
        "request_timeout",
        "max_request_bytes",
        "strict_request_fields",
        "shutdown_timeout",
        "engine_restarts",
        "engine_timeout",
        "log_level",
        "log_format",
    }
)


def replica_settings(flags: Sequence[str]) -> Findings:
    """Parse the settings that a replica is started with. Flags that have no meaning for it are problems."""
    findings = parse(PROG, flags, SETTINGS)
    kept = _KEPT | {each.name for each in settings_of(ServerConfig) if each.group in (MODEL, OUTPUT)}
    for each in settings_of(ServerConfig):
        if each.name not in kept and each.name in findings.given:
            findings.problems.append(f"{findings.label(each.name)} is for faser serve; a replica has no port")
    return findings


class Replica:
    """flags: of faser serve. Its methods are those that Ray Serve looks for, and `answer`."""

    async def __init__(self, flags: Sequence[str]) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        findings = replica_settings(flags)
        engine_config, server_config = server_settings(findings)
        # The page shows one engine; Ray's proxy, whatever it listens on, brings requests of other machines.
        server_config = replace(server_config, page=False, host="0.0.0.0")
        start_logging(server_config.log_level, server_config.log_format, FRONT_END)
        keys = ApiKeys(read_api_keys(server_config, findings.label))
        template = read_chat_template(server_config.chat_template, findings.label("chat_template"))
        cores = ray.get_runtime_context().get_assigned_resources().get("CPU", 0)
        if "num_threads" not in findings.given and cores >= 1:
            engine_config = replace(engine_config, num_threads=int(cores))
        self._id: str = serve.get_replica_context().replica_id.unique_id
        metrics = make_metrics(engine_config, server_config, engine=self._id)
        self._stack = AsyncExitStack()
        self._application: Application = await self._stack.enter_async_context(
            started(engine_config, server_config, keys, template, metrics, _log_progress)
        )

    async def answer(self, call: Call) -> AsyncIterator[AnswerStart | bytes]:
        """An AnswerStart, then the body. Closing the iterator aborts the request."""
        async for each in called(self._application.app, call):
            if isinstance(each, bytes):
                yield each
                continue
            status, headers = each
            elsewhere = status == _UNAVAILABLE
            yield AnswerStart(status=status, headers=headers, replica=self._id, elsewhere=elsewhere)

    async def whole_answer(self, call: Call) -> tuple[int, bytes]:
        """The status and the whole body: for calls that go to all replicas."""
        status, body = _ERROR, b""
        async for each in called(self._application.app, call):
            if isinstance(each, bytes):
                body += each
            else:
                status = each[0]
        return status, body

    async def check_health(self) -> None:
        """Raises RuntimeError while /ready says no; after three times Ray Serve starts another replica."""
        engine = self._application.engine
        if engine.state is not EngineState.READY:
            raise RuntimeError(f"the engine is {engine.state.value}: {engine.state_reason}")

    async def __del__(self) -> None:
        """Ray Serve awaits it after the last call, or after graceful_shutdown_timeout_s."""
        await self._stack.aclose()


def _log_progress(stage: str, done: int, total: int) -> None:
    _log.debug("%s: %d of %d", stage, done, total)


async def called(app: ASGIApp, call: Call) -> AsyncGenerator[tuple[int, Headers] | bytes, None]:
    """Yield an application's answer: status and headers, then the body; parts that are there at once come joined.

    Closing the generator cancels the application.
    """
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    unread = [{"type": "http.request", "body": call.body, "more_body": False}]

    async def receive() -> Message:
        if not unread:
            await asyncio.Event().wait()  # the gateway cancels the call where its client has gone
        return unread.pop()

    task = asyncio.ensure_future(app(_scope(call), receive, sent.put))
    task.add_done_callback(lambda _: sent.put_nowait(None))
    try:
        while (message := await sent.get()) is not None:
            if message["type"] == "http.response.start":
                yield message["status"], tuple(message["headers"])
                continue
            body = message.get("body", b"")
            while not sent.empty() and (message := sent.get_nowait()) is not None:
                body += message.get("body", b"")
            if body:
                yield body
            if message is None:
                break
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _scope(call: Call) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "root_path": "",
        "query_string": call.query,
        "headers": list(call.headers),
        "client": call.client,
        "server": None,
        "state": {},
    }
