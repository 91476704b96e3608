"""The routes other than completions and chats, and the headers of every answer."""

from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from faser.config.server import ServerConfig
from faser.types.engine import EngineState
from tests.api.server import http_client, serving, settings
from tests.fake_engine import END, FakeEngine
from tests.waiting import until

TEXT = "/v1/completions"


def test_every_served_name_has_a_card(client: openai.OpenAI, http: httpx.Client) -> None:
    assert [card.id for card in client.models.list().data] == ["tiny", "tiny-alias"]
    assert client.models.retrieve("tiny-alias").owned_by == "faser"
    card = http.get("/v1/models").json()["data"][1]
    created = card.pop("created")
    assert isinstance(created, int)
    assert card == {
        "id": "tiny-alias",
        "object": "model",
        "owned_by": "faser",
        "root": "tiny",
        "parent": None,
        "max_model_len": 4096,
    }


def test_a_card_has_the_model_from_which_load_generators_take_the_tokenizer(engine: FakeEngine) -> None:
    with serving(engine, replace(settings(), model="org/tiny-model")) as url, http_client(url) as client:
        cards = client.get("/v1/models").json()["data"]
    assert [(card["id"], card["root"]) for card in cards] == [
        ("tiny", "org/tiny-model"),
        ("tiny-alias", "org/tiny-model"),
    ]


@pytest.mark.parametrize("name", ["gpt-9", "org/model"])
def test_unknown_card_is_a_404(client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.NotFoundError, match=name):
        client.models.retrieve(name)


@pytest.mark.parametrize(
    "state, healthy, ready",
    [
        (EngineState.LOADING, 503, 503),
        (EngineState.WARMING, 503, 503),
        (EngineState.READY, 200, 200),
        (EngineState.RESTARTING, 200, 503),
        (EngineState.DRAINING, 200, 503),
        (EngineState.DEAD, 503, 503),
    ],
)
def test_health_is_about_a_restart_from_outside_and_ready_about_requests(
    http: httpx.Client, engine: FakeEngine, state: EngineState, healthy: int, ready: int
) -> None:
    engine.state = state
    for probe in (http.get("/health"), http.get("/ping"), http.post("/ping")):
        assert (probe.status_code, probe.json()) == (healthy, {"state": state.value})
    answer = http.get("/ready")
    assert answer.status_code == ready
    assert answer.json() == ({"ready": True} if ready == 200 else {"ready": False, "reason": state.value})


def test_probes_say_in_words_what_happened(http: httpx.Client, engine: FakeEngine) -> None:
    engine.state, engine.state_reason = EngineState.RESTARTING, "the engine died (signal 9)"
    happened = {"message": "the engine died (signal 9)"}
    assert http.get("/ready").json() == {"ready": False, "reason": "restarting", **happened}
    assert http.get("/health").json() == {"state": "restarting", **happened}


def test_models_are_listed_while_the_engine_is_restarted(http: httpx.Client, engine: FakeEngine) -> None:
    engine.state = EngineState.RESTARTING
    assert http.get("/v1/models").status_code == 200


def test_probes_answer_before_the_model_is_loaded(http: httpx.Client, engine: FakeEngine) -> None:
    engine.state, engine.loaded = EngineState.LOADING, False
    assert http.get("/health").status_code == 503
    assert http.get("/metrics").status_code == 200
    assert http.get("/version").json() == {"version": "1.2.3"}
    assert http.get("/v1/models").status_code == 503
    assert http.post("/tokenize", json={"prompt": "hi"}).status_code == 503


def test_metrics_are_prometheus_text(http: httpx.Client) -> None:
    answer = http.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in answer.text


