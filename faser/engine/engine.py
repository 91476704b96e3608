"""The engine: plan, run, commit. Nothing else happens in a step."""

from faser.engine.executor import Executor
from faser.engine.plan import SequenceDelta
from faser.engine.scheduler import Scheduler
from faser.types import EngineStats, Request


class Engine:
    """One scheduler, one executor, one thread. See AsyncEngine for the face that others use."""

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self._scheduler = scheduler
        self._executor = executor

    def step(self) -> tuple[SequenceDelta, ...]:
        """Run one step and say what it changed; nothing to do changes nothing."""
        plan = self._scheduler.plan()
        if plan is None:
            return ()
        result = self._executor.run(plan)
        return tuple(self._scheduler.commit(plan, result))

    def add(self, request: Request) -> None:
        """Accept a request. Raises RequestError if it can never be served."""
        self._scheduler.add(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Drop a request, or one of its samples; unknown ones are fine (they have just ended)."""
        self._scheduler.abort(request_id, index)

    def has_work(self) -> bool:
        return self._scheduler.has_work()

    def stats(self) -> EngineStats:
        return self._scheduler.stats()
