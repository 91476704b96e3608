"""An application that a call reaches without a connection, and the flags of a replica."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

pytest.importorskip("ray", reason="make ray installs it")

from fastapi import FastAPI, Request
from starlette.responses import StreamingResponse

from faser.config.sources import UsageError, server_settings
from faser.ray.calls import Call
from faser.ray.replica import called, replica_settings
from tests.waiting import PATIENCE_S

app = FastAPI()
heard: list[str] = []


@app.post("/echo/{name}")
async def echo(name: str, request: Request) -> dict[str, Any]:
    assert request.client is not None
    return {
        "name": name,
        "q": request.query_params["q"],
        "body": await request.json(),
        "host": request.client.host,
    }


@app.get("/events")
async def events() -> StreamingResponse:
    async def parts() -> AsyncIterator[bytes]:
        try:
            for number in range(3):
                yield f"data: {number}\n\n".encode()
                yield b"data: and\n\n"
                await asyncio.sleep(0.02)
            await asyncio.sleep(60)
        finally:
            heard.append("closed")

    return StreamingResponse(parts(), media_type="text/event-stream")


@app.get("/broken")
async def broken() -> StreamingResponse:
    async def parts() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        raise ArithmeticError("a bug")

    return StreamingResponse(parts())


def call(method: str, path: str, body: bytes = b"") -> Call:
    headers = ((b"content-type", b"application/json"),)
    return Call(method=method, path=path, query=b"q=1", headers=headers, body=body, client=("10.0.0.1", 5))


async def everything(given: Call) -> list[Any]:
    async with aclosing(called(app, given)) as parts:
        return [each async for each in parts]


def test_an_application_sees_the_request_and_its_answer_comes_back() -> None:
    (status, headers), body = asyncio.run(everything(call("POST", "/echo/x", b'{"a": 1}')))
    assert status == 200
    assert (b"content-type", b"application/json") in headers
    assert body == b'{"name":"x","q":"1","body":{"a":1},"host":"10.0.0.1"}'


def test_parts_come_when_they_are_sent_and_leaving_ends_the_application() -> None:
    async def some() -> list[Any]:
        heard.clear()
        found = []
        async with aclosing(called(app, call("GET", "/events"))) as parts:
            async for each in parts:
                found.append(each)
                if len(found) == 4:
                    break
        return found

    async def within() -> list[Any]:
        return await asyncio.wait_for(some(), PATIENCE_S)

    (status, _), *parts = asyncio.run(within())
    assert status == 200
    assert b"".join(parts) == b"".join(b"data: %d\n\ndata: and\n\n" % number for number in range(3))
    assert heard == ["closed"]


def test_an_applications_bug_is_raised_after_what_it_has_sent() -> None:
    async def until_it_breaks() -> None:
        parts = called(app, call("GET", "/broken"))
        assert (await anext(parts))[0] == 200
        assert await anext(parts) == b"data: 1\n\n"
        with pytest.raises(ArithmeticError):
            await anext(parts)

    asyncio.run(until_it_breaks())


def test_flags_of_a_replica_are_those_of_a_server_without_a_connection() -> None:
    findings = replica_settings(["m.gguf", "--max-num-seqs", "5", "--api-key", "k", "--shutdown-timeout", "7"])
    engine_config, server_config = server_settings(findings)
    assert (engine_config.model, engine_config.max_num_seqs) == ("m.gguf", 5)
    assert (server_config.api_key, server_config.shutdown_timeout) == (("k",), 7)


@pytest.mark.parametrize(
    "flags", [["--port", "1"], ["--ssl-certfile", "f"], ["-dp", "2"], ["--key-rpm-limit", "1"], ["--page"]]
)
def test_flags_that_a_replica_could_not_keep_are_refused(flags: list[str]) -> None:
    with pytest.raises(UsageError, match="is for faser serve; a replica has no port"):
        server_settings(replica_settings(flags))
