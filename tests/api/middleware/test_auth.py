"""With a key set, every route asks for it but those that orchestrators call."""

import re
from collections.abc import Iterator

import httpx
import openai
import pytest

from faser.api.app import create_app
from faser.api.middleware.keys import ApiKeys
from faser.metrics.server import Metrics
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


@pytest.mark.parametrize(
    "path", ["/v1/models", "/version", "/openapi.json", "/nowhere", "/healthz", "/health/x", "/v1/health"]
)
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


def test_every_route_but_the_probes_asks_for_a_key() -> None:
    """Whatever routes there will be: those of the application itself are asked, one by one."""
    app = create_app(
        FakeEngine(), settings=settings(api_keys=("k",)), metrics=Metrics(model_name="tiny", max_model_len=64)
    )
    paths = {"/openapi.json", *app.openapi()["paths"]}
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/models"} <= paths
    with serving(FakeEngine(), settings(api_keys=("k",))) as url, http_client(url) as http:
        for path in paths - set(OPEN):
            for method in ("GET", "POST", "PUT", "DELETE", "HEAD"):
                assert http.request(method, path.replace("{model:path}", "tiny")).status_code == 401, path


def test_replaced_keys_hold_at_once_and_on_open_connections() -> None:
    keys = ApiKeys(["old", "kept"])
    with serving(FakeEngine(), keys=keys) as url, http_client(url) as http:
        assert status_with(http, "old") == status_with(http, "kept") == 200
        keys.replace(["new", "kept"])
        assert [status_with(http, key) for key in ("old", "new", "kept")] == [401, 200, 200]


def test_without_any_key_left_nobody_is_let_in() -> None:
    keys = ApiKeys(["only"])
    with serving(FakeEngine(), keys=keys) as url, http_client(url) as http:
        keys.replace([])
        assert status_with(http, "only") == 401
        assert http.get("/v1/models").status_code == 401


def test_a_request_counts_as_its_key_or_else_as_its_connection() -> None:
    engine = FakeEngine()
    body = {"prompt": "hi"}
    with serving(engine, settings(api_keys=("k0", "k1"))) as url, http_client(url) as http:
        for key in ("k1", "k0", "k1"):
            assert http.post("/v1/completions", json=body, headers=bearer(key)).status_code == 200
    assert [each.tenant for each in engine.requests] == ["key 1", "key 0", "key 1"]
    engine.reset()
    with serving(engine) as url:
        for _ in range(2):
            with http_client(url) as http:
                for _ in range(2):
                    assert http.post("/v1/completions", json=body).status_code == 200
    tenants = [each.tenant for each in engine.requests]
    assert tenants[0] == tenants[1] != tenants[2] == tenants[3]
    assert all(re.fullmatch(r"connection 127\.0\.0\.1:\d+", tenant) for tenant in tenants)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def status_with(http: httpx.Client, key: str) -> int:
    return http.get("/v1/models", headers=bearer(key)).status_code


def test_a_key_may_come_as_anthropics_clients_send_it(http: httpx.Client) -> None:
    assert http.get("/v1/models", headers={"x-api-key": "key-one"}).status_code == 200
    assert http.get("/v1/models", headers={"x-api-key": "key-two"}).status_code == 401
    both = {"x-api-key": "key-one", "Authorization": "Bearer wrong"}
    assert http.get("/v1/models", headers=both).status_code == 401  # one request counts as one key's
