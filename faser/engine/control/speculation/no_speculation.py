"""NoSpeculation stands in for SpeculationControl in an engine without a drafter: no step has drafts."""

from typing import NoReturn

from faser.engine.control.speculation.learning import StepPrediction
from faser.errors import ConfigError
from faser.types.answer import StepTrace

_NO_PREDICTION = StepPrediction(predicted_s=0.0, verified=None)


class NoSpeculation:
    """Answers what the scheduler and DraftPlanner ask SpeculationControl; see there."""

    speculates = drafts_overlapped = can_follow = in_rounds = False
    cap = 0

    def use_policy(self, name: str, *_: object, **__: object) -> NoReturn:
        raise ConfigError(f"policy is {name!r}; this engine was built without a drafter")

    def passes_over(self, *_: object, **__: object) -> bool:
        return True

    def may_overlap(self, _: object) -> bool:
        return False

    def decide(self, *_: object, **__: object) -> None:
        """Nothing is drafted."""

    drafted = chunks = decide_overlapped = drafter_check = summary = stats = decide

    def learn(self, *_: object, **__: object) -> None:
        """Nothing is learned."""

    start = release = settle = arrived = keep = drafter_checked = learn

    def launch(self, _: object) -> StepPrediction:
        return _NO_PREDICTION

    def trace(self, *_: object, **__: object) -> StepTrace:
        return StepTrace()
