"""The engine's statistics leave it ten times a second while it works, and at once when its work is done.

Clients get FASER's words for what ends the engine, never a library's.
"""

import socket

import pytest

from faser.engine.contract.messages import Rejected, frame
from faser.engine.control.clock import SimulatedClock
from faser.engine.worker import StatsReport, _reject, words_for_clients
from faser.errors import EngineError, OverloadError, RequestError
from faser.types.request import Request
from faser.types.sampling import SamplingParams
from faser.types.statistics import EngineStats


class CountingEngine:
    """Its statistics say how often they were asked for."""

    def __init__(self) -> None:
        self.works = True
        self.asked = 0

    def has_work(self) -> bool:
        return self.works

    def stats(self) -> EngineStats:
        self.asked += 1
        return EngineStats(num_steps=self.asked)


def test_a_second_of_steps_has_ten_statistics_and_the_last_step_has_them_too() -> None:
    clock, engine = SimulatedClock(), CountingEngine()
    report = StatsReport(engine, clock.now)  # type: ignore[arg-type]
    found = []
    for _ in range(500):
        found.append(report.due())
        clock.advance(1 / 500)
    assert engine.asked == len([each for each in found if each is not None]) == 10
    assert found[0] is not None
    engine.works = False
    assert report.due() == EngineStats(num_steps=11)
    engine.works = True
    assert report.due() == EngineStats(num_steps=12), "the first step after a rest"
    assert report.due() is None
    report.watched = True
    assert [report.due(), report.due()] == [EngineStats(num_steps=13), EngineStats(num_steps=14)]


@pytest.mark.parametrize(
    "error, words",
    [
        (EngineError("rank 1 does not answer"), "rank 1 does not answer"),
        (RuntimeError("[/build/gloo/tcp/pair.cc:81] Connection reset"), "RuntimeError; the log has the details"),
        (OSError(28, "No space left on device", "/home/someone/x"), "OSError; the log has the details"),
    ],
)
def test_clients_do_not_get_the_words_of_libraries(error: BaseException, words: str) -> None:
    assert words_for_clients(error) == words


@pytest.mark.parametrize(
    "error, told",
    [
        (RequestError("no such key", param="x"), Rejected("a", "no such key", "x")),
        (OverloadError("others are before it", retry_after_s=3), Rejected("a", "others are before it", None, 3)),
    ],
)
def test_a_refusal_says_which_field_is_wrong_or_when_to_try_again(
    error: RequestError | OverloadError, told: Rejected
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        _reject(theirs, Request(request_id="a", prompt_token_ids=(1,), sampling=SamplingParams()), error)
        assert ours.recv(1 << 16) == frame(told)
