"""The engine: propose and draft, where anybody speculates; plan, run, commit. Nothing else happens in a step.

A step that drafts ahead proposes after it has planned, and drafts while it runs. Where the executor's device works
on its own, plain steps are launched one ahead: the next one is under way before the tokens of the last are read.
"""

import time
from dataclasses import replace

from faser.engine.contract.executor import Executor, LaunchedStep
from faser.engine.contract.plan import DraftPlan, Drafts, SequenceDelta, StepPlan, StepResult
from faser.engine.control.scheduler import Scheduler
from faser.engine.step_trace import StepTrace
from faser.types import EngineStats, Request


class Engine:
    """One scheduler, one executor, one thread. See AsyncEngine for the face that others use.

    trace: is told of every step. schedules_async: plain steps are launched one ahead.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        trace: StepTrace | None = None,
        *,
        schedules_async: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._trace = trace
        self._launches_ahead = schedules_async
        self._launched: LaunchedStep | None = None
        self._num_steps = 0
        self._last_step_rows = 0
        self._last_step_s = 0.0

    def step(self) -> tuple[SequenceDelta, ...]:
        """Run one step and say what it changed; nothing to do changes nothing."""
        began_s = time.perf_counter()
        if self._launched is not None:
            return self._go_on(self._launched, began_s)
        drafts: DraftPlan | Drafts | None = self._scheduler.propose()
        while isinstance(drafts, DraftPlan):
            drafts = self._scheduler.drafted(self._executor.draft(drafts))
        plan = self._scheduler.plan(drafts)
        if plan is None:
            return ()
        if self._launches_ahead and self._scheduler.can_schedule_async():
            return self._go_on(self._executor.launch(plan), began_s)
        ahead, beside = self._scheduler.propose_overlapped(plan), None
        if ahead is None:
            result = self._executor.run(plan)
        else:
            result, beside = self._run_overlapped(plan, ahead)
        deltas = tuple(self._scheduler.commit(plan, result, beside))
        self._note(began_s, plan, result, before=drafts, ahead=ahead, beside=beside)
        return deltas

    def _run_overlapped(self, plan: StepPlan, requested: DraftPlan) -> tuple[StepResult, Drafts]:
        """Run the step while the drafter makes the next drafts; drafts from text are looked up before."""
        if not requested.from_text:
            return self._executor.run_overlapped(plan, requested)
        model_plan = self._scheduler.drafted(self._executor.draft(requested, during=plan))
        assert isinstance(model_plan, DraftPlan)
        result, model_drafts = self._executor.run_overlapped(plan, model_plan)
        drafts = self._scheduler.drafted(model_drafts)
        assert isinstance(drafts, Drafts)
        return result, drafts

    def _go_on(self, launched: LaunchedStep, began_s: float) -> tuple[SequenceDelta, ...]:
        """Launch the step behind it, if there can be one, and only then ask what this one brought."""
        behind = self._scheduler.plan_async()
        self._launched = None if behind is None else self._executor.launch(behind)
        result = self._executor.collect(launched)
        deltas = tuple(self._scheduler.commit(launched.plan, result))
        self._note(min(began_s, launched.began_s), launched.plan, result)
        return deltas

    def _note(
        self,
        began_s: float,
        plan: StepPlan,
        result: StepResult,
        *,
        before: Drafts | None = None,
        ahead: DraftPlan | None = None,
        beside: Drafts | None = None,
    ) -> None:
        """A step is over."""
        ended_s = time.perf_counter()
        if self._trace is not None:
            self._trace.step(began_s, ended_s, plan, result, before=before, ahead=ahead, beside=beside)
        self._num_steps += 1
        self._last_step_rows = plan.num_rows
        self._last_step_s = ended_s - began_s

    def close(self) -> None:
        """No step will follow: what is written along is brought to its end."""
        if self._trace is not None:
            self._trace.close()

    def add(self, request: Request) -> None:
        """Accept a request. Raises RequestError if it can never be served."""
        self._scheduler.add(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Drop a request, or one of its samples; unknown ones are fine (they have just ended)."""
        self._scheduler.abort(request_id, index)

    def use_policy(
        self,
        name: str,
        gamma: int | None = None,
        *,
        forget: bool = True,
        overlap: str | None = None,
    ) -> None:
        """Let another policy of speculation decide from the next step on.

        gamma: what `fixed` drafts, or another policy's cap. forget: with nothing learned yet about acceptance.
        overlap: as of the setting spec_overlap; None: this setting.
        Raises ConfigError where that is not possible.
        """
        self._scheduler.use_policy(name, gamma, forget=forget, overlap=overlap)

    def has_work(self) -> bool:
        return self._launched is not None or self._scheduler.has_work()

    def stats(self) -> EngineStats:
        """The scheduler's snapshot, with the steps and their time."""
        return replace(
            self._scheduler.stats(),
            num_steps=self._num_steps,
            last_step_rows=self._last_step_rows,
            last_step_s=self._last_step_s,
        )
