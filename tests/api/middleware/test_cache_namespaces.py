"""Who shares a namespace, by API key and salt, and that its name gives neither away."""

from typing import Any

import httpx
import pytest

from faser.api.middleware.keys import CacheNamespaces
from faser.types import Request
from tests.api.server import http_client, serving, settings
from tests.fake_engine import FakeEngine

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "hi"},
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
}


def test_each_pair_of_key_and_salt_has_a_name_of_its_own() -> None:
    """Among them pairs that look alike once they are joined."""
    keys = (None, 0, 1, 11, 111)
    salts = (None, "0", "1", "11", ", 1", "None", "\ud800", "né")
    names = [CacheNamespaces(across_keys=False)]
    pairs = [(key, salt) for key in keys for salt in salts if (key, salt) != (None, None)]
    found = {names[0].name(key, salt) for key, salt in pairs}
    assert len(found) == len(pairs)
    assert None not in found
    assert found == {names[0].name(key, salt) for key, salt in reversed(pairs)}


def test_only_requests_without_key_and_salt_share_with_everybody() -> None:
    assert CacheNamespaces(across_keys=False).name(None, None) is None
    assert CacheNamespaces(across_keys=True).name(3, None) is None


def test_across_keys_the_salt_alone_decides() -> None:
    namespaces = CacheNamespaces(across_keys=True)
    names = {namespaces.name(key, "salt") for key in (None, 1, 2)}
    assert len(names) == 1
    assert names != {namespaces.name(None, "other")}


def test_a_name_says_nothing_and_holds_for_one_process_only() -> None:
    one, other = (CacheNamespaces(across_keys=False).name(1, "the salt") for _ in range(2))
    assert one is not None
    assert one != other
    assert len(one) == 64
    assert "salt" not in one


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


def test_without_keys_all_share_one_cache_but_for_salted_requests(http: httpx.Client, engine: FakeEngine) -> None:
    plain, salted = (asked(http, engine, TEXT, "ignored", salt) for salt in (None, "mine"))
    assert (plain.cache_salt, plain.shares_cache) == (None, True)
    assert salted.cache_salt not in (None, "mine")
    assert not salted.shares_cache
