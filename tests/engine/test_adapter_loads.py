"""Requests wait for their adapters off the step loop, and come to an end whatever becomes of these.

The worker's own code takes the messages; only files, the model and the clock are fakes.

Planted bugs that these tests have caught: requests added though their load has failed; an adapter counted as
loaded though it has failed; a second load of one that is being read, or is queued; new targets that never reach a
request that waits.
"""

import random
import socket
import threading
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest

from faser.engine.adapter_loads import AdapterLoads, AdapterRead
from faser.engine.contract.messages import (
    Abort,
    AdapterLoaded,
    DropAdapter,
    FromEngine,
    LoadAdapter,
    Reclassify,
    Rejected,
    Submit,
    ToEngine,
)
from faser.engine.engine import Engine
from faser.engine.preparation import WAIT_S, Preparation
from faser.engine.worker import StatsReport, _Inbox, _reject, _take_messages
from faser.errors import ModelError, RequestError
from faser.types.adapter import Adapter
from faser.types.request import Request
from tests.engine.driving import Driver, Sample, adapter, request
from tests.fakes import ScriptedExecutor
from tests.waiting import PATIENCE_S

_decoder = msgspec.msgpack.Decoder(FromEngine)


class Files:
    """Adapters on disk. holds: reading takes until let_go. Those named "bad…" are damaged, "torn…" a bug's."""

    def __init__(self, executor: ScriptedExecutor) -> None:
        self.holds = False
        self.read: list[str] = []
        self._executor = executor
        self._may_end = threading.Semaphore(0)

    def load_adapter(self, adapter: Adapter) -> None:
        self.read.append(adapter.name)
        if self.holds:
            assert self._may_end.acquire(timeout=PATIENCE_S)
        if adapter.name.startswith("bad"):
            raise ModelError(f"{adapter.path} has no lora_B")
        if adapter.name.startswith("torn"):
            raise ZeroDivisionError("zero")
        self._executor.load_adapter(adapter)

    def drop_adapter(self, digest: str) -> None:
        self._executor.drop_adapter(digest)

    def let_go(self) -> None:
        self._may_end.release()


class Server:
    """The worker's loop, one turn at a time."""

    def __init__(self, *, max_loras: int = 2, max_loaded: int = 3, **driver: Any) -> None:
        self.driver = Driver(max_loras=max_loras, **driver)
        self.files = Files(self.driver.executor)
        self.engine = Engine(self.driver.scheduler, self.driver.executor, adapters=self.files)
        self.inbox: _Inbox = _Inbox()
        self.read: SimpleQueue[AdapterRead] = SimpleQueue()  # that `wait` takes in, so that no turn is too quick
        self.now_s = 0.0
        self.loads = AdapterLoads(self.engine, self.read.put, max_loaded=max_loaded, now=lambda: self.now_s)
        self.rejected: dict[str, Rejected] = {}
        self.loaded: list[AdapterLoaded] = []
        self.ended: dict[str, int] = {}  # samples that have ended, by request
        self._preparation = Preparation(self.engine.prepare, self.inbox.put)
        self._stats = StatsReport(self.engine)
        self._front, self._back = socket.socketpair()

    def send(self, *messages: ToEngine) -> None:
        for each in messages:
            if isinstance(each, Submit):
                self.driver.samples |= {
                    (each.request.request_id, index): Sample() for index in range(each.request.sampling.n)
                }
            self.inbox.put(each)
        self.turn()

    def turn(self) -> None:
        """Take the messages that are there, and make a step."""
        if not self.inbox.empty():
            assert _take_messages(self.engine, self.inbox, self._preparation, self.loads, self._stats, self._back)
        for delta in self.engine.step():
            self.driver.samples[delta.request_id, delta.index].hear(delta)
            self.ended[delta.request_id] = self.ended.get(delta.request_id, 0) + (delta.finish_reason is not None)
        for late, error in self.loads.rest():
            _reject(self._back, late, error)
        self.driver.scheduler.check_invariants()
        self._hear()

    def wait(self) -> None:
        """Wait until an adapter has been read, and take in what came of it."""
        self.inbox.put(self.read.get(timeout=PATIENCE_S))
        self.turn()

    def close(self) -> None:
        self.loads.close()
        self._preparation.close()
        self._front.close()
        self._back.close()

    def _hear(self) -> None:
        self._front.setblocking(False)
        try:
            data = self._front.recv(1 << 20)
        except BlockingIOError:
            return
        while data:
            size = int.from_bytes(data[:4], "little")
            message, data = _decoder.decode(data[4 : 4 + size]), data[4 + size :]
            if isinstance(message, Rejected):
                assert message.request_id not in self.rejected
                self.rejected[message.request_id] = message
            else:
                assert isinstance(message, AdapterLoaded)
                self.loaded.append(message)


