"""A server with a scripted engine, run as a program so that tests can send it signals.

Usage: python -m tests.cli.small_server FATE SHUTDOWN_TIMEOUT, where FATE is ready, slow, fetching, bad-fetch,
loading, bad-config, bad-engine or dying. GET / answers after a second, if slow after a minute; the engine's drain
waits for such answers.
Prints its port, then "cancelled", "ready", "drained" and "stopped" as they happen.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any, cast

from faser.cli.preparation import listen
from faser.cli.server import http_server, run_until_stopped
from faser.config.server import ServerConfig
from faser.engine.client.async_engine import AsyncEngine
from faser.errors import ConfigError, EngineDiedError, EngineError, FaserError
from faser.types.engine import ModelInfo

INFO = ModelInfo(
    max_model_len=8,
    vocab_size=8,
    eos_token_ids=(0,),
    dtype="float32",
    device="cpu",
    backend="torch",
    block_size=16,
    num_blocks=4,
    kv_cache_bytes=1,
    kv_cache_dtype="float32",
    weight_bytes=1,
    num_parameters=1,
)


def say(text: object) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class ScriptedEngine:
    def __init__(self, fate: str) -> None:
        self.fate = fate
        self.answering = 0

    async def start(self) -> None:
        return None

    async def wait_ready(self) -> ModelInfo:
        match self.fate:
            case "loading":
                await asyncio.Event().wait()
            case "bad-config":
                raise ConfigError("the model has no layers")
            case "bad-engine":
                raise EngineError("the engine died")
        return INFO

    async def wait_dead(self) -> FaserError:
        if self.fate != "dying":
            await asyncio.Event().wait()
        await asyncio.sleep(0.5)
        return EngineDiedError("the engine died (signal 9)")

    async def drain(self, timeout_s: float) -> None:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self.answering and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        say(f"drained, {self.answering} left")

    async def stop(self) -> None:
        say("stopped")


def main() -> int:
    engine = ScriptedEngine(sys.argv[1])

    async def app(
        scope: dict[str, Any],
        receive: Callable[[], Awaitable[dict[str, Any]]],
        send: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        engine.answering += 1
        say("asked")
        await asyncio.sleep(60 if engine.fate == "slow" else 1)
        engine.answering -= 1
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def prepare() -> AsyncEngine:
        match engine.fate:
            case "fetching":
                try:
                    await asyncio.Event().wait()
                finally:
                    say("cancelled")
            case "bad-fetch":
                raise ConfigError("there is no network")
        return cast(AsyncEngine, engine)

    listener = listen("127.0.0.1", 0)
    say(listener.getsockname()[1])
    server = http_server(app, ServerConfig(disable_uvicorn_access_log=True))
    return run_until_stopped([(server, listener)], prepare, float(sys.argv[2]), lambda _: say("ready"))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ConfigError, EngineError) as error:
        sys.exit(str(error))
