"""Which connection is closed first, and who may be answered. Names stand for connections."""

from collections.abc import Callable

import pytest

from faser.api.http.connection_pool import ConnectionPhase, ConnectionPool


class Named:
    def __init__(self, name: str, evicted: list[str]) -> None:
        self.name = name
        self._evicted = evicted

    def evict(self) -> None:
        self._evicted.append(self.name)


@pytest.fixture
def evicted() -> list[str]:
    return []


@pytest.fixture
def named(evicted: list[str]) -> Callable[[str], Named]:
    return lambda name: Named(name, evicted)


def pool_of(max_connections: int, max_body_bytes: int = 100) -> ConnectionPool:
    return ConnectionPool(max_connections=max_connections, max_body_bytes=max_body_bytes)


def test_the_longest_waiting_of_the_most_crowded_phase_is_closed_first(
    named: Callable[[str], Named], evicted: list[str]
) -> None:
    """And a refused one before any other: it has its answer. Oracle: by hand."""
    pool = pool_of(20)
    crowd = {
        ConnectionPhase.ANSWERING: 4,
        ConnectionPhase.BODY: 3,
        ConnectionPhase.HEAD: 2,
        ConnectionPhase.IDLE: 1,
        ConnectionPhase.REFUSED: 1,
    }
    for phase, number in crowd.items():
        for index in range(number):
            connection = named(f"{phase.name} {index}")
            assert pool.enter(connection)
            pool.move(connection, phase)
    while pool.evict():
        pass
    assert evicted == ["REFUSED 0", "BODY 0", "HEAD 0", "BODY 1", "IDLE 0", "HEAD 1", "BODY 2"]
    assert pool.num_connections == 4


def test_a_phase_entered_anew_is_waited_in_anew(named: Callable[[str], Named], evicted: list[str]) -> None:
    pool = pool_of(20)
    first, second = named("first"), named("second")
    for each in (first, second):
        pool.enter(each)
        pool.move(each, ConnectionPhase.IDLE)
    pool.move(first, ConnectionPhase.HEAD)
    pool.move(first, ConnectionPhase.IDLE)
    pool.evict()
    assert evicted == ["second"]


def test_a_new_connection_takes_the_place_of_a_waiting_one(
    named: Callable[[str], Named], evicted: list[str]
) -> None:
    pool = pool_of(8)
    for number in range(20):
        assert pool.enter(named(str(number)))
    assert pool.num_connections == 8
    assert evicted == [str(number) for number in range(12)]


def test_connections_that_are_being_answered_are_never_closed(
    named: Callable[[str], Named], evicted: list[str]
) -> None:
    pool = pool_of(8)
    for number in range(8):
        connection = named(str(number))
        assert pool.enter(connection)
        pool.move(connection, ConnectionPhase.ANSWERING)
    assert not pool.enter(named("one too many"))
    assert not evicted
    pool.leave(connection)
    assert pool.enter(named("one more"))


@pytest.mark.parametrize("max_connections, max_answering", [(8, 6), (64, 48), (100, 84), (1000, 984)])
def test_some_connections_are_kept_for_probes(
    named: Callable[[str], Named], max_connections: int, max_answering: int
) -> None:
    pool = pool_of(max_connections)
    num_answering = 0
    while pool.can_answer:
        connection = named("busy")
        pool.enter(connection)
        pool.move(connection, ConnectionPhase.ANSWERING)
        num_answering += 1
    assert num_answering == max_answering


def test_the_oldest_bodies_go_when_all_hold_too_many_bytes(
    named: Callable[[str], Named], evicted: list[str]
) -> None:
    pool = pool_of(20, max_body_bytes=100)
    connections = [named(name) for name in "abcd"]
    for connection in connections:
        pool.enter(connection)
        pool.move(connection, ConnectionPhase.BODY)
        pool.hold_body(connection, 20)
    pool.hold_body(connections[3], 40)  # 100 in all
    assert not evicted
    pool.hold_body(connections[3], 65)
    assert evicted == ["a", "b"]
    pool.hold_body(connections[3], 0)  # it is complete
    pool.hold_body(connections[2], 100)
    assert evicted == ["a", "b"]


def test_leaving_twice_changes_nothing(named: Callable[[str], Named]) -> None:
    pool = pool_of(8)
    connection = named("a")
    pool.enter(connection)
    pool.leave(connection)
    pool.leave(connection)
    assert pool.num_connections == 0
    assert not pool.evict()
