"""The learner's real process: idle priority, stopped and continued, and its end with its parent's.

Planted bugs that these tests have caught: a learner that is stopped outlives a parent that was killed; a learner
that ended without being noticed.

When a learner may compute, what becomes of what it makes, and what becomes of the server when it dies.

The learner is a fake that remembers what it was asked, the engine a list of the heads that it was asked to adopt,
and time passes when a test says so.

Planted bugs that these tests have caught: a learner that goes on while the engine works; a head that is adopted
while the engine works; a learner that is started again at once.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from faser.config.engine import EngineConfig
from faser.engine.client.head_refresh import HeadRefresher, Learner, LearnerProcess, RefreshSettings
from faser.engine.client.traffic import TrafficMemory
from faser.engine.contract.messages import Configure, FromLearner, Learn, Learned, LearningRules, Started, Unable
from faser.metrics.server import Metrics
from tests.engine.client.test_traffic import finished

CONFIGURE = Configure(EngineConfig(device="cpu", backend="torch"), "/nowhere")
TASK = Learn(head=None, into="/nowhere", answers=(), rules=LearningRules(), seed=1)

_PARENT = """
import asyncio, os, sys
from faser.engine.client.head_refresh import LearnerProcess
from tests.engine.client.test_head_refresh import CONFIGURE

