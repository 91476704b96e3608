"""The learner's real process: idle priority, stopped and continued, and its end with its parent's.

Planted bugs that these tests have caught: a learner that is stopped outlives a parent that was killed; a learner
that ended without being noticed.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from faser.config.engine import EngineConfig
from faser.engine.client.head_refresh import LearnerProcess
from faser.engine.contract.learning import FromLearner, Learn, LearningRules, Started, Unable
from faser.engine.contract.messages import Configure

CONFIGURE = Configure(EngineConfig(device="cpu", backend="torch"), "/nowhere")
TASK = Learn(head=None, into="/nowhere", answers=(), rules=LearningRules(), seed=1)

_PARENT = """
import asyncio, os, sys
from faser.engine.client.head_refresh import LearnerProcess
from tests.engine.client.test_learner_process import CONFIGURE

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


def test_a_learner_stands_still_and_goes_on_when_it_is_told_to() -> None:
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
