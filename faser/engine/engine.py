"""The engine's step: draft (with speculation), plan, run, commit.

    propose ──▶ draft ──▶ plan ──▶ run ──▶ commit                drafts before the step
                          plan ──▶ propose ──▶ run ──▶ commit    overlapped: the drafter works while the step runs
                                               draft

A GPU works on its own, so steps are scheduled asynchronously. After one without drafts the engine launches the
next step, prompts and newcomers included, before it reads the tokens of the one in flight. After one with drafts
of a draft model it launches the next drafts, which begin behind whatever the device finds the step to accept.

    plan k ──▶ launch k ──▶ propose k + 1 ──▶ launch drafts k + 1 ──▶ collect k ──▶ commit k ──▶ plan k + 1 ...
"""

import time
from collections.abc import Sequence
from dataclasses import replace

from faser.engine.contract.companion import Companion
from faser.engine.contract.drafts import Drafts
from faser.engine.contract.latency_model import Pace
from faser.engine.contract.plan import (
    AdapterMemory,
    DraftPlan,
    Executor,
    LaunchedStep,
    StepDeltas,
    StepPlan,
    StepResult,
)
from faser.engine.control.adapters import NO_ADAPTERS
from faser.engine.control.scheduler import Scheduler
from faser.engine.gap_timer import GapTimer
from faser.engine.step_trace import StepTraceFile
from faser.engine.structure.compiler import GrammarCompiler
from faser.engine.structure.trials import COSTLY, Budget
from faser.errors import RequestError
from faser.types.adapter import Adapter
from faser.types.request import Request
from faser.types.statistics import EngineStats


