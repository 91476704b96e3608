"""Requests are prepared off the step loop, in turns of their tenants; aborted ones leave at once."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

import pytest

from faser.engine.contract.messages import Abort
from faser.engine.preparation import WAIT_S, Preparation, Prepared
from faser.engine.structure.trials import COSTLY, QUICK, Budget, TrialUnwantedError
from faser.errors import GrammarCostError, OverloadError, RequestError
from faser.types.request import Request
from faser.types.sampling import SamplingParams
from tests.waiting import PATIENCE_S


def request(name: str, tenant: str = "") -> Request:
    return Request(request_id=name, prompt_token_ids=(1,), sampling=SamplingParams(), tenant=tenant)


class Grammars:
    """Prepares requests: those named "costly…" need the larger budget; hold: which of them wait to be let go."""

    def __init__(self, *, hold: Callable[[str], bool] = lambda _: True) -> None:
        self.messages: SimpleQueue[Prepared] = SimpleQueue()
        self.begun: SimpleQueue[tuple[str, float]] = SimpleQueue()
        self.now_s = 0.0
        self._hold = hold
        self._may_end = threading.Semaphore(0)
        self.preparation = Preparation(self._prepare, self.messages.put, lambda: self.now_s)

    def next_begun(self) -> str:
        return self.begun.get(timeout=PATIENCE_S)[0]

    def next_prepared(self) -> Prepared:
        found = self.messages.get(timeout=PATIENCE_S)
        self.preparation.end(found.request)
        return found

    def let_go(self, count: int = 1) -> None:
        self._may_end.release(count)

    def _prepare(self, asked: Request, budget: Budget) -> None:
        name = asked.request_id
        if name.startswith("costly") and budget.cpu_s < COSTLY.cpu_s:
            raise GrammarCostError("more than the quick line has")
        self.begun.put((name, budget.cpu_s))
        while self._hold(name) and not self._may_end.acquire(timeout=0.01):
            if not budget.is_wanted():
                raise TrialUnwantedError


@pytest.fixture
def grammars() -> Grammars:
    return Grammars()


def test_a_request_comes_back_from_another_thread() -> None:
    messages: SimpleQueue[Prepared] = SimpleQueue()
    threads: list[threading.Thread] = []
    preparation = Preparation(lambda *_: threads.append(threading.current_thread()), messages.put)
    preparation.begin(request("a"))
    assert messages.get(timeout=PATIENCE_S) == Prepared(request("a"), None)
    assert threads != [threading.current_thread()]
    assert preparation.end(request("a")) == []


@pytest.mark.parametrize(
    "error, message",
    [
        (RequestError("no such key", param="x"), "no such key"),
        (KeyError("a"), "cannot be prepared: KeyError: 'a'"),
        (GrammarCostError("beyond the larger budget too"), "beyond the larger budget too"),
    ],
)
def test_a_failure_is_the_requests_own(error: Exception, message: str) -> None:
    messages: SimpleQueue[Prepared] = SimpleQueue()

    def fail(asked: Request, _: Budget) -> None:
        if asked.request_id == "bad":
            raise error

    preparation = Preparation(fail, messages.put)
    for name in ("bad", "good"):
        preparation.begin(request(name))
    found = {each.request.request_id: each.error for each in (messages.get(timeout=PATIENCE_S) for _ in range(2))}
    assert found["good"] is None
    assert message in str(found["bad"])


def test_costly_grammars_of_many_tenants_never_take_the_quick_thread() -> None:
    grammars = Grammars(hold=lambda name: name.startswith("costly"))
    for i in range(100):
        grammars.preparation.begin(request(f"costly {i}", f"tenant {i}"))
    assert grammars.begun.get(timeout=PATIENCE_S) == ("costly 0", COSTLY.cpu_s)
    for name in ("quick", "quick too"):
        grammars.preparation.begin(request(name, "bystander"))
        assert grammars.begun.get(timeout=PATIENCE_S) == (name, QUICK.cpu_s)
        assert grammars.next_prepared() == Prepared(request(name, "bystander"), None)
    grammars.let_go()
    assert grammars.next_prepared().request.request_id == "costly 0"
    assert grammars.begun.get(timeout=PATIENCE_S) == ("costly 1", COSTLY.cpu_s)


def test_tenants_take_turns_with_one_grammar_in_work_each(grammars: Grammars) -> None:
    for i in range(10):
        grammars.preparation.begin(request(f"a{i}", "a"))
    assert grammars.next_begun() == "a0"
    grammars.preparation.begin(request("b0", "b"))
    assert grammars.next_begun() == "b0"  # by the other thread, which left a's to wait
    grammars.preparation.begin(request("c0", "c"))
    grammars.preparation.begin(request("b1", "b"))
    order = []
    for _ in range(11):
        grammars.let_go()
        order.append(grammars.next_prepared().request.request_id)
    assert order.index("c0") <= 3
    assert order.index("b1") <= 5


def test_tenants_alternate_in_one_thread() -> None:
    opened = threading.Event()
    grammars = Grammars(hold=lambda name: name.startswith("costly") or (name == "gate" and not opened.is_set()))
    for name in ("costly", "gate"):  # one for each thread
        grammars.preparation.begin(request(name, name))
        assert grammars.next_begun() == name
    for name in ("a0", "a1", "a2", "b0", "b1", "c0"):
        grammars.preparation.begin(request(name, name[0]))
    opened.set()
    assert [grammars.next_begun() for _ in range(6)] == ["a0", "b0", "c0", "a1", "b1", "a2"]


def test_a_whole_request_that_waits_is_dropped_when_it_is_aborted(grammars: Grammars) -> None:
    for name in ("a", "b", "c"):
        grammars.preparation.begin(request(name))
    assert grammars.next_begun() == "a"
    assert grammars.preparation.abort(Abort("b"))
    assert not grammars.preparation.abort(Abort("b"))  # it is gone
    grammars.let_go(2)
    assert [grammars.next_prepared().request.request_id for _ in range(2)] == ["a", "c"]
    assert grammars.messages.empty()


@pytest.mark.parametrize("name", ["quick", "costly"])
def test_a_whole_request_is_dropped_in_work_too(name: str, grammars: Grammars) -> None:
    grammars.preparation.begin(request(name))
    assert grammars.next_begun() == name
    assert grammars.preparation.abort(Abort(name))
    assert grammars.next_prepared().error is not None


def test_a_request_that_waits_too_long_is_told_when_to_try_again(grammars: Grammars) -> None:
    for name in ("a", "b"):
        grammars.preparation.begin(request(name))
    assert grammars.next_begun() == "a"
    grammars.now_s = WAIT_S + 0.1
    for _ in range(2):
        error = grammars.next_prepared().error
        assert isinstance(error, OverloadError)
        assert error.retry_after_s == WAIT_S
        assert f"not compiled within {WAIT_S:.0f} s" in str(error)


def test_aborts_of_samples_are_kept_until_the_request_is_prepared(grammars: Grammars) -> None:
    grammars.preparation.begin(request("a"))
    assert grammars.next_begun() == "a"
    assert grammars.preparation.abort(Abort("a", 1))
    assert not grammars.preparation.abort(Abort("b"))
    grammars.let_go()
    assert grammars.messages.get(timeout=PATIENCE_S) == Prepared(request("a"), None)
    assert grammars.preparation.end(request("a")) == [Abort("a", 1)]
    assert not grammars.preparation.abort(Abort("a"))


def test_what_waits_is_dropped_at_the_end(grammars: Grammars) -> None:
    for i in range(20):
        grammars.preparation.begin(request(str(i), f"tenant {i % 2}"))
    assert {grammars.next_begun() for _ in range(2)} == {"0", "1"}
    grammars.preparation.close()
    assert {grammars.next_prepared().request.request_id for _ in range(2)} == {"0", "1"}
    assert grammars.messages.empty()
    assert grammars.begun.empty()


def test_closing_waits_for_the_threads() -> None:
    """A thread that ended later would free the engine's tensors while the interpreter ends."""
    before = set(threading.enumerate())
    grammars = Grammars()
    grammars.preparation.begin(request("costly"))
    grammars.next_begun()
    started = set(threading.enumerate()) - before
    assert len(started) == 2
    grammars.preparation.close()
    assert not started & set(threading.enumerate())