async def main():
    started = asyncio.Event()
    learner = LearnerProcess(CONFIGURE, lambda message: started.set(), lambda how: None)
    await started.wait()
    learner.pause()
    print(learner.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def state_of(pid: int) -> str:
    """R, S, T (stopped), Z …; empty: there is no such process."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    return ""


def becomes(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    end_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.02)
    return condition()


class Heard:
    def __init__(self) -> None:
        self.messages: list[FromLearner] = []
        self.ends: list[str] = []

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(120):
            while not condition():
                await asyncio.sleep(0.02)


def test_a_learner_stands_still_and_goes_on_when_it_is_asked_to() -> None:
    async def scenario() -> None:
        heard = Heard()
        learner = LearnerProcess(CONFIGURE, heard.messages.append, heard.ends.append)
        learner.pause()
        await heard.until(lambda: heard.messages == [Started()])
        assert becomes(lambda: state_of(learner.pid) == "T"), "it was paused before it could be stopped"
        assert os.sched_getscheduler(learner.pid) == os.SCHED_IDLE
        assert Path(f"/proc/{learner.pid}/oom_score_adj").read_text().strip() == "1000"
        learner.resume()
        assert becomes(lambda: state_of(learner.pid) == "S")
        learner.kill()
        learner.kill()
        assert state_of(learner.pid) == ""
        await asyncio.sleep(0.05)
        assert heard.ends == []

    asyncio.run(scenario())


def test_a_learner_that_ends_by_itself_is_reported_with_the_reason() -> None:
    async def scenario() -> None:
        heard = Heard()
        learner = LearnerProcess(CONFIGURE, heard.messages.append, heard.ends.append)
        learner.learn(TASK)
        await heard.until(lambda: bool(heard.ends))
        assert heard.ends == ["exit status 1"]
        (unable,) = (each for each in heard.messages if isinstance(each, Unable))
        assert "/nowhere" in unable.message
        other = LearnerProcess(CONFIGURE, heard.messages.append, heard.ends.append)
        await heard.until(lambda: heard.messages[-1] == Started())
        other.pause()
        os.kill(other.pid, signal.SIGKILL)
        await heard.until(lambda: len(heard.ends) == 2)
        assert heard.ends[1] == "signal 9"

    asyncio.run(scenario())


def test_a_stopped_learner_ends_with_a_parent_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert becomes(lambda: state_of(pid) == "T")
        parent.kill()
    assert becomes(lambda: state_of(pid) in ("", "Z"))


SETTINGS = RefreshSettings(least_tokens=8, moment_s=1.0, restart_pauses_s=(60.0,), look_s=60.0)


def learned(*, better: bool = True) -> Learned:
    return Learned(is_better=better, before=1.0, after=1.5, noise=0.1, held_out=9, tokens=80)


@dataclass
class FakeTimer:
    due_s: float
    call: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeLearner:
    def __init__(self, take: Callable[[FromLearner], None], lose: Callable[[str], None]) -> None:
        self.take = take
        self.lose = lose
        self.tasks: list[Learn] = []
        self.runs = True
        self.killed = False

    def learn(self, task: Learn) -> None:
        assert self.runs, "a stopped learner is asked"
        self.tasks.append(task)
        Path(task.into).mkdir()

    def pause(self) -> None:
        self.runs = False

    def resume(self) -> None:
        self.runs = True

    def kill(self) -> None:
        self.killed = True


class Harness:
    """A refresher between fakes."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 0.0
        self.timers: list[FakeTimer] = []
        self.learners: list[FakeLearner] = []
        self.asked: list[str] = []
        self.metrics = Metrics(model_name="tiny", max_model_len=64)
        self.refresher = HeadRefresher(
            self._start,
            folder,
            self.metrics.head_refresh,
            SETTINGS,
            TrafficMemory(clock=lambda: self.now_s),
            self._later,
        )
        self.prompts = iter(range(10_000))

    def _start(self, take: Callable[[FromLearner], None], lose: Callable[[str], None]) -> Learner:
        self.learners.append(FakeLearner(take, lose))
        return self.learners[-1]

    @property
    def learner(self) -> FakeLearner:
        return self.learners[-1]

    def _later(self, delay_s: float, call: Callable[[], None]) -> Callable[[], None]:
        self.timers.append(FakeTimer(self.now_s + delay_s, call))
        return self.timers[-1].cancel

    def wait(self, seconds: float = 2.0) -> None:
        end_s = self.now_s + seconds
        while due := [each for each in self.timers if not each.cancelled and each.due_s <= end_s]:
            first = min(due, key=lambda each: each.due_s)
            self.timers.remove(first)
            self.now_s = first.due_s
            first.call()
        self.now_s = end_s

    def traffic(self, answers: int = 40) -> None:
        """Answers, during which the engine works."""
        self.refresher.work_begins()
        for _ in range(answers):
            self.refresher.put(finished(next(self.prompts)))
        self.refresher.work_ends()

    def count(self, series: str) -> float:
        lines = self.metrics.render().decode().splitlines()
        (found,) = (line for line in lines if line.startswith(series) and 'engine="0"' in line)
        return float(found.rpartition(" ")[2])

    def outcome(self, name: str) -> float:
        lines = self.metrics.render().decode().splitlines()
        (found,) = (
            line for line in lines if line.startswith("faser_head_refreshes_total") and f'"{name}"' in line
        )
        return float(found.rpartition(" ")[2])

    def state(self) -> str:
        lines = self.metrics.render().decode().splitlines()
        (found,) = (line for line in lines if line.startswith("faser_learner_state{") and line.endswith(" 1.0"))
        return found.partition('state="')[2].partition('"')[0]


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    """With an engine that has just become ready."""
    found = Harness(tmp_path)
    found.refresher.begin(found.asked.append)
    found.refresher.engine_ready()
    return found


def test_a_learner_computes_only_while_the_engine_is_idle(harness: Harness) -> None:
    harness.wait()
    assert harness.learners == []
    assert harness.state() == "waiting"
    harness.traffic()
    assert harness.learners == [], "the engine has only just become idle"
    harness.wait()
    assert harness.learner.runs
    assert harness.state() == "learning"
    harness.refresher.work_begins()
    assert not harness.learner.runs, "it stands still before the engine gets the request"
    assert harness.state() == "paused"
    harness.wait()
    harness.refresher.work_ends()
    assert not harness.learner.runs
    harness.refresher.work_begins()
    harness.wait()
    assert not harness.learner.runs, "another request came within the moment"
    harness.refresher.work_ends()
    harness.wait()
    assert harness.learner.runs
    assert len(harness.learner.tasks) == 1


def test_a_better_head_is_adopted_once_the_engine_is_idle(
    harness: Harness, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    harness.traffic()
    harness.wait()
    harness.refresher.work_begins()
    harness.learner.take(learned())  # had been sent before it was stopped
    harness.wait()
    assert harness.asked == []
    harness.refresher.work_ends()
    harness.wait()
    (head,) = harness.asked
    assert head == harness.learner.tasks[0].into
    with caplog.at_level("INFO", "faser.refresh"):
        harness.refresher.adopted(head, None)
    assert "it has 1.50 accepted tokens a draft, the one before 1.00" in caplog.text
    assert harness.outcome("accepted") == 1
    harness.traffic()
    harness.wait()
    assert harness.learner.tasks[1].head == head, "the next round begins with the head that is served"
    harness.learner.take(learned())
    harness.refresher.adopted(harness.learner.tasks[1].into, None)
    assert [path.name for path in tmp_path.iterdir()] == ["head-2"], "a head that is served no more is removed"


def test_a_head_that_is_no_better_or_does_not_fit_is_dropped_and_counted(harness: Harness, tmp_path: Path) -> None:
    harness.traffic()
    harness.wait()
    harness.learner.take(learned(better=False))
    assert (harness.asked, harness.outcome("refused")) == ([], 1)
    harness.traffic()
    harness.wait()
    harness.learner.take(learned())
    harness.refresher.adopted(harness.asked[0], "too many heads")
    assert (harness.outcome("failed"), harness.outcome("accepted")) == (1, 0)
    assert not list(tmp_path.iterdir())
    harness.traffic()
    harness.wait()
    assert harness.learner.tasks[2].head is None
    assert harness.count("faser_learner_tokens_total") > 0


def test_a_learner_that_dies_is_started_again_after_a_pause_and_not_for_ever(
    harness: Harness, tmp_path: Path
) -> None:
    harness.traffic()
    harness.wait()
    harness.learner.take(Unable("no memory"))
    harness.learner.lose("exit status 1")
    assert harness.state() == "dead"
    harness.traffic()
    harness.wait(30)
    assert len(harness.learners) == 1
    harness.wait(40)
    assert len(harness.learners) == 2
    harness.learner.lose("signal 9")
    harness.traffic()
    harness.wait(3000)
    assert len(harness.learners) == 2
    assert harness.count("faser_learner_deaths_total") == 2
    assert harness.state() == "dead"
    assert not list(tmp_path.iterdir())


def test_an_engine_that_starts_again_adopts_the_refreshed_head_again(harness: Harness) -> None:
    harness.traffic()
    harness.wait()
    harness.learner.take(learned())
    (head,) = harness.asked
    harness.refresher.adopted(head, None)
    harness.refresher.engine_ended()
    assert not harness.learner.runs
    harness.wait()
    harness.refresher.engine_ready()
    assert harness.asked == [head, head]
    harness.refresher.adopted(head, None)
    assert harness.outcome("accepted") == 1
    harness.wait()
    assert harness.learner.runs


def test_without_traffic_for_an_hour_the_learner_and_what_it_knows_end(harness: Harness) -> None:
    harness.traffic()
    harness.wait()
    harness.learner.take(learned(better=False))
    assert not harness.learner.killed
    harness.wait(3700)
    assert harness.learner.killed


def test_nothing_follows_the_end(harness: Harness, tmp_path: Path) -> None:
    harness.traffic()
    harness.wait()
    harness.refresher.close()
    assert harness.learner.killed
    harness.traffic()
    harness.wait()
    assert len(harness.learners) == 1
    assert not list(tmp_path.iterdir())
