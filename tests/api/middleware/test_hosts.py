"""Which names a server without keys answers to, and which pages may ask it: through a server, as browsers ask.

Planted bugs that these tests have caught: names compared by their end without the dot; an Origin believed without
a name; the port compared too; Sec-Fetch-Site believed for a foreign Host; probes refused.
"""

import logging
import socket
from collections.abc import Iterator

import httpx
import pytest

from faser.api.middleware.hosts import AllowedHosts, name_of
from faser.api.requests.service import CorsSettings
from tests.api.raw_http import connect, head, read_all, request
from tests.api.server import http_client, serving, settings
from tests.fake_engine import FakeEngine, saying

EVIL = "rebound.evil.example"
GUARDED = ("/v1/models", "/live", "/metrics", "/", "/openapi.json", "/version")
PROBES = ("/health", "/ready", "/ping")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server without keys, with default settings."""
    with serving(FakeEngine()) as served:
        yield served


def status(url: str, path: str, host: str, **headers: str) -> int:
    """The status of GET path, with this Host."""
    with http_client(url) as http, http.stream("GET", path, headers={"Host": host, **headers}) as answer:
        return answer.status_code


def post(url: str, host: str, **headers: str) -> httpx.Response:
    """Ask for a completion. headers: further ones, by name, with underscores."""
    named = {
        "Host": host,
        "Content-Type": "application/json",
        **{k.replace("_", "-"): v for k, v in headers.items()},
    }
    with http_client(url) as http:
        return http.post("/v1/completions", content=b'{"prompt": "x"}', headers=named)


@pytest.mark.parametrize("path", GUARDED)
def test_a_rebound_name_is_answered_nothing(url: str, path: str) -> None:
    """The page of http://rebound.evil.example:8000, whose name has become 127.0.0.1."""
    assert status(url, path, f"{EVIL}:8000") == 403
    assert status(url, path, "127.0.0.1:8000") == 200


def test_a_refusal_names_the_host_and_the_flag(url: str) -> None:
    answer = post(url, f"{EVIL}:8000")
    assert answer.status_code == 403
    assert answer.json()["error"]["type"] == "PermissionDeniedError"
    assert EVIL in answer.json()["error"]["message"]
    assert f"--allowed-hosts {EVIL}" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", PROBES)
def test_probes_are_answered_to_any_name(url: str, path: str) -> None:
    assert status(url, path, EVIL, Origin="https://evil.example") == 200


@pytest.mark.parametrize(
    "host",
    [
        "localhost:8000",
        "LOCALHOST",
        "localhost.:8000",
        "app.localhost",
        "127.0.0.1",
        "127.3.2.1:8000",
        "[::1]:8000",
        "[fe80::1%25eth0]:8000",
        "192.168.1.7:8000",
        "203.0.113.9",
        "faser:8000",  # a service of the same namespace, or of docker compose
        "faser.default.svc.cluster.local",
        "desk.local:8000",
        "host.docker.internal:8000",
        socket.gethostname(),
        f"{socket.gethostname()}:8000",
    ],
)
def test_names_of_this_machine_and_of_its_network_are_answered(url: str, host: str) -> None:
    assert status(url, "/v1/models", host) == 200


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "notlocal.example",
        "evil.notlocal",
        "127.0.0.1.",  # with the dot stripped it is an address, and is answered
        "1.2.3.4.5",
        "EVIL.EXAMPLE:80",
        "evil.example.",
    ],
)
def test_names_that_only_look_like_ours_are_refused(url: str, host: str) -> None:
    assert status(url, "/v1/models", host) == (200 if host == "127.0.0.1." else 403)


def test_operators_allow_further_names_and_whole_domains() -> None:
    hosts = AllowedHosts(("llm.example.org", "*.Corp.example"))
    for name, expected in (
        ("llm.example.org", True),
        ("LLM.EXAMPLE.ORG:443", True),
        ("a.llm.example.org", False),
        ("gpu.corp.example", True),
        ("a.gpu.corp.example:8000", True),
        ("corp.example", False),
        ("evilcorp.example", False),
    ):
        assert (name_of(name) in hosts) is expected, name
    assert EVIL in AllowedHosts(("*",))


