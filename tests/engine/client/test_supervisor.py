"""The supervisor over scripted engines: a life is a function that serves one end of a real socket in a thread."""

import asyncio
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import pytest

from faser.config.engine import EngineConfig
from faser.engine.client.engine_host import Transport, launch
from faser.engine.client.supervisor import EngineSupervisor, Supervision
from faser.engine.contract.messages import (
    Configure,
    Deltas,
    Failed,
    FromEngine,
    Loaded,
    Shutdown,
    StateChange,
    frame,
    receive,
)
from faser.engine.contract.plan import StepDeltas
from faser.errors import ConfigError, EngineDiedError, FaserError
from faser.types.engine import EngineState
from faser.types.statistics import EngineStats
from tests.fake_engine import model_info
from tests.waiting import PATIENCE_S

READY = StateChange(EngineState.READY)
BEAT = Deltas(StepDeltas(), EngineStats())

Life = Callable[[socket.socket], None]


def send(connection: socket.socket, *messages: FromEngine) -> None:
    connection.sendall(b"".join(map(frame, messages)))


def serves(connection: socket.socket) -> None:
    """Becomes ready and serves until it is asked to end."""
    send(connection, Loaded(model_info()), READY)
    while not isinstance(receive(connection), Shutdown | None):
        pass


def dies(connection: socket.socket) -> None:
    """Becomes ready and ends without a message."""
    send(connection, Loaded(model_info()), READY)


def loads_slowly(connection: socket.socket) -> None:
    """Becomes ready after two seconds, and ends."""
    time.sleep(2)
    dies(connection)


def fails(connection: socket.socket) -> None:
    send(connection, READY, Failed("ZeroDivisionError: division by zero", operator_error=False))


def hangs(connection: socket.socket) -> None:
    """Becomes ready, and then neither speaks nor ends until it is killed."""
    send(connection, READY)
    while receive(connection) is not None:
        pass


def never_ready(connection: socket.socket) -> None:
    while receive(connection) is not None:
        pass


class ScriptedHost:
    def __init__(self, life: Life, connection: socket.socket) -> None:
        self.killed = False
        self._connection = connection
        self._thread = threading.Thread(target=self._run, args=(life,))
        self._thread.start()

    def _run(self, life: Life) -> None:
        with self._connection as connection:
            assert isinstance(receive(connection), Configure)
            life(connection)

    def wait(self) -> None:
        self._thread.join(0.5)
        if self._thread.is_alive():
            self.kill()

    def exit_status(self) -> str:
        self.wait()
        return " (signal 9)"

    def kill(self) -> None:
        self.killed = True
        with suppress(OSError):  # it has ended already
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


class Owner:
    """Plays AsyncEngine: notes what the supervisor tells it. lives: of the engines, in order."""

    def __init__(self, lives: Sequence[Life], supervision: Supervision, *, launches_first: bool = False) -> None:
        """launches_first: the first engine is started before there is a supervisor."""
        self.hosts: list[ScriptedHost] = []
        self.messages: list[FromEngine] = []
        self.ends: list[tuple[FaserError, bool]] = []  # and whether the engine is started again
        self.restart_s: list[float | None] = []
        self.killed_when_informed: list[bool] = []
        self.ready = 0
        self._lives = iter(lives)
        self.launched = launch("process", self._start) if launches_first else None
        self.supervisor = EngineSupervisor(
            Configure(EngineConfig(), "/nowhere"),
            supervision,
            transport="process",
            on_message=self._take,
            on_end=self._note_end,
            launched=self.launched,
            start=self._start,
        )

    def _start(self, transport: Transport, connection: socket.socket) -> ScriptedHost:
        assert transport == "process"
        life = next(self._lives, None)
        if life is None:
            connection.close()
            raise OSError(11, "Resource temporarily unavailable")
        self.hosts.append(ScriptedHost(life, connection))
        return self.hosts[-1]

    def _note_end(self, error: FaserError, restart_s: float | None) -> None:
        self.ends.append((error, restart_s is not None))
        self.restart_s.append(restart_s)
        self.killed_when_informed.append(self.hosts[-1].killed)

    def _take(self, message: FromEngine) -> None:
        self.messages.append(message)
        self.ready += message == READY


