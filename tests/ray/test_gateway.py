"""What becomes of requests whose replica ends or refuses. The replicas are scripts; the errors are Ray's.

Planted bugs that these tests have caught: a refusal that is not remembered, so that the same replica is asked for
ever; a call that goes on after its client has left.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from starlette.requests import Request

pytest.importorskip("ray", reason="make ray installs it")

from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve.exceptions import BackPressureError

from faser.ray.calls import AnswerStart, Call
from faser.ray.gateway import Gateway

DIED = ActorDiedError()
EVENTS = ((b"content-type", b"text/event-stream; charset=utf-8"),)
PATH = "/v1/chat/completions"


def start(status: int = 200, *, replica: str = "a", elsewhere: bool = False) -> AnswerStart:
    headers = EVENTS if status == 200 else ((b"content-type", b"application/json"),)
    return AnswerStart(status=status, headers=headers, replica=replica, elsewhere=elsewhere)


class FakeAnswer:
    """As a DeploymentResponseGenerator. script: what comes; an exception is raised, None waits for ever."""

    def __init__(self, script: list[Any]) -> None:
        self._script = list(script)
        self.cancelled = False

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if not self._script:
            raise StopAsyncIteration
        each = self._script.pop(0)
        if each is None:
            await asyncio.Event().wait()
        if isinstance(each, Exception):
            raise each
        return each

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class FakeReplicas:
    """As a DeploymentHandle. scripts: of the answers, in the order in which they are asked for."""

    scripts: list[list[Any]]
    calls: list[Call] = field(default_factory=list)
    answers: list[FakeAnswer] = field(default_factory=list)
    pages: list[tuple[int, bytes]] = field(default_factory=list)

    def options(self, *, method_name: str, stream: bool) -> "FakeReplicas":
        assert (method_name, stream) == ("answer", True)
        return self

    def remote(self, call: Call) -> FakeAnswer:
        self.calls.append(call)
        self.answers.append(FakeAnswer(self.scripts.pop(0)))
        return self.answers[-1]

    def broadcast(self, method: str, call: Call) -> "FakeReplicas":
        assert (method, call.path) == ("whole_answer", "/metrics")
        return self

    async def results_async(self) -> list[tuple[int, bytes]]:
        return self.pages


def ask(replicas: FakeReplicas, *, path: str = PATH, method: str = "POST", **body: Any) -> httpx.Response:
    gateway = Gateway(replicas, max_request_bytes=100)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await (await gateway(Request(scope, receive)))(scope, receive, send)

    async def answered() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://ray") as client:
            return await client.request(method, path, json=body, headers={"x-request-id": "7"})

    return asyncio.run(answered())


def test_an_answer_passes_as_it_is() -> None:
    replicas = FakeReplicas([[start(), b"data: 1\n\n", b"data: 2\n\n"]])
    answer = ask(replicas, prompt="hi")
    assert (answer.status_code, answer.content) == (200, b"data: 1\n\ndata: 2\n\n")
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    (call,) = replicas.calls
    assert (call.method, call.path, json.loads(call.body)) == ("POST", PATH, {"prompt": "hi"})
    assert dict(call.headers)[b"x-request-id"] == b"7"


@pytest.mark.parametrize("lost", [[DIED], [start(), DIED], [ActorUnavailableError("gone", b"0" * 16)]])
def test_a_replica_that_ends_before_the_answer_begins_is_not_noticed(lost: list[Any]) -> None:
    replicas = FakeReplicas([lost, [start(), b"data: 1\n\n"]])
    assert ask(replicas).content == b"data: 1\n\n"


def test_three_lost_replicas_are_enough_for_one_request() -> None:
    replicas = FakeReplicas([[DIED]] * 5)
    answer = ask(replicas)
    assert (answer.status_code, len(replicas.calls)) == (500, 3)
    assert answer.json()["error"]["message"] == "3 replicas have ended while they had this request"


def test_a_chat_that_has_begun_ends_with_an_error_event() -> None:
    replicas = FakeReplicas([[start(), b"data: 1\n\n", DIED]])
    first, error, done = ask(replicas).text.strip().split("\n\n")
    assert (first, done) == ("data: 1", "data: [DONE]")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 500
    assert len(replicas.calls) == 1


def test_a_message_that_has_begun_ends_with_an_error_event() -> None:
    answer = ask(FakeReplicas([[start(), b"event: ping\ndata: {}\n\n", DIED]]), path="/v1/messages")
    kind, data = answer.text.strip().split("\n\n")[1].split("\n")
    assert kind == "event: error"
    assert json.loads(data.removeprefix("data: "))["request_id"] == "7"


def test_a_response_that_has_begun_ends_with_the_next_event() -> None:
    sent = b"event: a\ndata: {}\n\nevent: b\ndata: {}\n\n"
    answer = ask(FakeReplicas([[start(), sent, DIED]]), path="/v1/responses")
    kind, data = answer.text.strip().split("\n\n")[2].split("\n")
    assert kind == "event: error"
    assert json.loads(data.removeprefix("data: "))["sequence_number"] == 2


def test_a_document_that_has_begun_is_cut_off() -> None:
    """Its client must not take what it has for the whole."""
    document = AnswerStart(status=200, headers=(), replica="a", elsewhere=False)
    with pytest.raises(ActorDiedError):
        ask(FakeReplicas([[document, b'{"a', DIED]]))


def test_a_refusal_goes_to_the_other_replicas_and_then_to_the_client() -> None:
    refused = [[start(503, replica=each, elsewhere=True), b'{"error": 1}'] for each in ("a", "b", "a")]
    replicas = FakeReplicas(refused)
    answer = ask(replicas)
    assert (answer.status_code, answer.json()) == (503, {"error": 1})
    assert [set(each.avoid) for each in replicas.calls] == [set(), {"a"}, {"a", "b"}]


def test_another_replica_answers_what_one_refuses() -> None:
    replicas = FakeReplicas([[start(503, elsewhere=True), b"{}"], [start(replica="b"), b"data: 1\n\n"]])
    assert ask(replicas).content == b"data: 1\n\n"


def test_an_error_of_the_request_is_the_answer() -> None:
    replicas = FakeReplicas([[start(400), b'{"error": 2}']])
    assert (ask(replicas).status_code, len(replicas.calls)) == (400, 1)


def test_a_full_gateway_says_when_to_come_back() -> None:
    answer = ask(FakeReplicas([[BackPressureError(num_queued_requests=9, max_queued_requests=9)]]))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


def test_a_body_is_not_read_beyond_what_a_replica_takes() -> None:
    replicas = FakeReplicas([[start(413), b"{}"]])
    assert ask(replicas, prompt="x" * 500).status_code == 413
    assert len(replicas.calls[0].body) > 100


@pytest.mark.parametrize("script", [[None], [start(), b"data: 1\n\n", None]])
def test_the_call_ends_when_its_client_leaves(script: list[Any]) -> None:
    replicas = FakeReplicas([script])
    gateway = Gateway(replicas, max_request_bytes=100)

    async def leave() -> None:
        scope = {"type": "http", "method": "POST", "path": PATH, "query_string": b"", "headers": []}

        unread = [{"type": "http.request", "body": b"{}", "more_body": False}]

        async def receive() -> dict[str, Any]:
            if not unread:
                await asyncio.Event().wait()
            return unread.pop()

        async def send(_: Any) -> None:
            return None

        async def respond() -> None:
            request = Request(scope, receive)
            answer = await gateway(request)
            await answer(scope, receive, send)

        task = asyncio.create_task(respond())
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    assert replicas.answers[0].cancelled


def test_metrics_are_those_of_all_replicas_in_one_page() -> None:
    page = '# HELP n_total n\n# TYPE n_total counter\nn_total{{engine="{}"}} {}.0\n'
    replicas = FakeReplicas([], pages=[(200, page.format("a", 1).encode()), (200, page.format("b", 2).encode())])
    text = ask(replicas, path="/metrics", method="GET").text
    assert text.count("# TYPE n_total counter") == 1
    assert 'n_total{engine="a"} 1.0\nn_total{engine="b"} 2.0\n' in text


def test_metrics_that_a_key_protects_are_refused_as_a_replica_does() -> None:
    replicas = FakeReplicas([], pages=[(401, b'{"error": 3}')] * 2)
    answer = ask(replicas, path="/metrics", method="GET")
    assert (answer.status_code, answer.json()) == (401, {"error": 3})
