"""The audit: answers are equal without drafts, a wrong verifier is found, and no request notices a replay.

The clock is the test's own: an engine is idle for as long as the test says.
"""

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from faser.engine.contract.plan import SequenceStart
from faser.engine.engine import Engine
from faser.engine.execution.drafting.drafter import Drafter
from faser.errors import ConfigError
from faser.types.statistics import AuditStats, EngineStats
from tests.engine.losslessness.equality import FEATURES, build, requests, write_pair

Checkpoints = tuple[Path, Path]
WRONG = {"method": "auto", "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.9] * 5}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    folder = tmp_path_factory.mktemp("pair")
    return write_pair(folder / "target", folder / "drafter")


def audited(checkpoints: Checkpoints, speculation: dict[str, Any] | None = None, **settings: Any) -> Engine:
    rates = {"audit_speculation": 1.0, "kv_cache_memory": 4 << 20} | settings
    return build(checkpoints, {"model": str(checkpoints[1])} | (speculation or {"method": "auto"}), **rates)


def answer(engine: Engine, count: int, **sampling: Any) -> None:
    for request in requests(**sampling)[:count]:
        engine.add(request)
    while engine.has_work():
        engine.step()


def idle(engine: Engine) -> AuditStats:
    """Nothing arrives until all replays are done."""
    while (wait_s := engine.idle_wait_s()) is not None:
        assert wait_s <= 0.05
        engine.step()
    stats = engine.stats().audit
    assert stats is not None
    return stats


@pytest.mark.parametrize("feature", ["plain", "penalties", "endings", "scores"])
@pytest.mark.full(but=("scores",))
def test_answers_are_equal_without_drafts(checkpoints: Checkpoints, feature: str) -> None:
    engine = audited(checkpoints)
    answer(engine, 6, **FEATURES[feature])
    stats = idle(engine)
    assert stats.checks >= 2
    assert (stats.divergences, stats.backend) == (0, "native")


def test_a_verifier_that_accepts_wrong_tokens_is_found(
    checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    engine = audited(checkpoints, WRONG)
    answer(engine, 6, temperature=0.0)
    with caplog.at_level(logging.WARNING, "faser.audit"):
        stats = idle(engine)
    found = [record.getMessage() for record in caplog.records if record.name == "faser.audit"]
    assert stats.divergences == len(found) >= 2
    assert all("differs from the one without at token" in message for message in found)


def test_a_replay_changes_nothing_that_requests_or_dashboards_see(checkpoints: Checkpoints) -> None:
    engine = audited(checkpoints)
    answer(engine, 6, temperature=0.0)
    before = engine.stats()
    assert idle(engine).checks
    after = engine.stats()
    assert _without_audit(after) == _without_audit(before)


def _without_audit(stats: EngineStats) -> dict[str, Any]:
    return {name: getattr(stats, name) for name in EngineStats.__slots__ if name != "audit"}


def test_answers_and_statistics_are_those_of_an_engine_without_an_audit(checkpoints: Checkpoints) -> None:
    """Oracle: the same requests on an engine without one. Replays run between the two halves."""
    engines = [audited(checkpoints), audited(checkpoints, audit_speculation=0.0)]
    said: list[list[tuple[int, ...]]] = []
    for engine in engines:
        answer(engine, 5, temperature=0.7)
        if engine.idle_wait_s() is not None:
            idle(engine)
        tokens = []
        for request in requests(temperature=0.7)[5:9]:
            engine.add(request)
        while engine.has_work():
            tokens += [delta.token_ids for delta in engine.step()]
        said.append(tokens)
    assert said[0] == said[1]
    one, other = (engine.stats() for engine in engines)
    assert one.prefix_cache_hits == other.prefix_cache_hits
    assert one.speculation is not None
    assert other.speculation is not None
    assert one.speculation.num_drafts == other.speculation.num_drafts


def test_a_replay_waits_for_a_while_and_pauses_for_requests(checkpoints: Checkpoints) -> None:
    engine = audited(checkpoints)
    answer(engine, 1, temperature=0.0)
    assert engine.idle_wait_s() == 0.05
    engine.step()
    wait_s = engine.idle_wait_s()
    assert wait_s is not None
    assert 0 <= wait_s < 0.05
    (request,) = requests(temperature=0.0)[1:2]
    engine.add(request)
    assert engine.idle_wait_s() == 0.05
    assert not engine.step() or engine.has_work()
    while engine.has_work():
        engine.step()
    assert idle(engine).divergences == 0


def test_a_replay_goes_on_after_requests_that_need_all_slots(checkpoints: Checkpoints) -> None:
    engine = audited(checkpoints)
    answer(engine, 1, temperature=0.0)
    engine.step()
    time.sleep(0.06)
    engine.step()  # the replay's first
    for request in requests(temperature=0.0)[1:20]:  # more than there are slots
        engine.add(request)
    while engine.has_work():
        engine.step()
        engine._scheduler.check_invariants()
    stats = idle(engine)
    assert stats.checks > 10
    assert stats.divergences == 0


def test_each_sample_of_a_request_is_replayed_with_its_own_seed(checkpoints: Checkpoints) -> None:
    engine = audited(checkpoints)
    answer(engine, 2, temperature=0.9, n=2, max_tokens=40)
    stats = idle(engine)
    assert stats.checks >= 2
    assert stats.divergences == 0


def test_an_engine_of_one_slot_has_none_for_replays(checkpoints: Checkpoints) -> None:
    with pytest.raises(ConfigError, match="max_num_seqs must be at least 2"):
        audited(checkpoints, max_num_seqs=1)


def test_answers_that_a_client_ended_at_a_stop_string_are_compared_and_other_aborts_are_not(
    checkpoints: Checkpoints,
) -> None:
    engine = audited(checkpoints)
    for request, stop in zip(requests(temperature=0.8, seed=None)[:2], (("x",), ()), strict=True):
        engine.add(replace(request, sampling=replace(request.sampling, stop=stop)))
    for _ in range(12):
        engine.step()
    for request in requests()[:2]:
        engine.abort(request.request_id)
    while engine.has_work():
        engine.step()
    stats = idle(engine)
    assert (stats.checks, stats.divergences) == (1, 0)


def test_the_answers_that_wait_are_bounded(checkpoints: Checkpoints) -> None:
    engine = audited(checkpoints)
    for _ in range(3):
        answer(engine, 34, temperature=0.0)
    stats = engine.stats().audit
    assert stats is not None
    assert stats.skipped > 0
    assert idle(engine).checks == 64


@pytest.mark.parametrize("rate, low, high", [(0.5, 2, 22), (0.0, 0, 0)])
@pytest.mark.full(but=("0.5-2-22",))
def test_the_rate_is_the_share_that_is_replayed(
    checkpoints: Checkpoints, rate: float, low: int, high: int
) -> None:
    engine = audited(checkpoints, audit_speculation=rate)
    answer(engine, 24, temperature=0.0)
    stats = engine.stats().audit
    assert (stats is None) == (rate == 0)
    if stats is not None:
        assert low <= idle(engine).checks <= high


def test_a_cache_without_room_for_replays_is_refused(checkpoints: Checkpoints) -> None:
    with pytest.raises(ConfigError, match="no room is left for replays"):
        audited(checkpoints, kv_cache_memory=1 << 20, max_model_len=1000)


class _Listener:
    """A drafter that notes which slots it hears of."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.started: list[int] = []

    def start(self, start: SequenceStart) -> None:
        self.started.append(start.slot)
        self._drafter.start(start)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)


def test_a_drafter_hears_nothing_of_a_replay(checkpoints: Checkpoints) -> None:
    """It would remember every replayed answer a second time, and forget others for it."""
    heard: list[_Listener] = []

    def listening(drafter: Drafter) -> Any:
        heard.append(_Listener(drafter))
        return heard[0]

    engine = audited(checkpoints, {"method": "suffix"}, wrap_drafter=listening)
    answer(engine, 4, temperature=0.0)
    assert idle(engine).checks
    assert len(heard[0].started) == 4
