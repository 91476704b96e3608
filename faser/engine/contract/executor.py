"""The executor seam: a StepPlan goes in, the model runs, a StepResult comes out. See model_executor. No torch."""

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
        """Apply the plan's releases and starts, run its rows; results come in the order of plan.rows."""
        ...

    def run_overlapped(self, plan: StepPlan, ahead: DraftPlan) -> tuple[StepResult, Drafts]:
        """Run the plan, and meanwhile draft what continues its own drafts; both are done at the return."""
        ...

    def launch(self, plan: StepPlan) -> "LaunchedStep":
        """Begin a plan without drafts, all of whose sequences are plain.

        Inputs that are NEXT come from the launch before, which need not have been collected.
        """
        ...

    def collect(self, launched: "LaunchedStep") -> StepResult:
        """What a launched plan brought; in the order of the launches."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedStep:
    """A step that has begun. Executors add what they need to end it."""

    plan: StepPlan
    began_s: float