def supervised(
    lives: Sequence[Life], until: Callable[[Owner], bool], *, max_restarts: int = 3, timeout_s: float = 60.0
) -> Owner:
    """The owner after `until` held and the supervisor was stopped."""

    async def scenario() -> Owner:
        owner = Owner(lives, Supervision(max_restarts=max_restarts, timeout_s=timeout_s))
        owner.supervisor.start()
        async with asyncio.timeout(PATIENCE_S):
            while not until(owner):
                await asyncio.sleep(0.01)
        await owner.supervisor.stop()
        return owner

    return asyncio.run(scenario())


def test_an_engine_that_dies_is_started_again_and_the_log_says_once_how_it_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="faser.engine"):
        owner = supervised([dies, serves], lambda owner: owner.ready == 2)
    ((error, restarts),) = owner.ends
    assert (str(error), restarts) == ("the engine died (signal 9)", True)
    assert isinstance(error, EngineDiedError)
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert errors == [
        "the engine died (signal 9); it is started again in 1 s (1 of 3 restarts within 10 minutes used)"
    ]
    assert "ready again" in caplog.records[-1].getMessage()


def test_an_engine_that_was_launched_before_is_the_first_and_restarts_follow_it() -> None:
    async def scenario() -> Owner:
        owner = Owner([dies, serves], Supervision(max_restarts=1), launches_first=True)
        assert len(owner.hosts) == 1
        owner.supervisor.start()
        async with asyncio.timeout(PATIENCE_S):
            while owner.ready < 2:
                await asyncio.sleep(0.01)
        assert len(owner.hosts) == 2
        await owner.supervisor.stop()
        assert owner.launched is not None
        owner.launched.discard()  # has ended long ago
        return owner

    owner = asyncio.run(scenario())
    assert [restarts for _, restarts in owner.ends] == [True]


def test_an_engine_that_fails_with_a_message_is_started_again_too() -> None:
    owner = supervised([fails, serves], lambda owner: owner.ready == 2)
    assert [(str(error), restarts) for error, restarts in owner.ends] == [
        ("the engine died: ZeroDivisionError: division by zero", True)
    ]


def test_an_engine_that_hangs_is_given_up_first_and_then_killed_and_started_again() -> None:
    owner = supervised([hangs, serves], lambda owner: owner.ready == 2, timeout_s=1.0)
    ((error, restarts),) = owner.ends
    assert (str(error), restarts) == ("the engine hung: it was silent for 1 s and was killed", True)
    assert owner.killed_when_informed == [False], "who waits need not wait for the engine's end"
    assert owner.hosts[0].killed


def test_the_next_engine_is_expected_after_the_pause_and_as_long_as_the_last_one_took_to_load() -> None:
    owner = supervised([loads_slowly, dies, dies], lambda owner: len(owner.ends) == 3, max_restarts=2)
    first, second, last = owner.restart_s
    assert first is not None
    assert second is not None
    assert first >= 1.0 + 2.0
    assert 2.0 <= second < first + 1.0  # a pause of 2 s, after a load that took no time
    assert last is None


@pytest.mark.full
def test_an_engine_that_hangs_while_it_is_started_again_is_killed_too() -> None:
    owner = supervised([dies, never_ready, serves], lambda owner: owner.ready == 2, timeout_s=1.0)
    assert [restarts for _, restarts in owner.ends] == [True, True]
    assert owner.hosts[1].killed


def test_a_first_load_may_take_any_time() -> None:
    def slow(connection: socket.socket) -> None:
        time.sleep(2.0)
        serves(connection)

    owner = supervised([slow], lambda owner: owner.ready == 1, timeout_s=1.2)
    assert owner.ends == []


def test_signs_of_life_keep_an_engine_alive() -> None:
    def beats(connection: socket.socket) -> None:
        send(connection, READY)
        for _ in range(15):
            time.sleep(0.25)
            send(connection, BEAT)
        serves(connection)

    owner = supervised([beats], lambda owner: owner.ready == 2, timeout_s=3.0)
    assert owner.ends == []


def test_a_pause_of_the_front_end_itself_is_no_hang_of_the_engine() -> None:
    """As after the machine slept: much time has passed, and the engine's messages have yet to be read."""
    paused: list[bool] = []

    def beats(connection: socket.socket) -> None:
        send(connection, READY)
        for _ in range(20):
            time.sleep(0.2)
            send(connection, BEAT)
        serves(connection)

    def pause(owner: Owner) -> bool:
        if owner.ready == 1 and not paused:
            paused.append(True)
            time.sleep(3.5)
        return owner.ready == 2

    owner = supervised([beats], pause, timeout_s=3.0)
    assert owner.ends == []


