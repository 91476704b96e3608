"""MaskThreads: work on matchers, away from the thread of the steps.

One token of an answer takes microseconds in most grammars, and seconds in a few. llguidance cannot be interrupted,
so the thread of the steps only waits for a while; a thread that is busy for longer is replaced, and ends with its
task:

    quick    tasks that are expected to be short, by a few threads
    slow     the others, by a single thread, so that they cannot take the processors from the steps

The slow thread and those that are replaced have a lower priority than the threads that compute the model.
"""

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

_log = logging.getLogger("faser")
_SLOW_NICE = 10


class Task:
    """Work that is done once, by another thread. began_s: when that thread took it up; infinity: not yet."""

    __slots__ = ("_run", "_working", "began_s", "is_done")

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._working = threading.Lock()
        self._working.acquire()
        self.began_s = math.inf
        self.is_done = False

    def wait(self, seconds: float) -> bool:
        """Wait at most these seconds; return whether the task is done."""
        if not self.is_done:
            if not self._working.acquire(timeout=max(seconds, 0.0)):
                return False
            self._working.release()
        return True

    def run(self) -> None:
        self.began_s = time.perf_counter()
        try:
            self._run()
        except Exception:
            _log.exception("a grammar's token masks cannot be computed")
        finally:
            self.is_done = True
            self._working.release()


class MaskThreads:
    """Started with the first task. num_quick: threads of short tasks. Called by one thread."""

    def __init__(self, num_quick: int) -> None:
        self._num_quick = num_quick
        self._quick, self._slow = SimpleQueue[Task](), SimpleQueue[Task]()
        self._threads: list[_MaskThread] = []

    def submit(self, run: Callable[[], None], *, slow: bool = False) -> Task:
        """slow: the task is expected to take long."""
        if not self._threads:
            self._threads = [_MaskThread(self._quick) for _ in range(self._num_quick)]
            _MaskThread(self._slow).give_way()
        task = Task(run)
        (self._slow if slow else self._quick).put(task)
        return task

    def replace_stuck(self, seconds: float) -> None:
        """Threads of short tasks that have been busy with one for longer are replaced."""
        before = time.perf_counter() - seconds
        for at, each in enumerate(self._threads):
            task = each.task
            if task is not None and task.began_s < before and not task.is_done:
                each.retired = True
                each.give_way()
                self._threads[at] = _MaskThread(self._quick)


class _MaskThread:
    """Runs the tasks of a queue until it is retired."""

    def __init__(self, tasks: SimpleQueue[Task]) -> None:
        self._tasks = tasks
        self.task: Task | None = None
        self.retired = False
        self._thread = threading.Thread(target=self._serve, name="faser-masks", daemon=True)
        self._thread.start()

    def give_way(self) -> None:
        """Lower the priority of the thread; on Linux each has its own."""
        assert self._thread.native_id is not None, "it has been started"
        with contextlib.suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, self._thread.native_id, _SLOW_NICE)

    def _serve(self) -> None:
        while not self.retired:
            self.task = None
            self.task = self._tasks.get()
            self.task.run()