def asking(name: str, adapter_name: str | None, **sampling: Any) -> Request:
    chosen = None if adapter_name is None else adapter(adapter_name)
    return replace(request(name, [1, 2], **sampling), adapter=chosen, tenant=str(sampling.get("tenant", "")))


@pytest.fixture
def server() -> Any:
    found = Server()
    yield found
    found.close()


def finish(server: Server) -> None:
    for _ in range(500):
        if not server.engine.has_work():
            return
        server.turn()
    raise AssertionError("it does not end")


def test_a_load_in_progress_serves_all_its_requests_and_stops_no_others(server: Server) -> None:
    server.files.holds = True
    asked = [asking("a", "x"), asking("b", "x"), asking("base", None)]
    server.send(*map(Submit, asked))
    finish(server)
    assert server.ended == {"base": 1}, "the base model's request waits for no adapter"
    stats = server.loads.add_to(server.engine.stats())
    assert (stats.waiting_adapters, stats.num_waiting) == (("x",), 2)
    server.files.let_go()
    server.wait()
    finish(server)
    assert server.files.read == ["x"]
    server.driver.check(*asked)


@pytest.mark.parametrize(
    "name, reason",
    [
        ("bad", "bad has no lora_B"),
        ("torn", "the adapter 'torn' cannot be loaded: ZeroDivisionError: zero"),
    ],
)
def test_all_requests_of_a_load_that_fails_get_its_reason(server: Server, name: str, reason: str) -> None:
    server.send(Submit(asking("a", name)), Submit(asking("b", name, n=2)), LoadAdapter(adapter(name)))
    server.wait()
    assert {each: server.rejected[each].message for each in server.rejected} == {"a": reason, "b": reason}
    assert server.loaded == [AdapterLoaded(adapter(name).digest, reason)]
    assert not server.engine.has_work()
    server.send(Submit(asking("c", name)))
    server.wait()
    assert server.files.read == [name, name], "the files may have been repaired"


def test_an_adapter_is_loaded_ahead_of_requests(server: Server) -> None:
    server.send(LoadAdapter(adapter("x")))
    server.wait()
    server.send(LoadAdapter(adapter("x")))
    assert server.loaded == [AdapterLoaded(adapter("x").digest, None)] * 2
    server.send(Submit(asked := asking("a", "x")))
    finish(server)
    assert server.files.read == ["x"]
    server.driver.check(asked)


def test_the_least_recently_used_adapter_leaves_and_those_in_use_stay(server: Server) -> None:
    server.send(Submit(asking("a", "v", max_tokens=60)))
    server.wait()
    for name, is_new in (("w", True), ("x", True), ("w", False), ("y", True)):
        server.send(LoadAdapter(adapter(name)))
        if is_new:
            server.wait()
    assert server.driver.executor.loaded == {adapter(name).digest for name in "vwy"}
    finish(server)


def test_requests_wait_for_room_in_memory_and_not_for_ever() -> None:
    server = Server(max_loaded=1, max_loras=1)
    server.send(Submit(first := asking("a", "x", max_tokens=50)))
    server.wait()
    server.send(Submit(second := asking("b", "y")))
    server.turn()
    assert server.files.read == ["x"]
    server.now_s = WAIT_S + 1
    server.turn()
    assert server.rejected["b"].retry_after_s == WAIT_S
    assert "raise --max-cpu-loras" in server.rejected["b"].message
    server.send(Submit(third := replace(second, request_id="c")))
    finish(server)
    server.wait()
    finish(server)
    server.driver.check(first, third)
    server.close()


