"""Adapters over HTTP: the name is the model of a request in every dialect, and routes load and unload."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from faser.api.requests.adapters import Adapters
from faser.errors import ModelError
from faser.types.adapter import Adapter
from tests.api.server import http_client, openai_client, serving, settings
from tests.fake_engine import FakeEngine
from tests.waiting import until

SQL = Adapter(name="sql", path="/a/sql", digest="5c1")
HI = [{"role": "user", "content": "hi"}]
GENERATING: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 9},
    "/invocations": {"prompt": "hi"},
}
WITHOUT_TOKENS: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [104]},
    "/v1/messages/count_tokens": {"messages": HI},
    "/v1/chat/completions/render": {"messages": HI},
}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def read(name: str, path: str) -> Adapter:
    if path == "/a/missing":
        raise ModelError(f"{path} is no adapter")
    return Adapter(name=name, path=path, digest=path)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def url(engine: FakeEngine) -> Iterator[str]:
    adapters = Adapters(engine, read, served_names=("tiny", "tiny-alias"), modules=[(SQL, None)])
    with serving(engine, settings(runtime_adapters=True), adapters=adapters) as url:
        yield url


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with http_client(url) as http:
        yield http


@pytest.mark.parametrize("route", GENERATING)
def test_the_model_of_a_request_may_be_an_adapter(http: httpx.Client, engine: FakeEngine, route: str) -> None:
    for asked, adapter in (("sql", SQL), ("tiny", None), ("tiny-alias", None)):
        answer = http.post(route, json={**GENERATING[route], "model": asked})
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == asked
        assert engine.requests[-1].adapter == adapter


@pytest.mark.parametrize("route", GENERATING)
def test_a_request_without_a_model_is_for_the_model_itself(
    http: httpx.Client, engine: FakeEngine, route: str
) -> None:
    assert http.post(route, json=GENERATING[route]).json()["model"] == "tiny"
    assert engine.requests[-1].adapter is None


@pytest.mark.parametrize("route", [*GENERATING, *WITHOUT_TOKENS])
def test_another_model_is_still_not_found(http: httpx.Client, engine: FakeEngine, route: str) -> None:
    body = {**GENERATING, **WITHOUT_TOKENS}[route]
    answer = http.post(route, json={**body, "model": "poems"})
    assert answer.status_code == 404
    assert "model 'poems' not found; available models: tiny, tiny-alias, sql" in answer.text
    assert not engine.requests


@pytest.mark.parametrize("route", WITHOUT_TOKENS)
def test_routes_that_generate_nothing_take_the_name_too(http: httpx.Client, route: str) -> None:
    assert http.post(route, json={**WITHOUT_TOKENS[route], "model": "sql"}).status_code == 200


def test_every_chunk_of_a_stream_names_the_adapter(url: str) -> None:
    with openai_client(url) as client:
        stream = client.chat.completions.create(
            model="sql", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        assert {chunk.model for chunk in stream} == {"sql"}


def test_the_list_of_models_has_adapters_with_their_parent(url: str) -> None:
    with openai_client(url) as client:
        cards = {each.id: each.model_dump() for each in client.models.list()}
        assert [*cards] == ["tiny", "tiny-alias", "sql"]
        assert cards["sql"]["parent"] == "tiny"
        assert cards["sql"]["root"] == "/a/sql"
        assert cards["tiny"]["parent"] is None
        assert client.models.retrieve("sql").model_dump() == cards["sql"]


def test_an_adapter_is_loaded_used_and_unloaded(http: httpx.Client, engine: FakeEngine) -> None:
    loaded = http.post(LOAD, json={"lora_name": "poems", "lora_path": "/a/poems"})
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'poems' added successfully.")
    chat = {"messages": HI, "model": "poems"}
    assert http.post("/v1/chat/completions", json=chat).json()["model"] == "poems"
    assert engine.requests[-1].adapter == read("poems", "/a/poems")
    unloaded = http.post(UNLOAD, json={"lora_name": "poems", "lora_int_id": 2})
    assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'poems' removed successfully.")
    assert http.post("/v1/chat/completions", json=chat).status_code == 404
    assert engine.adapters == []


@pytest.mark.parametrize(
    "route, body, status, said",
    [
        (LOAD, {"lora_name": "sql", "lora_path": "/a/other"}, 400, "loaded already"),
        (LOAD, {"lora_name": "poems", "lora_path": "/a/missing"}, 400, "/a/missing is no adapter"),
        (LOAD, {"lora_name": "poems", "lora_path": "/a/bad"}, 400, "does not fit the model"),
        (LOAD, {"lora_name": "poems"}, 400, "lora_path"),
        (UNLOAD, {"lora_name": "poems"}, 404, "loaded adapters: sql"),
        (UNLOAD, {}, 400, "lora_name"),
    ],
)
def test_what_cannot_be_done_is_named(
    http: httpx.Client, engine: FakeEngine, route: str, body: dict[str, Any], status: int, said: str
) -> None:
    engine.bad_adapters.add("/a/bad")
    answer = http.post(route, json=body)
    assert answer.status_code == status, answer.text
    assert said in answer.json()["error"]["message"]
    assert [each["id"] for each in http.get("/v1/models").json()["data"]] == ["tiny", "tiny-alias", "sql"]


def test_a_stream_goes_on_while_its_adapter_is_unloaded(url: str, engine: FakeEngine) -> None:
    engine.step_s = 0.05
    with http_client(url) as http, openai_client(url) as client:
        stream = client.chat.completions.create(
            model="sql", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        first = next(stream)
        assert http.post(UNLOAD, json={"lora_name": "sql"}).status_code == 200
        rest = list(stream)
        assert {first.model, *(each.model for each in rest)} == {"sql"}
        assert rest[-1].choices[0].finish_reason == "stop"
        until(lambda: engine.num_open == 0)


@pytest.mark.parametrize("route", [LOAD, UNLOAD])
def test_without_leave_of_the_operator_nothing_is_read(engine: FakeEngine, route: str) -> None:
    with serving(engine) as url, http_client(url) as http:
        answer = http.post(route, json={"lora_name": "sql", "lora_path": "/a/sql"})
        assert answer.status_code == 403
        assert "--allow-runtime-lora-updating" in answer.json()["error"]["message"]


def test_llama_cpps_field_is_refused_with_the_name_to_use(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": HI, "lora": [{"id": 0, "scale": 0.5}]})
    assert answer.status_code == 400
    assert "the adapter's name is the `model`" in answer.json()["error"]["message"]