class Engine:
    """One scheduler, one executor, one thread. AsyncEngine is the interface for the front-end.

    trace: records every step. schedules_async: a step without drafts is launched before the one in flight has
    ended. grammars: None in an engine whose answers have no structure. adapters: None in one whose requests have
    none. companions: work beside the steps, in this order.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        trace: StepTraceFile | None = None,
        *,
        schedules_async: bool = False,
        grammars: GrammarCompiler | None = None,
        adapters: AdapterMemory | None = None,
        companions: Sequence[Companion] = (),
    ) -> None:
        self._companions = companions
        self._grammars = grammars
        self._adapters = adapters
        self._scheduler = scheduler
        self._executor = executor
        self._trace = trace
        self._schedules_async = schedules_async
        self._launched: LaunchedStep | None = None
        self._drafts_ahead = False  # drafts of the next step are in flight
        self._gaps = GapTimer()
        self._num_steps = 0
        self._last_step_rows = 0
        self._last_step_s = 0.0

    def step(self) -> StepDeltas:
        """Run one step and return what it changed; without work, nothing."""
        deltas = self._step()
        for each in self._companions:
            each.stepped(deltas)
        return deltas

    def _step(self) -> StepDeltas:
        began_s = time.perf_counter()
        self._gaps.begin_step()
        if self._launched is not None:
            return self._finish(self._launched, began_s)
        drafts = self._draft()
        plan = self._scheduler.plan()
        if plan is None:
            self._gaps.restart()
            for each in self._companions:
                each.rest()
                if not self._scheduler.has_work():
                    each.idle()
            return StepDeltas()
        if self._schedules_async and self._scheduler.can_schedule_async():
            return self._finish(self._executor.launch(plan), began_s)
        if self._schedules_async and self._executor.drafts_ahead and self._scheduler.drafts.can_follow():
            return self._finish_drafted(self._executor.launch(plan), began_s, drafts)
        overlapped_plan, overlapped_drafts = self._scheduler.drafts.propose_overlapped(plan), None
        if overlapped_plan is None:
            result = self._executor.run(plan)
        else:
            result, overlapped_drafts = self._run_overlapped(plan, overlapped_plan)
        deltas = self._commit(plan, result, overlapped_drafts)
        self._record(
            began_s,
            plan,
            result,
            drafts=drafts,
            overlapped_plan=overlapped_plan,
            overlapped_drafts=overlapped_drafts,
        )
        return deltas

    def _draft(self) -> Drafts | None:
        """Make the drafts of the next step. None: it has none, or they are in flight."""
        if self._drafts_ahead:
            self._drafts_ahead = False
            self._scheduler.drafts.ended(self._executor.end_drafts())
            return None
        drafts = self._scheduler.drafts.propose()
        while isinstance(drafts, DraftPlan):
            found = self._executor.draft(drafts)
            self._gaps.drafted(found)
            drafts = self._scheduler.drafts.drafted(found)
        return drafts

    def _run_overlapped(self, plan: StepPlan, draft_plan: DraftPlan) -> tuple[StepResult, Drafts]:
        """Run the step while the drafter makes the next drafts; drafts from text are looked up before both."""
        if draft_plan.from_text:
            model_plan = self._scheduler.drafts.drafted(self._executor.draft(draft_plan, during=plan))
            assert isinstance(model_plan, DraftPlan)
            draft_plan = model_plan
        result, made = self._executor.run_overlapped(plan, draft_plan)
        drafts = self._scheduler.drafts.drafted(made)
        assert isinstance(drafts, Drafts)
        return result, drafts

    def _finish(self, launched: LaunchedStep, began_s: float) -> StepDeltas:
        """Launch the step after it, if there can be one, and only then wait for this one's tokens."""
        following = self._scheduler.plan_async(launched.late)
        self._launched = None if following is None else self._executor.launch(following)
        result = self._executor.collect(launched)
        deltas = self._commit(launched.plan, result, None)
        self._record(min(began_s, launched.began_s), launched.plan, result)
        return deltas

    def _finish_drafted(self, launched: LaunchedStep, began_s: float, drafts: Drafts | None) -> StepDeltas:
        """Launch the drafts after it, if they can be made without its tokens, and only then wait for these.

        drafts: of the step, if they were made before it.
        """
        following = self._scheduler.drafts.propose_ahead()
        self._drafts_ahead = following is not None and self._executor.draft_ahead(following)
        result = self._executor.collect(launched)
        deltas = self._commit(launched.plan, result, None)
        self._record(min(began_s, launched.began_s), launched.plan, result, drafts=drafts)
        return deltas

    def _commit(self, plan: StepPlan, result: StepResult, overlapped_drafts: Drafts | None) -> StepDeltas:
        """Commit a step whose work has just ended."""
        if result.drafts is not None:
            self._gaps.drafted(result.drafts)
        self._gaps.ran(result, overlapped_drafts)
        deltas = self._scheduler.commit(plan, result, last=self._gaps.last)
        is_idle = self._launched is None and not self._drafts_ahead
        if is_idle and (check := self._scheduler.drafter_check()) is not None:
            self._scheduler.drafter_checked(check, differed=self._executor.rebuild(check))
        if not self.has_work():
            self._gaps.restart()
        return deltas

    def _record(
        self,
        began_s: float,
        plan: StepPlan,
        result: StepResult,
        *,
        drafts: Drafts | None = None,
        overlapped_plan: DraftPlan | None = None,
        overlapped_drafts: Drafts | None = None,
    ) -> None:
        ended_s = time.perf_counter()
        if self._trace is not None:
            self._trace.step(
                began_s,
                ended_s,
                plan,
                result,
                drafts=result.drafts or drafts,
                overlapped_plan=overlapped_plan,
                overlapped_drafts=overlapped_drafts,
            )
        self._num_steps += 1
        self._last_step_rows = plan.num_rows
        self._last_step_s = ended_s - began_s

    def close(self) -> None:
        """End the trace and the companions. No step may follow."""
        if self._trace is not None:
            self._trace.close()
        for each in self._companions:
            each.close()

    def prepare(self, request: Request, budget: Budget = COSTLY) -> None:
        """Compile what the answers to a request must match. May be called from any thread, before `add`.

        Raises what GrammarCompiler.hold raises.
        """
        asked = request.sampling.structured_output
        if asked is None:
            return
        if self._grammars is None:
            raise RequestError("this engine has no grammars", param=asked.param)
        self._grammars.hold(asked, budget)

    def load_adapter(self, adapter: Adapter) -> None:
        """Load an adapter before requests with it are added, in any thread. Raises RequestError."""
        if self._adapters is None:
            raise RequestError(NO_ADAPTERS, param="model")
        self._adapters.load_adapter(adapter)

    def drop_adapter(self, digest: str) -> None:
        """Free an adapter that is not in use, between two steps."""
        assert self._adapters is not None, "an engine without adapters has loaded none"
        self._scheduler.forget_adapter(digest)
        self._adapters.drop_adapter(digest)
        for each in self._companions:
            each.adapter_dropped(digest)

    def adapters_in_use(self) -> set[str]:
        """Return the digests of the adapters of accepted requests, and of rows in flight."""
        return self._scheduler.adapters_in_use()

    def add(self, request: Request) -> None:
        """Accept a request, whose adapter is loaded. Raises RequestError if the engine can never serve it."""
        for each in self._companions:
            request = each.admit(request)
        self._scheduler.add(request)

    def reclassify(self, request: Request) -> None:
        """Serve a request that still waits with other targets and limits. See Scheduler.reclassify."""
        self._scheduler.reclassify(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Drop a request, or one of its samples. Unknown ones have just ended and are ignored."""
        for each in self._companions:
            each.abort(request_id, index)
        self._scheduler.abort(request_id, index)

    def use_policy(
        self,
        name: str,
        gamma: int | None = None,
        *,
        forget: bool = True,
        overlap: str | None = None,
    ) -> None:
        """Change the speculation policy from the next step on.

        gamma: the length of `fixed`, or another policy's cap. forget: drop what was learnt about acceptance.
        overlap: a value as for the setting spec_overlap; None restores the setting.
        Raises ConfigError for what this engine cannot do.
        """
        self._scheduler.use_policy(name, gamma, forget=forget, overlap=overlap)

    def has_work(self) -> bool:
        return self._launched is not None or self._scheduler.has_work()

    def idle_wait_s(self) -> float | None:
        """Seconds after which a step has something to do even if no request arrives; None: it has not."""
        return min((wait_s for each in self._companions if (wait_s := each.wait_s()) is not None), default=None)

    def pace(self) -> Pace | None:
        """Return how fast the engine computes now; None: it neither drafts nor has targets, and does not know."""
        return self._scheduler.pace()

    def uncomputed_prompts(self) -> dict[str, int]:
        """Tokens that are left to compute of prompts that have begun, by request."""
        return self._scheduler.uncomputed_prompts()

    def stats(self) -> EngineStats:
        """The scheduler's snapshot and the engine's steps with their time."""
        stats = replace(
            self._scheduler.stats(),
            num_steps=self._num_steps,
            last_step_rows=self._last_step_rows,
            last_step_s=self._last_step_s,
        )
        for each in self._companions:
            stats = each.add_to(stats)
        return stats
