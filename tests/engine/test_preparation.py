"""Requests are prepared off the step loop; what is aborted meanwhile is not forgotten."""

import threading
from queue import SimpleQueue

import pytest

from faser.engine.contract.messages import Abort
from faser.engine.preparation import Preparation, Prepared
from faser.errors import RequestError
from faser.types import Request, SamplingParams


def request(name: str) -> Request:
    return Request(request_id=name, prompt_token_ids=(1,), sampling=SamplingParams())


def test_a_request_comes_back_from_another_thread() -> None:
    messages: SimpleQueue[Prepared] = SimpleQueue()
    threads: list[threading.Thread] = []
    preparation = Preparation(lambda _: threads.append(threading.current_thread()), messages.put)
    preparation.begin(request("a"))
    assert messages.get(timeout=10) == Prepared(request("a"), None)
    assert threads != [threading.current_thread()]
    assert preparation.end(request("a")) == []


@pytest.mark.parametrize(
    "error, message",
    [
        (RequestError("no such key", param="x"), "no such key"),
        (KeyError("a"), "cannot be prepared: KeyError: 'a'"),
    ],
)
def test_a_failure_is_the_requests_own(error: Exception, message: str) -> None:
    messages: SimpleQueue[Prepared] = SimpleQueue()

    def fail(asked: Request) -> None:
        if asked.request_id == "bad":
            raise error

    preparation = Preparation(fail, messages.put)
    for name in ("bad", "good"):
        preparation.begin(request(name))
    found = {each.request.request_id: each.error for each in (messages.get(timeout=10) for _ in range(2))}
    assert found["good"] is None
    assert message in str(found["bad"])


def test_aborts_are_kept_until_the_request_is_prepared() -> None:
    messages: SimpleQueue[Prepared] = SimpleQueue()
    going_on = threading.Event()
    preparation = Preparation(lambda _: assert_set(going_on), messages.put)
    preparation.begin(request("a"))
    assert preparation.abort(Abort("a", 1))
    assert preparation.abort(Abort("a"))
    assert not preparation.abort(Abort("b"))
    going_on.set()
    messages.get(timeout=10)
    assert preparation.end(request("a")) == [Abort("a", 1), Abort("a")]
    assert not preparation.abort(Abort("a"))


def test_what_waits_is_dropped_at_the_end() -> None:
    messages: SimpleQueue[Prepared] = SimpleQueue()
    begun, going_on = threading.Semaphore(0), threading.Event()

    def prepare(_: Request) -> None:
        begun.release()
        assert_set(going_on)

    preparation = Preparation(prepare, messages.put)
    for i in range(20):
        preparation.begin(request(str(i)))
    assert all(begun.acquire(timeout=10) for _ in range(2))
    preparation.close()
    going_on.set()
    assert {messages.get(timeout=10).request.request_id for _ in range(2)} == {"0", "1"}
    assert messages.empty()


def assert_set(event: threading.Event) -> None:
    assert event.wait(10)
