"""HeadRefresher: has the head trained in idle time on the traffic of the last hour, and better ones adopted.

    engine idle  |■■■■■■■■■■■■■|        |■■■■■■■|         |■■■■■■■■■■■■■■■■■■■■■■■■|
    learner         learns                 learns            learns ▶ Learned ▶ AdoptHead ▶ engine
                 ▲  ▲          ▲
          idle for  a moment   stopped before the engine gets the request

Owns the memory of the traffic, the learner and the folder of refreshed heads. The learner is a child process.
Stopped (SIGSTOP), it takes no processor time, whatever it computes, and goes on where it was. One that dies leaves
the server as it is; it is started again after a pause, a few times.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from faser.config.environment import child_environment
from faser.engine.client.traffic import FinishedAnswer, TrafficMemory, learned_tokens
from faser.engine.contract.messages import (
    Configure,
    FromLearner,
    Learn,
    Learned,
    LearningRules,
    Started,
    Unable,
    frame,
    receive_from_learner,
)
from faser.logs import log_format
from faser.metrics.server import LearnerState, RefreshMetrics, RefreshOutcome

_END_S = 5.0
_log = logging.getLogger("faser.refresh")


class Learner(Protocol):
    """A learner that has been started. None of its methods waits."""

    def learn(self, task: Learn) -> None:
        """Begin a round. Its end is a message."""
        ...

    def pause(self) -> None:
        """Take no processor time from now on."""
        ...

    def resume(self) -> None: ...

    def kill(self) -> None:
        """End it; nothing follows. Idempotent."""
        ...


# Starts a learner. It calls the first with each message; the second, with how, if it ends by itself.
StartLearner = Callable[[Callable[[FromLearner], None], Callable[[str], None]], Learner]


@dataclass(frozen=True, slots=True, kw_only=True)
class RefreshSettings:
    """least_tokens: of new answers that are worth a round. moment_s: idle time before a learner computes.

    restart_pauses_s: after each death of a learner; one more is the last. look_s: between two looks at what is too
    old to be kept.
    """

    least_tokens: int = 4096
    moment_s: float = 1.0
    restart_pauses_s: tuple[float, ...] = (60.0, 600.0)
    look_s: float = 60.0
    rules: LearningRules = field(default_factory=LearningRules)


# call_later(delay_s, call): makes the call after the delay, unless what it returns is called before.
CallLater = Callable[[float, Callable[[], None]], Callable[[], None]]


def _call_later(delay_s: float, call: Callable[[], None]) -> Callable[[], None]:
    return asyncio.get_running_loop().call_later(delay_s, call).cancel


class HeadRefresher:
    """An AnswerTaker. folder: private, for refreshed heads. Use it from one event loop.

    begin comes first, close last; what comes after close changes nothing.
    """

    def __init__(
        self,
        start_learner: StartLearner,
        folder: Path,
        metrics: RefreshMetrics,
        settings: RefreshSettings | None = None,
        memory: TrafficMemory | None = None,
        call_later: CallLater = _call_later,
    ) -> None:
        self._start_learner = start_learner
        self._folder = folder
        self._metrics = metrics
        self._settings = settings or RefreshSettings()
        self._memory = memory or TrafficMemory()
        self._adopt: Callable[[str], None] = _adopted_by_none
        self._learner: Learner | None = None
        self._task: Learn | None = None  # that the learner works on
        self._offered: tuple[Learn, Learned] | None = None  # waits for the engine to be idle, or for its answer
        self._asked: str | None = None  # the head that the engine was asked to adopt
        self._served: str | None = None  # the refreshed head that drafts; None: the one that the engine began with
        self._num_rounds = 0
        self._num_deaths = 0
        self._may_start = True
        self._is_idle = self._is_ready = self._is_closed = False
        self._call_later = call_later
        self._timers: dict[str, Callable[[], None]] = {}  # each: what cancels it

    def begin(self, adopt: Callable[[str], None]) -> None:
        """adopt: asks the engine to adopt the head in a directory; `adopted` follows."""
        self._adopt = adopt
        self._look()
        self._show()

    def put(self, answer: FinishedAnswer) -> None:
        self._memory.put(answer)
        self._metrics.answer("kept")

    def withhold(self) -> None:
        self._metrics.answer("withheld")

    def work_begins(self) -> None:
        """The engine gets work. The learner stands still before this returns."""
        self._is_idle = False
        self._cancel("idle")
        if self._learner is not None:
            self._learner.pause()
        self._show()

    def work_ends(self) -> None:
        """No request is left."""
        self._after("idle", self._settings.moment_s, self._idle)

    def engine_ready(self) -> None:
        """An engine is ready, with the head that it began with. It adopts the refreshed one if there is one."""
        self._is_ready = True
        self._asked = self._served
        if self._served is not None:
            self._adopt(self._served)
        self.work_ends()

    def engine_ended(self) -> None:
        self._is_ready = False
        self._asked = None
        self.work_begins()

    def adopted(self, directory: str, refusal: str | None) -> None:
        """The engine has adopted the head in a directory. refusal: why not; None: it has."""
        if directory != self._asked:
            return
        self._asked = None
        if self._offered is None or self._offered[0].into != directory:  # adopted again, after a restart
            if refusal is not None:
                _log.warning("the restarted engine drafts with the head that it began with: %s", refusal)
                _remove(self._served)
                self._served = None
            self._go_on()
            return
        (task, learned), self._offered = self._offered, None
        if refusal is not None:
            self._drop(task, "failed")
            _log.warning("a refreshed head is not used: %s", refusal)
        else:
            before, self._served = self._served, directory
            self._metrics.refresh("accepted")
            _remove(before)
            _log.info(
                "a refreshed head drafts: on %d held-out answers it has %.2f accepted tokens a draft, the one "
                "before %.2f; it has learned from %d tokens",
                learned.held_out,
                learned.after,
                learned.before,
                learned.tokens,
            )
        self._go_on()

    def close(self) -> None:
        """End the learner. Idempotent."""
        self._is_closed = True
        for name in list(self._timers):
            self._cancel(name)
        self._end_learner()

    def _idle(self) -> None:
        self._is_idle = True
        if self._learner is not None:
            self._learner.resume()
        self._go_on()

    def _go_on(self) -> None:
        """Do what an idle engine leaves time for: swap heads, or else begin a round."""
        if self._is_idle and self._is_ready and not self._is_closed and self._asked is None:
            if self._offered is not None:
                self._asked = self._offered[0].into
                self._adopt(self._asked)
            elif self._task is None and self._memory.new_tokens >= self._settings.least_tokens:
                self._begin_round()
        self._show()

    def _begin_round(self) -> None:
        if self._learner is None and not self._started():
            return
        assert self._learner is not None
        answers = self._memory.begin_round()
        self._num_rounds += 1
        self._task = Learn(
            head=self._served,
            into=str(self._folder / f"head-{self._num_rounds}"),
            answers=answers,
            rules=self._settings.rules,
            seed=self._num_rounds,
        )
        self._learner.learn(self._task)

    def _started(self) -> bool:
        if not self._may_start:
            return False
        try:
            self._learner = self._start_learner(self._take, self._lose)
        except OSError as error:
            self._lose(f"it cannot be started: {error.strerror}")
        return self._learner is not None

    def _take(self, message: FromLearner) -> None:
        match message:
            case Learned():
                assert self._task is not None, "a learner learns what it was asked to"
                task, self._task = self._task, None
                self._metrics.learned(learned_tokens(task.answers))
                if message.is_better:
                    self._offered = (task, message)
                else:
                    self._drop(task, "refused")
                    _log.debug(
                        "a trained head is not better: %.2f accepted tokens a draft, before %.2f; noise %.2f",
                        message.after,
                        message.before,
                        message.noise,
                    )
                self._go_on()
            case Unable(reason):
                _log.warning("the head cannot be trained: %s", reason)
            case Started():
                pass

    def _lose(self, how: str) -> None:
        """The learner has ended by itself."""
        self._end_learner()
        if self._is_closed:
            return
        pauses = self._settings.restart_pauses_s
        self._may_start = False
        self._metrics.died()
        if self._num_deaths < len(pauses):
            pause_s = pauses[self._num_deaths]
            self._after("restart", pause_s, self._allow_start)
            _log.warning("the learner of --distill-online died (%s); not started again for %.0f s", how, pause_s)
        else:
            _log.warning("the learner of --distill-online died (%s), as often before: heads stay as they are", how)
        self._num_deaths += 1
        self._show()

    def _allow_start(self) -> None:
        self._may_start = True
        self._go_on()

    def _end_learner(self) -> None:
        if self._learner is not None:
            self._learner.kill()
        if self._task is not None:
            _remove(self._task.into)
        self._learner = self._task = None

    def _look(self) -> None:
        """Forget what is too old; a learner that waits for new traffic has no use for memory then."""
        self._memory.forget_old()
        if self._memory.is_empty and self._task is None:
            self._end_learner()
        self._after("look", self._settings.look_s, self._look)

    def _drop(self, task: Learn, outcome: RefreshOutcome) -> None:
        self._metrics.refresh(outcome)
        _remove(task.into)

    def _after(self, name: str, delay_s: float, call: Callable[[], None]) -> None:
        self._cancel(name)
        if not self._is_closed:
            self._timers[name] = self._call_later(delay_s, call)

    def _cancel(self, name: str) -> None:
        if (cancel := self._timers.pop(name, None)) is not None:
            cancel()

    def _show(self) -> None:
        state: LearnerState
        if not self._may_start:
            state = "dead"
        elif self._task is None:
            state = "waiting"
        else:
            state = "learning" if self._is_idle else "paused"
        self._metrics.learner(state)


def _remove(directory: str | None) -> None:
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)


def _adopted_by_none(directory: str) -> None:
    raise AssertionError(f"begin comes before the head in {directory}")


class LearnerProcess:
    """A Learner in a process of its own, faser.distill.online_worker. Raises OSError if it cannot start.

    configure: as for the engine. Use it from one event loop, and from its thread: the child ends with that thread.
    """

    def __init__(
        self, configure: Configure, on_message: Callable[[FromLearner], None], on_end: Callable[[str], None]
    ) -> None:
        self._on_message = on_message
        self._on_end = on_end
        self._waiting: list[bytes] = [frame(configure)]
        self._writer: asyncio.StreamWriter | None = None
        self._is_stoppable = False  # before it has said Started it might outlive this process if it were stopped
        self._is_paused = False
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = _spawn(theirs)
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        self._relaying = asyncio.get_running_loop().create_task(self._relay(ours), name="faser-learner")

    @property
    def pid(self) -> int:
        return self._process.pid

    def learn(self, task: Learn) -> None:
        self._waiting.append(frame(task))
        self._flush()

    def pause(self) -> None:
        self._is_paused = True
        if self._is_stoppable:
            self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._is_paused = False
        if self._is_stoppable:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._relaying.cancel()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)

    async def _relay(self, connection: socket.socket) -> None:
        reader, self._writer = await asyncio.open_unix_connection(sock=connection)
        try:
            self._flush()
            while (message := await receive_from_learner(reader)) is not None:
                if isinstance(message, Started):
                    self._is_stoppable = True
                    if self._is_paused:
                        self.pause()
                self._on_message(message)
        finally:
            self._writer.transport.abort()
        status = await asyncio.to_thread(self._ended)
        self._on_end(f"signal {-status}" if status < 0 else f"exit status {status}")

    def _ended(self) -> int:
        """The exit status of a process that has closed its connection."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(_END_S)
        self._process.kill()
        return self._process.wait()

    def _flush(self) -> None:
        if self._writer is not None:
            self._writer.writelines(self._waiting)
            self._waiting.clear()


def _spawn(connection: socket.socket) -> subprocess.Popen[bytes]:
    level = logging.getLevelName(logging.getLogger("faser").getEffectiveLevel())
    number = connection.fileno()
    return subprocess.Popen(
        [sys.executable, "-m", "faser.distill.online_worker", str(number), str(os.getpid()), level, log_format()],
        pass_fds=[number],
        env=child_environment(),
        start_new_session=True,  # Ctrl-C reaches only the front-end
    )
