"""Keys and their indices, also while keys are replaced; the routes that ask for one; who shares a namespace."""

import hmac
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import httpx
import openai
import pytest

from faser.api.app import create_app
from faser.api.middleware.keys import ApiKeys, CacheNamespaces, _digest
from faser.metrics.server import Metrics
from faser.types.request import Request
from tests.api.server import http_client, openai_client, serving, settings
from tests.fake_engine import FakeEngine


def test_every_key_has_an_index_of_its_own() -> None:
    keys = ApiKeys(["one", "two", "one", "drei ✓"])
    assert len(keys) == 3
    assert [keys.index_of(key.encode()) for key in ("one", "two", "drei ✓")] == [0, 1, 2]


def test_what_is_not_a_key_has_no_index() -> None:
    keys = ApiKeys(["one", "two"])
    assert [keys.index_of(key) for key in (b"", b"on", b"one ", b"onetwo", b"\xff")] == [None] * 5


def test_an_index_never_passes_to_another_key() -> None:
    """Limits and caches are kept by index: whoever gets the first key's index gets what is the first key's."""
    keys = ApiKeys(["first", "second"])
    keys.replace(["third", "second"])
    assert keys.index_of(b"first") is None
    assert keys.index_of(b"second") == 1
    assert keys.index_of(b"third") == 2
    keys.replace(["fourth", "first"])
    assert [keys.index_of(key) for key in (b"first", b"fourth", b"second", b"third")] == [0, 3, None, None]
    assert [keys.accepts(index) for index in range(5)] == [True, False, False, True, False]


def test_every_key_is_compared_in_constant_time_whichever_matches() -> None:
    """Digests of equal length, all of them, by the function that is made for it."""
    keys = ApiKeys(["a", "much longer than the others", "b"])
    for presented in (b"a", b"b", b"none of them"):
        with patch("faser.api.middleware.keys.hmac.compare_digest", wraps=hmac.compare_digest) as compare:
            keys.index_of(presented)
        lengths = {len(each) for call in compare.call_args_list for each in call.args}
        assert (compare.call_count, len(lengths)) == (3, 1)


OPEN = ("/health", "/v1/health", "/ready", "/ping", "/metrics")


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
    "path",
    [
        "/v1/models",
        "/version",
        "/openapi.json",
        "/nowhere",
        "/healthz",
        "/health/x",
        "/v1/ready",
        "/models",
        "/chat/completions",
    ],
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


TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "hi"},
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
}


def test_each_pair_of_key_and_salt_has_a_name_of_its_own() -> None:
    """Among them pairs that look alike once they are joined."""
    keys = (None, b"0", b"1", b"11", b"111")
    salts = (None, "0", "1", "11", ", 1", "None", "\ud800", "né")
    names = [CacheNamespaces(across_keys=False)]
    pairs = [(key, salt) for key in keys for salt in salts if (key, salt) != (None, None)]
    found = {names[0].name(key, salt) for key, salt in pairs}
    assert len(found) == len(pairs)
    assert None not in found
    assert found == {names[0].name(key, salt) for key, salt in reversed(pairs)}


def test_only_requests_without_key_and_salt_share_with_everybody() -> None:
    assert CacheNamespaces(across_keys=False).name(None, None) is None
    assert CacheNamespaces(across_keys=True).name(b"3", None) is None


def test_across_keys_the_salt_alone_decides() -> None:
    namespaces = CacheNamespaces(across_keys=True)
    names = {namespaces.name(key, "salt") for key in (None, b"1", b"2")}
    assert len(names) == 1
    assert names != {namespaces.name(None, "other")}


def test_a_name_says_nothing_and_holds_for_one_process_only() -> None:
    one, other = (CacheNamespaces(across_keys=False).name(b"1", "the salt") for _ in range(2))
    assert one is not None
    assert one != other
    assert len(one) == 64
    assert "salt" not in one


def test_with_a_kept_secret_a_key_has_its_namespace_in_every_process_whatever_its_place_among_the_keys() -> None:
    """So KV on disk is found by the key that it was computed for, and by no other one."""
    engine, found = FakeEngine(), []
    for keys in ("one", "two"), ("two", "three", "one"):
        chosen = replace(settings(api_keys=keys), namespace_secret=b"s" * 32)
        with serving(engine, chosen) as url, http_client(url) as http:
            found.append({key: asked(http, engine, TEXT, key, "mine").cache_salt for key in keys})
    before, after = found
    assert {key: after[key] for key in before} == before
    assert len(set(after.values())) == 3
    assert before["one"] != CacheNamespaces(across_keys=False, secret=b"t" * 32).name(_digest(b"one"), "mine")


def asked(http: httpx.Client, engine: FakeEngine, route: str, key: str, salt: str | None) -> Request:
    headers = {"Authorization": f"Bearer {key}"}
    answer = http.post(route, json={**BODIES[route], "cache_salt": salt}, headers=headers)
    assert answer.status_code == 200
    return engine.requests[-1]


@pytest.mark.parametrize("route", [TEXT, CHAT])
def test_requests_of_one_key_share_a_cache_and_those_of_another_do_not(route: str) -> None:
    engine = FakeEngine()
    with serving(engine, settings(api_keys=("one", "two"))) as url, http_client(url) as http:
        first, again, salted = (asked(http, engine, route, "one", salt) for salt in (None, None, "mine"))
        other, other_salted = (asked(http, engine, route, "two", salt) for salt in (None, "mine"))
    assert first.cache_salt == again.cache_salt
    assert len({each.cache_salt for each in (first, salted, other, other_salted)}) == 4
    assert not any(each.shares_cache for each in engine.requests)
    assert not any(word in (each.cache_salt or "") for each in engine.requests for word in ("one", "two", "mine"))


def test_the_operator_can_let_all_keys_share_one_cache() -> None:
    engine = FakeEngine()
    chosen = settings(api_keys=("one", "two"), share_cache_across_keys=True)
    with serving(engine, chosen) as url, http_client(url) as http:
        for key in ("one", "two"):
            for salt in (None, "mine"):
                asked(http, engine, TEXT, key, salt)
    one, one_salted, two, two_salted = engine.requests
    assert one.cache_salt is two.cache_salt is None
    assert one.shares_cache
    assert two.shares_cache
    assert one_salted.cache_salt == two_salted.cache_salt is not None
    assert not one_salted.shares_cache


def test_without_keys_all_share_one_cache_but_for_salted_requests(
    shared_http: httpx.Client, engine: FakeEngine
) -> None:
    plain, salted = (asked(shared_http, engine, TEXT, "ignored", salt) for salt in (None, "mine"))
    assert (plain.cache_salt, plain.shares_cache) == (None, True)
    assert salted.cache_salt not in (None, "mine")
    assert not salted.shares_cache
