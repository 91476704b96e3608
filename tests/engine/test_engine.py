"""The order of a step: which calls the engine makes of its scheduler and its executor, and what it counts."""

from faser.engine.contract.drafts import Drafts, empty_table
from faser.engine.contract.plan import (
    DrafterCheck,
    DraftPlan,
    DraftRequest,
    LaunchedStep,
    SequenceRows,
    StepDeltas,
    StepPlan,
    StepResult,
    StepRows,
    StepSpan,
)
from faser.engine.engine import Engine
from faser.types.statistics import EngineStats
from tests.engine.driving import Driver, request

REQUESTS = (DraftRequest(slot=0, max_tokens=2, new_blocks=()), DraftRequest(slot=1, max_tokens=2, new_blocks=()))
TEXT_PLAN = DraftPlan(step=1, width=2, requests=REQUESTS, from_text=True)
MODEL_PLAN = DraftPlan(step=1, width=2, requests=REQUESTS[1:])
PLAN = StepPlan(
    step=1,
    released=(),
    started=(),
    rows=StepRows.of(SequenceRows(slot=0, start=3, token_ids=(5,), samples=True)),
)
RESULT = StepResult(step=1, counts=[1], token_ids=[6], run_s=0.0)
LOOKED_UP, FROM_MODEL, SELECTED = (
    Drafts(step=1, table=empty_table([0], method, 2), run_s=0.0) for method in ("suffix", "draft_model", "ngram")
)


class ScriptedScheduler:
    """Answers as it was set up and records every call with its arguments. answers: of drafted, in turn.

    spans: that came with all commits. has_more: what has_work says.
    """

    def __init__(
        self,
        calls: list[tuple[object, ...]],
        answers: list[Drafts | DraftPlan],
        *,
        before: DraftPlan | None = None,
        overlapped: DraftPlan | None = None,
    ) -> None:
        self._calls = calls
        self._answers = answers
        self._before = before
        self._overlapped = overlapped
        self.spans: list[StepSpan | None] = []
        self.has_more = True
        self.check: DrafterCheck | None = None
        self.drafts = self

    def propose(self) -> DraftPlan | None:
        self._calls.append(("propose",))
        return self._before

    def drafted(self, drafts: Drafts) -> Drafts | DraftPlan:
        self._calls.append(("drafted", drafts))
        return self._answers.pop(0)

    def plan(self) -> StepPlan:
        self._calls.append(("plan",))
        return PLAN

    def propose_overlapped(self, plan: StepPlan) -> DraftPlan | None:
        self._calls.append(("propose_overlapped", plan))
        return self._overlapped

    def has_work(self) -> bool:
        return self.has_more

    def drafter_check(self) -> DrafterCheck | None:
        return self.check

    def drafter_checked(self, check: DrafterCheck, *, differed: bool) -> None:
        self._calls.append(("drafter_checked", check, differed))
        self.check = None

    def commit(
        self,
        plan: StepPlan,
        result: StepResult,
        *,
        last: StepSpan | None = None,
    ) -> StepDeltas:
        self._calls.append(("commit", plan, result))
        self.spans.append(last)
        return StepDeltas()


class ScriptedExecutor:
    """Drafts LOOKED_UP for plans from text and FROM_MODEL for others; records every call."""

    def __init__(self, calls: list[tuple[object, ...]]) -> None:
        self._calls = calls

    def draft(self, plan: DraftPlan, *, during: StepPlan | None = None) -> Drafts:
        self._calls.append(("draft", plan, during))
        return LOOKED_UP if plan.from_text else FROM_MODEL

    def rebuild(self, check: DrafterCheck) -> bool:
        self._calls.append(("rebuild", check))
        return True

    def run(self, plan: StepPlan) -> StepResult:
        self._calls.append(("run", plan))
        return RESULT

    def run_overlapped(self, plan: StepPlan, draft_plan: DraftPlan) -> tuple[StepResult, Drafts]:
        self._calls.append(("run_overlapped", plan, draft_plan))
        return RESULT, FROM_MODEL

    def launch(self, plan: StepPlan) -> LaunchedStep:
        raise AssertionError(f"step {plan.step} is not launched")

    def collect(self, launched: LaunchedStep) -> StepResult:
        raise AssertionError(f"step {launched.plan.step} was not launched")


