"""RefreshMetrics: the series of heads that are refreshed while they serve."""

from collections.abc import Sequence
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge

LearnerState = Literal["off", "waiting", "learning", "paused", "dead"]
RefreshOutcome = Literal["accepted", "refused", "failed"]
KeptAnswer = Literal["kept", "withheld"]


class RefreshMetrics:
    """The series of one model. names, labels: names and values of the labels that all its series carry."""

    def __init__(self, registry: CollectorRegistry, names: Sequence[str], labels: Sequence[str]) -> None:
        def counters(name: str, meaning: str, values: tuple[str, ...]) -> dict[str, Counter]:
            family = Counter(name, meaning, (*names, "outcome"), registry=registry)
            return {value: family.labels(*labels, value) for value in values}

        self._refreshes = counters(
            "faser_head_refreshes",
            "Heads trained on the traffic: accepted ones draft, refused ones were not better.",
            get_args(RefreshOutcome),
        )
        self._answers = counters(
            "faser_learner_answers",
            "Finished answers of a server that refreshes its head: kept to learn from, or withheld.",
            get_args(KeptAnswer),
        )
        self._tokens = Counter(
            "faser_learner_tokens", "Tokens of answers in all rounds of learning.", names, registry=registry
        ).labels(*labels)
        self._deaths = Counter(
            "faser_learner_deaths", "Learners that ended by themselves.", names, registry=registry
        ).labels(*labels)
        family = Gauge("faser_learner_state", "1 for the current state.", (*names, "state"), registry=registry)
        self._states = {state: family.labels(*labels, state) for state in get_args(LearnerState)}
        self.learner("off")

    def refresh(self, outcome: RefreshOutcome) -> None:
        """A round has ended so."""
        self._refreshes[outcome].inc()

    def answer(self, outcome: KeptAnswer) -> None:
        """An answer was finished."""
        self._answers[outcome].inc()

    def learned(self, num_tokens: int) -> None:
        """A round has learned from answers that have num_tokens tokens."""
        self._tokens.inc(num_tokens)

    def died(self) -> None:
        """A learner has ended by itself."""
        self._deaths.inc()

    def learner(self, state: LearnerState) -> None:
        for each, gauge in self._states.items():
            gauge.set(each == state)
