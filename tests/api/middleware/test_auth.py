"""With a key set, every route asks for it but those that orchestrators call."""

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.api.server import http_client, openai_client, serving, settings
from tests.fake_engine import FakeEngine

OPEN = ("/health", "/ready", "/ping", "/metrics")


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    with serving(FakeEngine(), settings(api_keys=("key-one", "key-två"))) as url:
        yield url


@pytest.fixture
def http(guarded: str) -> Iterator[httpx.Client]:
    with http_client(guarded) as client:
        yield client


@pytest.mark.parametrize("route", OPEN)
def test_orchestrators_and_scrapers_need_no_key(http: httpx.Client, route: str) -> None:
    assert http.get(route).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/version", "/openapi.json", "/nowhere", "/health/", "/v1/health"])
def test_every_other_route_asks_for_a_key(http: httpx.Client, path: str) -> None:
    answer = http.get(path)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["type"] == "AuthenticationError"
    assert "x-request-id" in answer.headers


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_key_is_looked_at_before_the_body(http: httpx.Client, path: str) -> None:
    assert http.post(path, content=b"{").status_code == 401


@pytest.mark.parametrize(
    "header",
    ["Bearer wrong", "Bearer key-on", "Bearer", "key-one", "Basic key-one", "Bearer key-one key"],
)
def test_wrong_key_is_refused_and_never_repeated(http: httpx.Client, header: str) -> None:
    answer = http.get("/v1/models", headers={"Authorization": header})
    assert answer.status_code == 401
    assert "wrong" not in answer.text
    assert "key-one" not in answer.text


@pytest.mark.parametrize("key", ["key-one", "key-två"])
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_each_key_opens_the_door(http: httpx.Client, key: str, scheme: str) -> None:
    headers = [(b"Authorization", f"{scheme} {key}".encode())]
    assert http.get("/v1/models", headers=headers).status_code == 200


def test_official_client_is_let_in_and_kept_out(guarded: str) -> None:
    with openai_client(guarded, "key-one") as client:
        assert client.models.list().data[0].id == "tiny"
    with openai_client(guarded, "nope") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_preflight_passes(http: httpx.Client) -> None:
    assert http.options("/v1/chat/completions").status_code == 405


def test_operator_can_close_the_metrics() -> None:
    with serving(FakeEngine(), settings(api_keys=("k",), metrics_auth=True)) as url, http_client(url) as http:
        assert http.get("/metrics").status_code == 401
        assert http.get("/metrics", headers={"Authorization": "Bearer k"}).status_code == 200
        assert http.get("/health").status_code == 200