def calls_of_a_step(
    answers: list[Drafts | DraftPlan], *, before: DraftPlan | None = None, overlapped: DraftPlan | None = None
) -> list[tuple[object, ...]]:
    calls: list[tuple[object, ...]] = []
    scheduler = ScriptedScheduler(calls, answers, before=before, overlapped=overlapped)
    Engine(scheduler, ScriptedExecutor(calls)).step()  # type: ignore[arg-type]
    assert not answers
    return calls


def test_without_speculation_a_step_is_plan_run_commit() -> None:
    assert calls_of_a_step([]) == [
        ("propose",),
        ("plan",),
        ("propose_overlapped", PLAN),
        ("run", PLAN),
        ("commit", PLAN, RESULT),
    ]


def test_a_drafter_is_compared_with_a_cold_one_after_the_step() -> None:
    calls: list[tuple[object, ...]] = []
    scheduler = ScriptedScheduler(calls, [])
    scheduler.check = check = DrafterCheck(method="draft_model", slot=3)
    engine = Engine(scheduler, ScriptedExecutor(calls))  # type: ignore[arg-type]
    engine.step()
    assert calls[-3:] == [("commit", PLAN, RESULT), ("rebuild", check), ("drafter_checked", check, True)]


def test_one_drafter_is_asked_once_before_the_step() -> None:
    assert calls_of_a_step([FROM_MODEL], before=MODEL_PLAN)[:4] == [
        ("propose",),
        ("draft", MODEL_PLAN, None),
        ("drafted", FROM_MODEL),
        ("plan",),
    ]


def test_the_model_is_asked_after_the_text_for_what_the_scheduler_leaves_to_it() -> None:
    assert calls_of_a_step([MODEL_PLAN, SELECTED], before=TEXT_PLAN)[:6] == [
        ("propose",),
        ("draft", TEXT_PLAN, None),
        ("drafted", LOOKED_UP),
        ("draft", MODEL_PLAN, None),
        ("drafted", FROM_MODEL),
        ("plan",),
    ]


def test_one_drafter_drafts_while_the_step_runs() -> None:
    assert calls_of_a_step([FROM_MODEL], overlapped=MODEL_PLAN)[2:] == [
        ("propose_overlapped", PLAN),
        ("run_overlapped", PLAN, MODEL_PLAN),
        ("drafted", FROM_MODEL),
        ("commit", PLAN, RESULT),
    ]


def test_text_is_looked_up_before_the_model_drafts_while_the_step_runs() -> None:
    """The look-up names the step, whose releases and starts come first."""
    assert calls_of_a_step([MODEL_PLAN, SELECTED], overlapped=TEXT_PLAN)[2:] == [
        ("propose_overlapped", PLAN),
        ("draft", TEXT_PLAN, PLAN),
        ("drafted", LOOKED_UP),
        ("run_overlapped", PLAN, MODEL_PLAN),
        ("drafted", FROM_MODEL),
        ("commit", PLAN, RESULT),
    ]


def test_the_gap_before_a_step_goes_with_its_commit_unless_there_was_nothing_to_do() -> None:
    scheduler = ScriptedScheduler([], [])
    engine = Engine(scheduler, ScriptedExecutor([]))  # type: ignore[arg-type]
    for has_more in (True, True, False, True, True):
        scheduler.has_more = has_more
        engine.step()
    assert [span is None for span in scheduler.spans] == [True, False, False, True, False]
    assert all(span.seconds >= span.gap_s >= 0 for span in scheduler.spans if span is not None)


def test_steps_are_counted_with_the_rows_of_the_last() -> None:
    driver = Driver()
    engine = Engine(driver.scheduler, driver.executor)
    engine.add(request("a", [1, 2, 3], max_tokens=2))
    assert engine.step()
    assert (engine.stats().num_steps, engine.stats().last_step_rows) == (1, 3)
    assert engine.step()
    assert not engine.has_work()
    assert engine.step() == StepDeltas()
    stats: EngineStats = engine.stats()
    assert (stats.num_steps, stats.last_step_rows) == (2, 1)