def test_the_restart_after_the_last_one_is_not_made() -> None:
    owner = supervised([dies, dies, serves], lambda owner: len(owner.ends) == 2, max_restarts=1)
    assert [restarts for _, restarts in owner.ends] == [True, False]
    assert str(owner.ends[1][0]) == (
        "the engine died (signal 9); it is not started again (1 of 1 restarts within 10 minutes used)"
    )
    assert len(owner.hosts) == 2


def test_an_engine_that_was_never_ready_is_not_started_again_and_keeps_its_own_error() -> None:
    def refuses(connection: socket.socket) -> None:
        send(connection, Failed("the model has no layers", operator_error=True))

    owner = supervised([refuses, serves], lambda owner: bool(owner.ends))
    ((error, restarts),) = owner.ends
    assert isinstance(error, ConfigError)
    assert (str(error), restarts) == ("the model has no layers", False)
    assert len(owner.hosts) == 1


def test_an_engine_that_cannot_be_started_again_counts_as_dead() -> None:
    owner = supervised([dies], lambda owner: len(owner.ends) == 2, max_restarts=1)
    assert "the engine cannot be started: Resource temporarily unavailable" in str(owner.ends[1][0])
    assert owner.ends[1][1] is False


def test_pauses_before_restarts_double(caplog: pytest.LogCaptureFixture) -> None:
    started_s: list[float] = []

    def dies_soon(connection: socket.socket) -> None:
        started_s.append(time.monotonic())
        dies(connection)

    supervised([dies_soon] * 3, lambda owner: len(owner.ends) == 3, max_restarts=2)
    first_s, second_s = (later - earlier for earlier, later in pairwise(started_s))
    assert first_s >= 1.0
    assert second_s >= 2.0
    said = re.findall(r"it is started again in (\d+) s", caplog.text)
    assert said == ["1", "2"]


def test_a_message_that_cannot_be_handled_ends_the_engine_instead_of_all_hope() -> None:
    def senseless(connection: socket.socket) -> None:
        send(connection, READY)
        connection.sendall(b"\2\0\0\0hi")
        never_ready(connection)

    owner = supervised([senseless, serves], lambda owner: owner.ready == 2)
    ((error, restarts),) = owner.ends
    assert restarts
    assert "cannot be handled" in str(error)


@pytest.mark.parametrize(
    "lives, until",
    [
        ([serves], lambda owner: owner.ready == 1),
        ([never_ready], lambda owner: len(owner.hosts) == 1),
        ([dies, serves], lambda owner: len(owner.ends) == 1),  # stopped in the pause before the restart
        ([dies, never_ready], lambda owner: len(owner.hosts) == 2),
    ],
)
def test_stopping_ends_every_engine_and_leaves_no_task(
    lives: Sequence[Life], until: Callable[[Owner], bool]
) -> None:
    async def scenario() -> Owner:
        before = asyncio.all_tasks()
        owner = Owner(lives, Supervision(max_restarts=3))
        owner.supervisor.start()
        while not until(owner):
            await asyncio.sleep(0.01)
        ended = len(owner.ends)
        await owner.supervisor.stop()
        await owner.supervisor.stop()
        assert asyncio.all_tasks() == before
        assert len(owner.ends) == ended, "stopping is not a death"
        return owner

    owner = asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    assert all(host.killed for host in owner.hosts), "nothing is left of any"


@contextmanager
def no_new_descriptors() -> Iterator[None]:
    before = len(list(Path("/proc/self/fd").iterdir()))
    yield
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_restarts_leave_no_descriptor_open() -> None:
    with no_new_descriptors():
        supervised([dies, fails, serves], lambda owner: owner.ready == 3)


def test_after_restarts_have_ended_a_death_is_final() -> None:
    def until(owner: Owner) -> bool:
        if owner.ready and not owner.ends:
            owner.supervisor.end_restarts()
            assert owner.hosts
        return bool(owner.ends)

    def dies_later(connection: socket.socket) -> None:
        dies(connection)
        time.sleep(0.5)

    owner = supervised([dies_later, serves], until)
    assert [restarts for _, restarts in owner.ends] == [False]


def test_an_engine_in_a_thread_cannot_be_restarted() -> None:
    with pytest.raises(AssertionError, match="thread cannot be restarted"):
        EngineSupervisor(
            Configure(EngineConfig(), "/nowhere"),
            Supervision(max_restarts=1),
            transport="thread",
            on_message=lambda _: None,
            on_end=lambda *_: None,
        )
