"""The Executor seam: a StepPlan goes in, the model runs, a StepResult comes out. Implemented by ModelExecutor."""

from dataclasses import dataclass
from typing import Protocol

from faser.engine.contract.plan import DraftPlan, Drafts, StepPlan, StepResult


class Executor(Protocol):
    """Runs plans, one at a time, in the order of their step numbers."""

    def draft(self, plan: DraftPlan, *, during: StepPlan | None = None) -> Drafts:
        """Draft tokens for the requests of the plan. Changes no sequence.

        during: the step that the drafts overlap; it is applied first, and run_overlapped follows with it.
        """
        ...

    def run(self, plan: StepPlan) -> StepResult:
        """Apply the plan's releases and starts and run its rows. Results come in the order of plan.rows."""
        ...

    def run_overlapped(self, plan: StepPlan, draft_plan: DraftPlan) -> tuple[StepResult, Drafts]:
        """Run the plan and concurrently draft tokens that continue its own drafts; returns when both are done."""
        ...

    def launch(self, plan: StepPlan) -> "LaunchedStep":
        """Begin a plan without drafts, all of whose sequences need only logits, and do not wait for it.

        PLACEHOLDER inputs are tokens of the launch before, which need not have been collected.
        """
        ...

    def collect(self, launched: "LaunchedStep") -> StepResult:
        """Wait for a launched plan. Plans are collected in the order of their launches."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedStep:
    """A step in flight. Executors add fields for what they need to end it."""

    plan: StepPlan
    began_s: float
