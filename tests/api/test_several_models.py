"""The server's own routes, and requests that go to the model that they name; models are fake engines.

Planted bugs that these tests have caught: a request that goes to the first model whatever it names; a stream whose
error comes as a status after its beginning; a body that the model's application does not get; a disconnect that
nobody notices while a model is loaded; an adapter without its model; an adapter that no request can name.
"""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI

from faser.api.dialects.responses_store import ResponseStore
from faser.api.middleware.keys import ApiKeys
from faser.api.requests.adapters import Adapters
from faser.api.several_models import EVENTS_HEADER, create_models_app, model_app
from faser.cli.server import http_server
from faser.config.server import ServerConfig
from faser.engine.client.model_pool import PROCESS_BYTES, ModelPool, PoolLimits
from faser.errors import FaserError, ModelError
from faser.metrics.models import ModelsMetrics
from faser.metrics.server import Metrics
from faser.types.adapter import Adapter
from faser.types.engine import ModelInfo, ProgressCallback
from tests.api.server import http_client, openai_client, running, settings
from tests.fake_engine import FakeEngine, saying
from tests.waiting import PATIENCE_S, until

CHAT = "/v1/chat/completions"
ASKS = {"messages": [{"role": "user", "content": "Hi"}]}


class Engine(FakeEngine):
    """Loaded once its source lets it."""

    def __init__(self, source: "Source") -> None:
        super().__init__(saying(f"I am {source.names[0]}."))
        self.source = source
        self.stopped = False

    async def start(self) -> None:
        assert not self.stopped

    async def wait_ready(self) -> ModelInfo:
        while self.source.held:
            await asyncio.sleep(0.01)
        if self.source.error is not None:
            raise self.source.error
        return self.info

    async def wait_dead(self) -> FaserError:
        await asyncio.Event().wait()
        raise AssertionError

    async def drain(self, timeout_s: float) -> None:
        del timeout_s

    async def stop(self) -> None:
        self.stopped = True


class Source:
    """held: a load does not end. error: with which it ends. adapters: paths by names."""

    def __init__(
        self, names: tuple[str, ...], store: ResponseStore, metrics: Metrics, adapters: dict[str, str]
    ) -> None:
        self.names, self.root = names, f"owner/{names[0]}"
        self.adapters = adapters
        self.held = False
        self.error: FaserError | None = None
        self.engines: list[Engine] = []
        self._store, self._metrics = store, metrics

    async def locate(self, report: ProgressCallback) -> int:
        report("fetching", 3, 4)
        return PROCESS_BYTES

    async def build(self, report: ProgressCallback) -> tuple[Engine, FastAPI]:
        report("loading weights", 43, 100)
        self.engines.append(Engine(self))
        chosen = replace(settings(responses_store_bytes=1 << 20), served_model_names=self.names)
        engine = self.engines[-1]
        served = [(Adapter(name=name, path=path, digest=name), None) for name, path in self.adapters.items()]
        adapters = Adapters(engine, read_none, served_names=self.names, modules=served)
        return engine, model_app(engine, chosen, self._metrics, self._store, adapters)


def read_none(name: str, path: str) -> Adapter:
    raise AssertionError(f"clients may not load {name} from {path}")


class Models:
    """A server with the models a and b. adapters: of b."""

    def __init__(
        self,
        *,
        most: int | None = None,
        load_timeout_s: float = 10 * PATIENCE_S,
        adapters: dict[str, str] | None = None,
    ) -> None:
        store = ResponseStore(1 << 20)
        self.metrics = ModelsMetrics({name: Metrics(model_name=name, max_model_len=4096) for name in "ab"})
        self.a = Source(("a", "a-alias"), store, self.metrics.of["a"], {})
        self.b = Source(("b",), store, self.metrics.of["b"], adapters or {})
        limits = PoolLimits(
            max_models=most,
            memory_bytes=1 << 40,
            load_timeout_s=load_timeout_s,
            idle_timeout_s=None,
            drain_s=PATIENCE_S,
        )
        self.pool = ModelPool([self.a, self.b], limits, self.metrics)
        self._store = store

    @contextmanager
    def serving(self, *, api_keys: tuple[str, ...] = ()) -> Iterator[str]:
        chosen = replace(settings(responses_store_bytes=1 << 20), served_model_names=("a", "a-alias", "b"))
        app = create_models_app(
            self.pool, settings=chosen, metrics=self.metrics, store=self._store, keys=ApiKeys(api_keys)
        )
        asyncio.run(self.pool.wait_ready())
        with running(http_server(app, ServerConfig(disable_uvicorn_access_log=True))) as url:
            yield url


@pytest.fixture
def models() -> Models:
    return Models()