def test_openapi_describes_the_bodies(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    schema = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "messages" in schema["required"]
    assert "enabled" in str(schema["properties"]["speculative"])


def test_openapi_says_which_statuses_and_types_there_are(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    assert "422" not in str(paths)
    for route in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        assert {"400", "404", "415"} <= set(paths[route]["post"]["responses"])
    assert list(paths["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]
    assert "content" not in paths["/health"]["get"]["responses"]["503"]


def test_documents_for_people_are_served(http: httpx.Client) -> None:
    assert "swagger" in http.get("/docs").text
    assert http.get("/docs/").status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/", "/llm/v1/models", "/llm/v1/models/"])
def test_a_route_is_found_with_and_without_the_proxys_path(path: str) -> None:
    config = ServerConfig(root_path="/llm", disable_uvicorn_access_log=True)
    with serving(FakeEngine(), config=config) as url:
        assert httpx.get(url + path).json()["object"] == "list"
        assert httpx.get(url + "/llmv1/models").status_code == 404


def test_a_client_whose_base_url_has_no_v1_gets_openais_answers() -> None:
    with serving(FakeEngine(), settings(api_keys=("k",))) as url:
        client = openai.OpenAI(base_url=url, api_key="k", max_retries=0)
        assert [card.id for card in client.models.list().data] == ["tiny", "tiny-alias"]
        assert client.models.retrieve("tiny-alias").id == "tiny-alias"
        asked: Any = [{"role": "user", "content": "hi"}]
        assert client.chat.completions.create(model="tiny", messages=asked).object == "chat.completion"
        assert client.completions.create(model="tiny", prompt="hi").object == "text_completion"
        assert client.responses.create(model="tiny", input="hi").object == "response"
        for path, status in (("/v1/health", 200), ("/models", 401), ("/chat/completions", 401)):
            assert httpx.get(url + path).status_code == status, path


@pytest.mark.parametrize(
    "method, path", [("POST", "/completion"), ("POST", "/embeddings"), ("POST", "/infill"), ("GET", "/props")]
)
def test_a_route_of_llama_cpps_own_is_a_404_that_names_those_there_are(
    http: httpx.Client, method: str, path: str
) -> None:
    answer = http.request(method, path, json={} if method == "POST" else None)
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert message.startswith(f"{method} {path} not found; available routes: ")
    assert "POST /v1/completions" in message


def test_the_proxys_path_opens_no_route_that_needs_a_key() -> None:
    config = ServerConfig(root_path="/llm", disable_uvicorn_access_log=True)
    with serving(FakeEngine(), settings(api_keys=("k",)), config) as url:
        for path, status in (("/llm/health", 200), ("/llm/llm/health", 401), ("/llm/v1/models", 401)):
            assert httpx.get(url + path).status_code == status, path


def test_tokenize_and_detokenize_are_inverse(http: httpx.Client) -> None:
    counted = http.post("/tokenize", json={"prompt": "né<|end|>", "return_token_strs": True}).json()
    assert counted == {
        "count": 4,
        "max_model_len": 4096,
        "tokens": [110, 0xC3, 0xA9, END],
        "token_strs": ["n", "Ã", "©", "<|end|>"],  # as the vocabulary spells them
    }
    assert http.post("/detokenize", json={"tokens": counted["tokens"]}).json() == {"prompt": "né<|end|>"}


@pytest.mark.parametrize(
    "body, param",
    [
        ({"prompt": "x" * 10_000_000}, "prompt"),
        ({"messages": [{"role": "user", "content": "x" * 10_000_000}]}, "messages"),
    ],
)
def test_tokenize_refuses_what_can_fit_no_context(http: httpx.Client, body: dict[str, object], param: str) -> None:
    answer = http.post("/tokenize", json=body)
    failure = answer.json()["error"]
    assert (answer.status_code, failure["param"]) == (400, param)
    assert failure["message"].startswith(f"{param} has at least 14285")
    assert failure["message"].endswith("tokens; it must not exceed the model's context, 4096 tokens")


def test_tokenize_counts_texts_somewhat_longer_than_the_context(http: httpx.Client) -> None:
    assert http.post("/tokenize", json={"prompt": "x" * 6000}).json()["count"] == 6000


def test_detokenize_refuses_more_ids_than_tokenize_gives(http: httpx.Client) -> None:
    answer = http.post("/detokenize", json={"tokens": [65] * 30_000})
    failure = answer.json()["error"]
    assert (answer.status_code, failure["param"]) == (400, "tokens")
    assert failure["message"] == "tokens has 30000 ids; at most 28672 are allowed"
    assert http.post("/detokenize", json={"tokens": [65] * 28_000}).json() == {"prompt": "A" * 28_000}


def test_messages_are_tokenised_as_chats_are(http: httpx.Client, engine: FakeEngine) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tokens = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    http.post("/v1/chat/completions", json={"messages": messages})
    assert tuple(tokens) == engine.requests[0].prompt_token_ids


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}])
def test_tokenize_wants_a_prompt_or_messages(http: httpx.Client, body: dict[str, object]) -> None:
    assert http.post("/tokenize", json=body).status_code == 400


@pytest.mark.parametrize("token_id", [-1, 257])
def test_detokenize_refuses_ids_outside_the_vocabulary(http: httpx.Client, token_id: int) -> None:
    answer = http.post("/detokenize", json={"tokens": [65, token_id]})
    assert answer.json()["error"]["message"] == f"tokens.1 is {token_id}; it must be at least 0 and at most 256"


def test_request_id_of_the_header_is_echoed_and_used(http: httpx.Client, engine: FakeEngine) -> None:
    answer = http.post(TEXT, json={"prompt": "hi"}, headers={"X-Request-Id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.json()["id"] == "cmpl-mine-1"
    assert engine.requests[0].request_id.startswith("mine-1")


def test_request_id_of_the_body_wins(http: httpx.Client) -> None:
    body = {"prompt": "hi", "request_id": "from-body"}
    answer = http.post(TEXT, json=body, headers={"X-Request-Id": "from-header"})
    assert answer.headers["x-request-id"] == "from-body"


@pytest.mark.parametrize("route", ["/health", "/v1/models", "/nowhere"])
def test_every_answer_has_a_request_id(http: httpx.Client, route: str) -> None:
    first, second = http.get(route).headers["x-request-id"], http.get(route).headers["x-request-id"]
    assert first
    assert first != second
    assert http.get(route, headers={"X-Request-Id": "mine"}).headers["x-request-id"] == "mine"


def test_same_request_id_twice_makes_two_requests_for_the_engine(http: httpx.Client, engine: FakeEngine) -> None:
    for _ in range(2):
        http.post(TEXT, json={"prompt": ["a", "b"]}, headers={"X-Request-Id": "same"})
    assert len({request.request_id for request in engine.requests}) == 4


def test_unusable_request_id_is_a_400(http: httpx.Client) -> None:
    answer = http.get("/health", headers={"X-Request-Id": "x" * 257})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "X-Request-Id"


@pytest.mark.parametrize(
    "body, kind",
    [({"messages": [{"role": "user", "content": "a"}]}, "chat.completion"), ({"prompt": "a"}, "text_completion")],
)
def test_invocations_are_what_their_fields_say(http: httpx.Client, body: dict[str, object], kind: str) -> None:
    assert http.post("/invocations", json=body).json()["object"] == kind


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": []}])
def test_an_invocation_is_one_thing(http: httpx.Client, body: dict[str, object]) -> None:
    answer = http.post("/invocations", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


def test_the_load_is_the_number_of_requests_that_generate(http: httpx.Client, engine: FakeEngine) -> None:
    engine.step_s = 0.05
    with http_client(str(http.base_url)) as other:
        assert other.get("/load").json() == {"server_load": 0}
        with http.stream("POST", TEXT, json={"prompt": "hi", "stream": True}) as answer:
            next(answer.iter_lines())
            assert other.get("/load").json() == {"server_load": 1}
    until(lambda: http.get("/load").json() == {"server_load": 0})