def test_an_adapter_that_nobody_wants_leaves_when_its_last_request_has_ended(server: Server) -> None:
    server.send(Submit(asked := asking("a", "x", max_tokens=5)))
    server.wait()
    server.send(DropAdapter(adapter("x").digest))
    assert server.driver.executor.loaded
    finish(server)
    assert not server.driver.executor.loaded
    server.driver.check(asked)


def test_an_aborted_request_is_not_added_and_its_other_samples_are(server: Server) -> None:
    server.files.holds = True
    whole, part = asking("whole", "x"), asking("part", "x", n=2)
    server.send(Submit(whole), Submit(part), Submit(asking("alone", "y")))
    server.send(Abort("whole"), Abort("part", 0), Abort("alone"))
    server.files.let_go()
    server.wait()
    finish(server)
    assert server.ended == {"part": 1}
    assert server.files.read == ["x"], "y is wanted by nobody any more"


def test_a_request_that_waits_for_its_adapter_gets_its_new_targets() -> None:
    server = Server(max_num_seqs=1)
    server.files.holds = True
    asked = [asking("first", "x", max_tokens=2), asking("urgent", "x", max_tokens=2)]
    server.send(*map(Submit, asked))
    server.send(Reclassify(replace(asked[1], due_s=1.0)), Reclassify(asking("gone", None)))
    server.files.let_go()
    server.wait()
    finish(server)
    assert list(server.ended) == ["urgent", "first"]
    server.close()


def test_tenants_take_turns(server: Server) -> None:
    server.files.holds = True
    server.send(*(Submit(replace(asking(name, name), tenant="a")) for name in "vwx"))
    server.send(Submit(replace(asking("y", "y"), tenant="b")))
    for _ in range(2):
        server.files.let_go()
        server.wait()
    finish(server)
    for _ in range(2):
        server.files.let_go()
        server.wait()
        finish(server)
    assert server.files.read == ["v", "y", "w", "x"]


@pytest.mark.parametrize("seed", range(30))
def test_random_lives_end_and_leave_nothing_in_use(seed: int) -> None:
    """Every request is answered, rejected or aborted, and no adapter is pinned in the end."""
    rng = random.Random(seed)
    server = Server(max_loras=rng.randint(1, 2), max_loaded=rng.randint(2, 3), max_num_seqs=3)
    server.files.holds = rng.random() < 0.5
    asked: dict[str, Request] = {}
    aborted: set[str] = set()
    for number in range(40):
        name = rng.choice([None, "bad", *"vwxyz"])
        asked[str(number)] = made = asking(
            str(number), name, max_tokens=rng.randint(1, 6), n=rng.choice([1, 1, 2])
        )
        made = asked[str(number)] = replace(made, tenant=rng.choice("ab"))
        server.send(Submit(made))
        if rng.random() < 0.2:
            aborted.add(rng.choice(sorted(asked)))
            server.send(Abort(max(aborted)))
        if rng.random() < 0.2:
            chosen = adapter(rng.choice("vwxyz"))
            server.send(LoadAdapter(chosen) if rng.random() < 0.5 else DropAdapter(chosen.digest))
        if server.files.holds and rng.random() < 0.6:
            server.files.let_go()
        while not server.read.empty():
            server.wait()
    for _ in range(80):  # no more loads than these are open
        server.files.let_go()
    while server.engine.has_work() or server.loads.add_to(server.engine.stats()).num_waiting:
        server.wait() if not server.engine.has_work() else server.turn()
    assert server.engine.adapters_in_use() == set()
    served = [each for name, each in asked.items() if name not in aborted and name not in server.rejected]
    server.driver.check(*served)
    assert {asked[name].adapter for name in server.rejected} <= {adapter("bad")}
    assert all(each.adapter != adapter("bad") for each in served)
    server.close()


def test_an_engine_without_adapters_rejects_requests_with_one() -> None:
    server = Server()
    server.engine = Engine(Driver().scheduler, server.driver.executor)
    server.loads = AdapterLoads(server.engine, server.read.put, max_loaded=4)
    server.send(Submit(asking("a", "x")))
    server.wait()
    assert server.rejected["a"].message == "this engine serves no adapters; start it with --enable-lora"
    with pytest.raises(RequestError, match="serves no adapters"):
        server.engine.add(asking("b", "x"))
    server.close()