@pytest.fixture
def http(models: Models) -> Iterator[httpx.Client]:
    with models.serving() as url, http_client(url) as client:
        yield client


def status(http: httpx.Client, name: str) -> dict[str, Any]:
    found: dict[str, Any] = http.get(f"/v1/models/{name}").json()["status"]
    return found


def said(answer: httpx.Response) -> str:
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def asking(http: httpx.Client, **fields: Any) -> tuple[threading.Thread, list[httpx.Response]]:
    """A request in a thread, and its answer once it is there."""
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(http.post(CHAT, json={**ASKS, **fields})))
    thread.start()
    return thread, answers


def test_each_request_goes_to_the_model_that_it_names_and_loads_it(http: httpx.Client, models: Models) -> None:
    assert [each["status"]["value"] for each in http.get("/v1/models").json()["data"]] == ["unloaded"] * 3
    for name, answer in (("b", "I am b."), ("a-alias", "I am a."), ("a", "I am a."), (None, "I am a.")):
        got = http.post(CHAT, json={**ASKS, "model": name})
        assert (said(got), got.json()["model"]) == (answer, name or "a")
    assert (len(models.a.engines), len(models.b.engines)) == (1, 1)
    cards = {each["id"]: each for each in http.get("/models").json()["data"]}
    assert cards["b"] == {
        "id": "b",
        "object": "model",
        "created": cards["b"]["created"],
        "owned_by": "faser",
        "root": "owner/b",
        "parent": None,
        "max_model_len": 4096,
        "status": {"value": "loaded"},
    }
    assert list(cards) == ["a", "a-alias", "b"]


def test_an_adapter_of_a_model_is_named_as_a_model_and_loads_it() -> None:
    models = Models(adapters={"tuned": "/adapters/tuned"})
    with models.serving() as url, http_client(url) as http:
        got = http.post(CHAT, json={**ASKS, "model": "tuned"})
        assert (said(got), got.json()["model"]) == ("I am b.", "tuned")
        assert [each.adapter and each.adapter.name for each in models.b.engines[0].requests] == ["tuned"]
        assert not models.a.engines
        cards = {each["id"]: each for each in http.get("/v1/models").json()["data"]}
        assert [(name, card["parent"]) for name, card in cards.items()] == [
            *(("a", None), ("a-alias", None), ("b", None)),
            ("tuned", "b"),
        ]
        assert http.get("/v1/models/tuned").json()["root"] == "/adapters/tuned"
        unknown = http.post(CHAT, json={**ASKS, "model": "other"})
        assert "available models: a, a-alias, b, tuned" in unknown.text


@pytest.mark.parametrize(
    "route, body",
    [
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}),
        ("/invocations", {"prompt": "Hi"}),
        ("/tokenize", {"prompt": "Hi"}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "Hi"}]}),
    ],
)
def test_every_dialect_reaches_the_model(http: httpx.Client, models: Models, route: str, body: Any) -> None:
    answer = http.post(route, json={**body, "model": "b"})
    assert answer.status_code == 200, answer.text
    assert len(models.b.engines) == 1
    assert not models.a.engines
    assert "I am b." in answer.text or "tokens" in answer.text


