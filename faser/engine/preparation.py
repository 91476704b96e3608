"""Preparation: the grammars of requests are compiled in threads, off the step loop, and fairly.

There are two lines with a thread each. A request joins the quick line, where its grammar gets the budget QUICK;
one that needs more joins the costly line and gets COSTLY. The costly line's thread helps with the quick line
when it has nothing to do, never the other way round, so an ordinary grammar never waits for a costly one to end.
In both lines tenants take turns, and a tenant has one grammar in work at a time: a hundred grammars of one
tenant delay another tenant's by one. A request that is aborted leaves at once; one that has waited for WAIT_S is
refused with Retry-After.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from faser.engine.contract.messages import Abort
from faser.engine.structure.trials import COSTLY, QUICK, Budget, TrialUnwantedError
from faser.errors import GrammarCostError, OverloadError, RequestError
from faser.types.request import Request

WAIT_S = 30.0
_END_S = 5.0  # for a grammar that is being compiled
_STACK_BYTES = 8 << 20  # twice what trials have, whatever the system's default is


@dataclass(frozen=True, slots=True)
class Prepared:
    """error: why the request cannot be served; None: it can be added."""

    request: Request
    error: RequestError | OverloadError | None


@dataclass(slots=True, eq=False)
class _Job:
    request: Request
    came_s: float
    aborts: list[Abort] = field(default_factory=list)
    is_aborted: bool = False  # as a whole


class Preparation:
    """prepare: called in a thread; raises RequestError. put: takes the message, from that thread.

    now: the clock, in seconds. Its other methods belong to one thread.
    """

    def __init__(
        self,
        prepare: Callable[[Request, Budget], None],
        put: Callable[[Prepared], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prepare = prepare
        self._put = put
        self._now = now
        self._jobs: dict[str, _Job] = {}  # not ended
        self._quick, self._costly = _Line(QUICK), _Line(COSTLY)
        self._changed = threading.Condition()  # guards the lines
        self._is_closed = False
        self._threads: list[threading.Thread] = []
        before = threading.stack_size(_STACK_BYTES)
        try:
            self._start("quick", [self._quick])
            self._start("costly", [self._costly, self._quick])
        finally:
            threading.stack_size(before)

    def begin(self, request: Request) -> None:
        job = self._jobs[request.request_id] = _Job(request, self._now())
        self._join(self._quick, job)

    def abort(self, message: Abort) -> bool:
        """Abort a request that is being prepared, at its end; return whether it is being prepared.

        A whole request that still waits has no end: it is dropped here.
        """
        job = self._jobs.get(message.request_id)
        if job is None:
            return False
        job.aborts.append(message)
        if message.index is None:
            job.is_aborted = True
            with self._changed:
                if self._quick.remove(job) or self._costly.remove(job):
                    del self._jobs[message.request_id]
        return True

    def end(self, request: Request) -> list[Abort]:
        """The request has been prepared. Returns what was aborted of it meanwhile."""
        return self._jobs.pop(request.request_id).aborts

    def close(self) -> None:
        """End the threads; what is being prepared is dropped.

        They are waited for: the last thread that refers to the engine frees its tensors, which aborts the process
        once the interpreter is ending.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        until_s = time.monotonic() + _END_S
        for each in self._threads:
            each.join(max(0.0, until_s - time.monotonic()))

    def _start(self, name: str, lines: "list[_Line]") -> None:
        thread = threading.Thread(target=self._work, args=(lines,), name=f"faser-preparation-{name}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _join(self, line: "_Line", job: _Job) -> None:
        with self._changed:
            line.add(job)
            self._changed.notify_all()

    def _work(self, lines: "list[_Line]") -> None:
        while True:
            with self._changed:
                while (taken := _take(lines)) is None and not self._is_closed:
                    self._changed.wait()
                if taken is None or self._is_closed:
                    return
            line, job = taken
            self._run(line, job)
            with self._changed:
                line.working.discard(job.request.tenant)
                self._changed.notify_all()

    def _run(self, line: "_Line", job: _Job) -> None:
        error: RequestError | OverloadError | None = None
        try:
            if not self._is_wanted(job):
                raise TrialUnwantedError
            self._prepare(job.request, replace(line.budget, is_wanted=lambda: self._is_wanted(job)))
        except TrialUnwantedError:
            error = OverloadError(
                f"the grammar was not compiled within {WAIT_S:.0f} s, since costly grammars were before it; "
                "send fewer of them at a time, or simpler ones",
                retry_after_s=round(WAIT_S),
            )
        except GrammarCostError as found:
            if line is self._quick:
                self._join(self._costly, job)
                return
            error = found
        except (RequestError, OverloadError) as found:
            error = found
        except Exception as found:  # a fault of ours; its request fails, and no other
            error = RequestError(f"the structured output cannot be prepared: {type(found).__name__}: {found}")
        self._put(Prepared(job.request, error))

    def _is_wanted(self, job: _Job) -> bool:
        return not (job.is_aborted or self._is_closed or self._now() - job.came_s > WAIT_S)


class _Line:
    """Requests that wait, by tenant, in the order of the tenants' turns. budget: of each."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.working: set[str] = set()  # tenants with a request in work
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()  # none is empty

    def add(self, job: _Job) -> None:
        self._waiting.setdefault(job.request.tenant, deque()).append(job)

    def remove(self, job: _Job) -> bool:
        """Remove a job; return whether it was waiting here."""
        tenant = job.request.tenant
        jobs = self._waiting.get(tenant)
        if jobs is None or job not in jobs:
            return False
        jobs.remove(job)
        if not jobs:
            del self._waiting[tenant]
        return True

    def take(self) -> _Job | None:
        """The first request of the first tenant that has none in work; the tenant's next turn is the last one."""
        tenant = next((each for each in self._waiting if each not in self.working), None)
        if tenant is None:
            return None
        jobs = self._waiting.pop(tenant)
        job = jobs.popleft()
        if jobs:
            self._waiting[tenant] = jobs
        self.working.add(tenant)
        return job


def _take(lines: list[_Line]) -> tuple[_Line, _Job] | None:
    return next(((line, job) for line in lines if (job := line.take()) is not None), None)