def test_a_server_with_keys_answers_to_any_name() -> None:
    """No page of another site knows a key, so proxies need no setting."""
    with serving(FakeEngine(), settings(api_keys=("k",))) as guarded:
        assert status(guarded, "/v1/models", EVIL, Authorization="Bearer k") == 200
        assert status(guarded, "/v1/models", EVIL) == 401
        assert status(guarded, "/", EVIL) == 200
        assert post(guarded, EVIL, Authorization="Bearer k", Origin="https://x.example").status_code == 200


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "null",
        "http://localhost.evil.example",
        "http://192.168.1.9",
        "file://",
        "",
        "http://",
    ],
)
def test_a_page_of_another_site_gets_nothing_done(origin: str) -> None:
    """Its answer could not be read, but the request would be computed. A form's types (415) are refused anyway."""
    engine = FakeEngine()
    with serving(engine) as url:
        answer = post(url, "127.0.0.1:8000", Origin=origin, Sec_Fetch_Site="cross-site")
        assert answer.status_code == 403
        assert "--allowed-origins" in answer.json()["error"]["message"]
        assert engine.requests == []


@pytest.mark.parametrize(
    "host, headers",
    [
        ("127.0.0.1:8000", {"Origin": "http://127.0.0.1:8000"}),
        ("[::1]:8000", {"Origin": "http://[::1]:8000"}),
        ("Desk:8000", {"Origin": "http://desk:8000"}),
        ("192.168.1.7", {"Origin": "http://192.168.1.7:8000"}),  # nginx's $host has no port
        ("localhost:8000", {"Origin": "http://localhost:3000"}),  # another port of this machine
        ("faser", {"Origin": "https://llm.example", "Sec_Fetch_Site": "same-origin"}),  # a proxy's own Host
        ("127.0.0.1:8000", {}),  # no browser
    ],
)
def test_the_servers_own_page_works_by_each_address_and_behind_proxies(host: str, headers: dict[str, str]) -> None:
    engine = FakeEngine()
    with serving(engine) as url:
        assert post(url, host, **headers).status_code == 200
        assert len(engine.requests) == 1


def test_what_a_browser_says_of_its_page_does_not_help_a_rebound_name(url: str) -> None:
    """To a rebound page the server is its own origin: the name alone tells."""
    origin = f"http://{EVIL}:8000"
    assert post(url, f"{EVIL}:8000", Origin=origin, Sec_Fetch_Site="same-origin").status_code == 403
    assert status(url, "/v1/models", EVIL, **{"X-Forwarded-Proto": "https", "X-Forwarded-Host": "a"}) == 403


def test_an_origin_that_may_use_the_server_is_answered_and_its_preflight_too() -> None:
    page = "https://app.example"
    with serving(FakeEngine(), settings(cors=CorsSettings(origins=(page,)))) as url:
        assert post(url, "localhost", Origin=page).status_code == 200
        assert post(url, "localhost", Origin="https://evil.example").status_code == 403
        assert post(url, EVIL, Origin=page).status_code == 403
    with serving(FakeEngine(), settings(cors=CorsSettings(origins=("*",)))) as url:
        assert post(url, EVIL, Origin="https://any.example").status_code == 200


def test_a_request_without_a_host_is_no_browsers() -> None:
    with serving(FakeEngine(script=saying("hi"))) as url, connect(url) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 200")


def test_the_first_refusal_is_logged_with_the_flag_and_only_that(caplog: pytest.LogCaptureFixture) -> None:
    with serving(FakeEngine()) as url, caplog.at_level(logging.WARNING, "faser.api"):
        for _ in range(3):
            status(url, "/v1/models", "llm.example")
    (record,) = [each for each in caplog.records if each.name == "faser.api"]
    assert "--allowed-hosts llm.example" in record.getMessage()


def test_a_strange_name_neither_breaks_the_answer_nor_the_log(url: str) -> None:
    with connect(url) as connection:
        connection.sendall(head("/v1/models", method="GET", Host="\x1b[31m." + "é.x" * 100, Connection="close"))
        assert read_all(connection).partition(b" ")[2][:3] in (b"400", b"403")


def test_the_same_holds_for_a_request_by_hand(url: str) -> None:
    for host, code in ((EVIL, b"403"), ("localhost", b"200")):
        with connect(url) as connection:
            connection.sendall(request({"prompt": "x", "max_tokens": 2}, Host=host, Connection="close"))
            assert read_all(connection).startswith(b"HTTP/1.1 " + code)