def test_a_stream_is_told_of_the_load_and_goes_on_with_the_answer(http: httpx.Client, models: Models) -> None:
    models.b.held = True
    lines: list[str] = []
    with http.stream("POST", CHAT, json={**ASKS, "model": "b", "stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["x-accel-buffering"] == "no"
        for line in answer.iter_lines():
            lines += [line] if line else []
            models.b.held = False
    assert lines[0] == ": loading b 43 % (loading weights)"
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[1:-1] if not line.startswith(":")]
    assert "".join(each["choices"][0]["delta"].get("content") or "" for each in chunks) == "I am b."


def test_the_openai_client_sees_only_the_answer(models: Models) -> None:
    models.b.held = True
    with models.serving() as url, openai_client(url) as client:
        threading.Timer(1.5, lambda: setattr(models.b, "held", False)).start()
        stream = client.chat.completions.create(
            model="b", messages=[{"role": "user", "content": "Hi"}], stream=True
        )
        assert "".join(each.choices[0].delta.content or "" for each in stream) == "I am b."
        assert {each.id for each in client.models.list()} == {"a", "a-alias", "b"}


def test_a_client_that_asks_for_them_gets_events_too(http: httpx.Client, models: Models) -> None:
    models.b.held = True
    with http.stream(
        "POST", CHAT, json={**ASKS, "model": "b", "stream": True}, headers={EVENTS_HEADER: "1"}
    ) as answer:
        lines = answer.iter_lines()
        assert [next(lines) for _ in range(3)] == [
            ": loading b 43 % (loading weights)",
            "",
            "event: model_status",
        ]
        assert json.loads(next(lines).removeprefix("data: ")) == {
            "model": "b",
            "event": "model_status",
            "data": {"status": "loading", "progress": {"current": "loading weights", "value": 0.43}},
        }
        models.b.held = False
        answer.close()


@pytest.mark.parametrize(
    "route, body, ending",
    [
        (CHAT, ASKS, 'data: {"error":{"message":"WHY","type":"ServiceUnavailableError","param":null,"code":503}}'),
        ("/v1/messages", {**ASKS, "max_tokens": 9}, '"error":{"type":"overloaded_error","message":"WHY"}'),
        ("/v1/responses", {"input": "Hi"}, '"sequence_number":0,"code":"503","message":"WHY","param":null}'),
    ],
)
def test_a_load_that_fails_after_the_stream_has_begun_is_its_last_event(
    http: httpx.Client, models: Models, route: str, body: Any, ending: str
) -> None:
    models.b.held = True
    with http.stream("POST", route, json={**body, "model": "b", "stream": True}) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith(": loading b")
        models.b.error, models.b.held = ModelError("b.gguf is cut off"), False
        text = "\n".join(lines)
    assert ending.replace("WHY", "model 'b' cannot be loaded: b.gguf is cut off") in text
    assert text.endswith("data: [DONE]\n") == (route == CHAT)
    assert status(http, "b") == {"value": "unloaded", "failed": True, "message": "b.gguf is cut off"}


def test_an_error_of_the_request_after_the_stream_has_begun_is_its_last_event(
    http: httpx.Client, models: Models
) -> None:
    models.b.held = True
    with http.stream("POST", CHAT, json={**ASKS, "model": "b", "stream": True, "temperature": -1}) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith(": loading b")
        models.b.held = False
        events = [json.loads(each[6:]) for each in lines if each.startswith("data: {")]
    assert [each["error"]["param"] for each in events] == ["temperature"]


def test_a_load_that_fails_at_once_has_a_status_and_the_reason(http: httpx.Client, models: Models) -> None:
    models.b.error = ModelError("b.gguf is cut off")
    for stream in (True, False):
        answer = http.post(CHAT, json={**ASKS, "model": "b", "stream": stream})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
        assert answer.json()["error"]["message"] == "model 'b' cannot be loaded: b.gguf is cut off"
    assert said(http.post(CHAT, json={**ASKS, "model": "a"})) == "I am a."


def test_a_plain_request_waits_as_long_as_it_may() -> None:
    models = Models(load_timeout_s=0.2)
    with models.serving() as url, http_client(url) as http:
        models.b.held = True
        answer = http.post(CHAT, json={**ASKS, "model": "b"})
        assert answer.status_code == 503
        assert 1 <= int(answer.headers["retry-after"]) <= 10
        assert answer.json()["error"]["message"] == "model 'b' was not loaded within 0.2 s"
        models.b.held = False
        until(lambda: status(http, "b")["value"] == "loaded")
        assert said(http.post(CHAT, json={**ASKS, "model": "b"})) == "I am b."


def test_a_client_that_leaves_while_its_model_is_loaded_is_no_longer_waited_for(
    http: httpx.Client, models: Models
) -> None:
    models.b.held = True
    for stream in (True, False):
        with pytest.raises(httpx.TimeoutException):
            http.post(CHAT, json={**ASKS, "model": "b", "stream": stream}, timeout=0.3)
        until(lambda: not models.pool.models[1].waiters)
    assert status(http, "b")["value"] == "loading"
    models.b.held = False
    until(lambda: status(http, "b")["value"] == "loaded")
    assert models.pool.models[1].num_users == 0


def test_a_model_with_a_running_request_stays_until_its_end() -> None:
    models = Models(most=1)
    with models.serving() as url, http_client(url) as http:
        http.post(CHAT, json={**ASKS, "model": "a"})
        engine = models.a.engines[0]
        engine.script, engine.step_s = saying("word " * 8), 0.05
        first, answers = asking(http, model="a")
        until(lambda: engine.num_open == 1)
        assert said(http.post(CHAT, json={**ASKS, "model": "b"})) == "I am b."
        first.join()
        assert said(answers[0]) == "word " * 8
        assert engine.stopped
        assert status(http, "a") == {"value": "unloaded"}


def test_models_are_loaded_and_unloaded_by_name(http: httpx.Client, models: Models) -> None:
    assert http.post("/models/load", json={"model": "b"}).json() == {"success": True}
    until(lambda: status(http, "b")["value"] == "loaded")
    assert http.post("/models/unload", json={"model": "b"}).json() == {"success": True}
    assert status(http, "b") == {"value": "unloaded"}
    assert models.b.engines[0].stopped
    for route in ("/models/load", "/models/unload"):
        refused = http.post(route, json={"model": "c"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "model")


def test_a_stored_response_is_there_when_its_model_is_not(http: httpx.Client) -> None:
    kept = http.post("/v1/responses", json={"model": "b", "input": "Hi", "store": True}).json()
    http.post("/models/unload", json={"model": "b"})
    assert http.get(f"/v1/responses/{kept['id']}").json()["output"] == kept["output"]
    following = {"model": "a", "input": "And?", "previous_response_id": kept["id"]}
    assert http.post("/v1/responses", json=following).status_code == 200


def test_what_names_no_model_is_refused_in_words(http: httpx.Client) -> None:
    unknown = http.post(CHAT, json={**ASKS, "model": "c"})
    assert unknown.status_code == 404
    assert unknown.json()["error"]["message"] == "model 'c' not found; available models: a, a-alias, b"
    for body, message in (
        (b'{"model": "a"', "the body is not JSON"),
        (b'{"model": 5}', "model is not a string"),
        (b"[]", "the body is []; it must be a JSON object"),
        (b"[" * 100_000, "nested deeper"),
    ):
        refused = http.post(CHAT, content=body, headers={"Content-Type": "application/json"})
        assert refused.status_code == 400, body[:20]
        assert message in refused.json()["error"]["message"]
    assert http.post(CHAT, content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 415


def test_unknown_routes_and_methods_are_named_whether_or_not_a_model_is_loaded(http: httpx.Client) -> None:
    assert "GET /v1/models" in http.get("/nothing").json()["error"]["message"]
    http.post(CHAT, json={**ASKS, "model": "b"})
    for method, route, code in (("GET", "/nothing", 404), ("POST", "/nothing", 404), ("GET", CHAT, 405)):
        answer = http.request(method, route, json={"model": "b"})
        assert answer.status_code == code
        assert code == 405 or "POST /v1/chat/completions" in answer.json()["error"]["message"]
    paths = http.get("/openapi.json").json()["paths"]
    assert {CHAT, "/v1/models/load", "/v1/models", "/health"} <= set(paths)


def test_a_key_is_asked_for_once_and_on_every_route(models: Models) -> None:
    with models.serving(api_keys=("secret",)) as url, http_client(url) as http:
        for route in (CHAT, "/models/load", "/models/unload", "/v1/models"):
            method = "GET" if route == "/v1/models" else "POST"
            assert http.request(method, route, json={**ASKS, "model": "b"}).status_code == 401
        assert not models.b.engines
        with pytest.raises(openai.AuthenticationError), openai_client(url, "wrong") as client:
            client.models.list()
        with openai_client(url, "secret") as client:
            answer = client.chat.completions.create(model="b", messages=[{"role": "user", "content": "Hi"}])
        assert answer.choices[0].message.content == "I am b."


def test_probes_metrics_and_load_are_those_of_the_server(http: httpx.Client, models: Models) -> None:
    assert http.get("/health").json() == {"state": "ready"}
    assert http.get("/ready").json() == {"ready": True}
    http.post(CHAT, json={**ASKS, "model": "b"})
    text = http.get("/metrics").text
    for line in (
        "faser_models_loaded 1.0",
        'faser_model_loads_total{model_name="b",outcome="loaded"} 1.0',
        'faser_model_loads_total{model_name="a",outcome="loaded"} 0.0',
        'faser_model_load_seconds_count{model_name="b"} 1.0',
        'faser_engine_state{engine="0",model_name="a",state="loading"} 0.0',
    ):
        assert line in text.splitlines()
    models.b.engines[0].step_s = 0.5
    thread, _ = asking(http, model="b")
    until(lambda: http.get("/load").json() == {"server_load": 1})
    thread.join()
    http.post("/models/unload", json={"model": "b"})
    assert "faser_models_loaded 0.0" in http.get("/metrics").text
    assert http.get("/health").status_code == 200


def test_other_models_answer_while_one_is_loaded(http: httpx.Client, models: Models) -> None:
    models.b.held = True
    thread, answers = asking(http, model="b")
    until(lambda: status(http, "b")["value"] == "loading")
    assert said(http.post(CHAT, json={**ASKS, "model": "a"})) == "I am a."
    assert not answers
    models.b.held = False
    thread.join()
    assert said(answers[0]) == "I am b."


def test_the_live_view_shows_a_model_by_name_or_the_one_used_last(http: httpx.Client) -> None:
    http.post(CHAT, json={**ASKS, "model": "b"})
    for query, name, loaded in (("", "b", True), ("?model=a-alias", "a", False)):
        with http.stream("GET", f"/live{query}") as answer:
            first = next(answer.iter_lines())
        server = json.loads(first.removeprefix("data: "))["server"]
        assert (server["model"], server["engine"] is not None) == (name, loaded)
    assert http.get("/live?model=c").status_code == 404
