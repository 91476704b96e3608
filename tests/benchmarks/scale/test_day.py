"""A day of traffic: when requests come, and the routers that they come through."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from benchmarks.scale.day import compressed
from benchmarks.scale.fronts import Programs, nginx_settings, start_front
from benchmarks.scale.replicas import Run, Session, ask
from deploy import __file__ as deploy_file

DELIVERED = Path(deploy_file).parent / "nginx" / "faser.conf"


def test_the_whole_trace_is_pressed_into_the_time_with_its_ups_and_downs() -> None:
    busy = [(100.0 + 0.1 * number, 1, 1) for number in range(1000)]  # 100 s with 10 a second
    quiet = [(200.0 + number, 1, 1) for number in range(100)]  # 100 s with one
    times = compressed([*busy, *quiet], rate=2.0, seconds=50.0)
    assert len(times) == 100
    assert times == sorted(times)
    assert times[0] == 0
    assert max(times) <= 50
    assert sum(each <= 25 for each in times) == pytest.approx(100 * 10 / 11, abs=2)


def test_nginx_gets_the_file_that_is_delivered_but_for_addresses() -> None:
    delivered = DELIVERED.read_text().splitlines()
    settings = nginx_settings(["http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3"], 4).splitlines()
    added = [each for each in settings if each not in delivered]
    gone = [each for each in delivered if each not in settings]
    assert [each.split()[:2] for each in added] == [
        *(["server", f"127.0.0.1:{port}"] for port in (1, 2, 3)),
        ["listen", "127.0.0.1:4;"],
    ]
    assert len(gone) == 3
    assert {each.partition(" max_fails")[2] for each in added[:3]} == {
        each.partition(" max_fails")[2] for each in gone[:2]
    }


@asynccontextmanager
async def answering(text: bytes) -> AsyncIterator[str]:
    """A server that answers every request with these bytes, and closes the connection."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(text)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


EVENT = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'


@pytest.mark.parametrize(
    "outcome, status, events",
    [
        ("answered", b"200 OK", EVENT + b"data: [DONE]\n\n"),
        ("error event", b"200 OK", EVENT + b'data: {"error": {}}\n\n'),
        ("cut off", b"200 OK", EVENT),
        ("lost", b"200 OK", b""),
        ("lost", b"503 Service Unavailable", b""),
    ],
)
def test_every_request_is_counted_by_how_it_ended(outcome: str, status: bytes, events: bytes) -> None:
    async def asked() -> Run:
        found = Run()
        async with answering(b"HTTP/1.1 " + status + b"\r\n\r\n" + events) as url, httpx.AsyncClient() as http:
            await ask(http, url, Session(1, []), found)
        return found

    found = asyncio.run(asked())
    assert found.outcomes == {outcome: 1}


def test_a_router_that_is_not_known_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--fronts has haproxy; it must begin with one of nginx"):
        start_front("haproxy", [], "model", tmp_path, Programs(), {})
