"""Usage in an answer: tokens, how much of a prediction it repeats, and what speculation did for it.

Usage and SpeculationReport gather while outputs arrive. Which drafts there were, and which were accepted, depends
on the past answers that the request may draft from: a request that shares them with other clients gets no
counts, nor how many tokens of its prompt were cached. Without a drafter there are no summaries, and no metrics.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from faser.engine.client.output_stream import Timing
from faser.optional import maybe, present
from faser.types.answer import OutputDelta, SpeculationSummary, StepTrace
from faser.types.request import NO_TARGETS, SpeculationParams

_RUN = 3  # shorter runs of equal tokens are taken for coincidence
NONE, SUMMARY, DETAILED = "none", "summary", "detailed"
WITHHELD = (
    "draft counts are not shown to anonymous requests, since they could reveal other clients' answers. "
    "Send a cache_salt or use an API key to see them."
)
ACCEPTED, CORRECTED, BONUS, PLAIN = "accepted", "corrected", "bonus", "plain"


class Usage:
    """num_prompt_tokens: per prompt; a prompt counts once, whatever its number of samples.

    predicted: token ids of the request's prediction; None: it has none, and the usage does not mention one.
    shares_cache: with clients that must not learn of each other. The cached tokens would tell what other clients'
        prompts were, so they are null.
    on_tokens: is called with the number of tokens whenever some are counted. speculation: gathers with it.
    timing: of the only request, if the answer tells its times.
    """

    def __init__(
        self,
        num_prompt_tokens: list[int],
        *,
        on_tokens: Callable[[int], None],
        speculation: "SpeculationReport",
        predicted: tuple[int, ...] | None = None,
        shares_cache: bool = False,
    ) -> None:
        self.speculation = speculation
        self.timing: Timing | None = None
        self._shares_cache = shares_cache
        self._prompt_tokens = sum(num_prompt_tokens)
        self._cached_tokens = [0] * len(num_prompt_tokens)
        self._completion_tokens = 0
        self._reasoning_tokens: dict[int, int] = {}
        self._prediction = maybe(PredictionUsage, predicted)
        self._on_tokens = on_tokens

    def count_prompts(self) -> None:
        """The engine has accepted the prompts; as_json counts them in any case."""
        self._on_tokens(self._prompt_tokens)

    def count_cached(self, prompt_index: int, num_tokens: int) -> None:
        self._cached_tokens[prompt_index] = max(self._cached_tokens[prompt_index], num_tokens)

    def count(self, choice_index: int, delta: OutputDelta) -> None:
        self._completion_tokens += len(delta.token_ids)
        self._on_tokens(len(delta.token_ids))
        self.speculation.take(choice_index, delta)
        if self._prediction is not None:
            self._prediction.take(choice_index, delta.token_ids)

    def count_reasoning(self, choice_index: int, num_tokens: int) -> None:
        """num_tokens: of the choice's reasoning so far; they are among its completion tokens."""
        self._reasoning_tokens[choice_index] = num_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return self._prompt_tokens

    @property
    def num_completion_tokens(self) -> int:
        return self._completion_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Return the number of cached prompt tokens, whether or not the client is told."""
        return sum(self._cached_tokens)

    @property
    def num_reasoning_tokens(self) -> int:
        return sum(self._reasoning_tokens.values())

    def as_json(self) -> dict[str, Any]:
        details = {"reasoning_tokens": self.num_reasoning_tokens}
        cached = None if self._shares_cache else {"cached_tokens": self.num_cached_tokens}
        if self._prediction is not None:
            details["accepted_prediction_tokens"] = self._prediction.accepted
            details["rejected_prediction_tokens"] = self._prediction.rejected
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": cached,
            "completion_tokens_details": details,
        }

    def metrics(self) -> dict[str, Any]:
        """{"metrics": …}: the times of the request and what speculation did; empty without either."""
        found: dict[str, Any] = self.speculation.as_json().get("metrics", {})
        if self.timing is not None:
            found = times_json(self.timing, self._completion_tokens) | found
        return {"metrics": found} if found else {}


def times_json(timing: Timing, num_tokens: int) -> dict[str, float]:
    """One answer's times as vLLM reports them (pull request 46768); without those that it does not have.

    The first token's time counts from the step that took the request up; queue_time_ms is the time before that.
    """
    moments = present((timing.scheduled_s, timing.first_token_s, timing.last_token_s.get(0)))
    if len(moments) < 3:
        return {}
    scheduled_s, first_s, last_s = moments
    found = {
        "time_to_first_token_ms": 1e3 * (first_s - scheduled_s),
        "generation_time_ms": 1e3 * (last_s - first_s),
        "queue_time_ms": 1e3 * max(0.0, scheduled_s - timing.arrival_s),
    }
    if num_tokens > 1:
        found["mean_itl_ms"] = found["generation_time_ms"] / (num_tokens - 1)
    if last_s > scheduled_s:
        found["tokens_per_second"] = num_tokens / (last_s - scheduled_s)
    return found


class PredictionUsage:
    """Counts accepted and rejected prediction tokens, for the usage of an answer.

    A predicted token is accepted if it lies in a run of three predicted tokens that occurs in the answer. Only
    the texts decide: the numbers depend neither on the drafter nor on the load of the server. Each token of an
    answer costs the same time.
    """

    def __init__(self, predicted: tuple[int, ...]) -> None:
        self._num_predicted = len(predicted)
        self._run = max(1, min(_RUN, len(predicted)))
        self._starts: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for start in range(len(predicted) - self._run + 1):
            self._starts[predicted[start : start + self._run]].append(start)
        self._answers: defaultdict[Hashable, _Answer] = defaultdict(_Answer)

    def take(self, answer_key: Hashable, token_ids: Iterable[int]) -> None:
        """Add the next tokens of one answer."""
        answer = self._answers[answer_key]
        for token_id in token_ids:
            answer.recent = (*answer.recent, token_id)[-self._run :]
            if answer.recent in self._starts and answer.recent not in answer.matched:
                answer.matched.add(answer.recent)
                for start in self._starts[answer.recent]:
                    answer.accepted.update(range(start, start + self._run))

    @property
    def accepted(self) -> int:
        return sum(len(each.accepted) for each in self._answers.values())

    @property
    def rejected(self) -> int:
        return len(self._answers) * self._num_predicted - self.accepted


@dataclass(slots=True)
class _Answer:
    """One answer so far.

    recent: its last tokens, at most a run. matched: runs of the prediction that occur in it.
    accepted: indices in the prediction of the tokens in these runs.
    """

    recent: tuple[int, ...] = ()
    matched: set[tuple[int, ...]] = field(default_factory=set)
    accepted: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationCounts:
    """Sums over choices; numbers of tokens, but for steps and gamma_mean."""

    policy: str
    steps: int
    gamma_mean: float
    drafted: int
    pruned: int
    verified: int
    accepted: int
    wasted: int


class SpeculationReport:
    """The report of one answer.

    params: the effective ones. level: detail of vLLM's part. cap: the server's. shares_cache: of the requests.
    """

    def __init__(
        self, params: SpeculationParams, *, num_choices: int, level: str, cap: int, shares_cache: bool = False
    ) -> None:
        self._shares_cache = shares_cache
        self._params = params
        self._num_choices = num_choices
        self._level = level
        self._cap = cap
        self._summaries: dict[int, SpeculationSummary] = {}

    def take(self, index: int, delta: OutputDelta) -> None:
        """index: of the choice."""
        if delta.speculation is not None:
            self._summaries[index] = delta.speculation

    def counts(self) -> SpeculationCounts | None:
        """For the operator, whether or not the client gets it. None: no sample with a summary has ended."""
        summaries = list(self._summaries.values())
        return SpeculationCounts(policy=summaries[0].policy, **_counts(*summaries)) if summaries else None

    def as_json(self) -> dict[str, Any]:
        """{"metrics": …}; empty without summaries."""
        if not self._summaries:
            return {}
        metrics: dict[str, Any] = {"faser": self._faser()}
        if self._level != NONE:
            reported = self._num_choices == 1 and not self._shares_cache
            metrics["speculative_decoding"] = (
                acceptance(self._summaries[0], self._cap, detailed=self._level == DETAILED) if reported else None
            )
        return {"metrics": metrics}

    def _faser(self) -> dict[str, Any]:
        """Sums over the choices; if there are several, also the numbers of each."""
        summaries = [self._summaries[index] for index in sorted(self._summaries)]
        slo = self._params.slo
        fields: dict[str, Any] = {
            "policy": summaries[0].policy,
            "max_tokens": self._params.max_tokens,
            "class": self._params.class_name,
        }
        if slo != NO_TARGETS:
            fields["slo"] = {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms}
        if self._shares_cache:
            return {**fields, "withheld": WITHHELD}
        fields |= _counts(*summaries)
        if self._num_choices > 1:
            fields["choices"] = [
                {"index": index, **_counts(summary)} for index, summary in sorted(self._summaries.items())
            ]
        return fields


def _counts(*summaries: SpeculationSummary) -> dict[str, Any]:
    steps = sum(each.steps for each in summaries)
    return {
        "steps": steps,
        "gamma_mean": sum(each.gamma_sum for each in summaries) / steps if steps else 0.0,
        "drafted": sum(each.drafted for each in summaries),
        "pruned": sum(each.pruned for each in summaries),
        "verified": sum(each.verified for each in summaries),
        "accepted": sum(each.accepted for each in summaries),
        "wasted": sum(each.wasted for each in summaries),
    }


def acceptance(summary: SpeculationSummary, cap: int, *, detailed: bool) -> dict[str, Any]:
    """One sample as vLLM reports it: only steps that verified a draft count; draft tokens are the verified ones.

    Field names: vllm-project/vllm, pull request 48915.
    """
    steps, verified, accepted = summary.drafts, summary.verified, summary.accepted
    fields: dict[str, Any] = {
        "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
        "draft_acceptance_rate": accepted / verified if verified else 0.0,
        "acceptance_histogram": _histogram(summary, cap),
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": verified,
        "num_spec_tokens": cap,
    }
    if detailed:
        fields["per_step_accepted"] = [step_accepted for _, step_accepted in summary.per_step]
        fields["per_step_drafted"] = [step_verified for step_verified, _ in summary.per_step]
    return fields


def _histogram(summary: SpeculationSummary, cap: int) -> list[int]:
    """Return a histogram [cap + 1]; entry k is the number of drafts of which exactly k tokens were accepted.

    accepted_per_position[k] is the number of drafts of which more than k tokens were accepted.
    """
    depth = len(summary.accepted_per_position)
    at_least = [summary.drafts, *summary.accepted_per_position, *[0] * (cap + 1 - depth)]
    return [upper - lower for upper, lower in pairwise(at_least)]


def trace_json(trace: StepTrace) -> dict[str, Any]:
    """One entry per token of the step. origin: accepted (drafted, and what the target says too), corrected (the
    target's, where it refused the next draft token), bonus (the target's, after a draft that was accepted as a
    whole) or plain (the target's, in a step that verified no draft).
    """
    return {
        "drafter": trace.drafter,
        "gamma": trace.gamma,
        "accepted": trace.accepted,
        "tokens": [{"text": text, "origin": _origin(trace, at)} for at, text in enumerate(trace.texts)],
    }


def _origin(trace: StepTrace, at: int) -> str:
    if at < trace.accepted:
        return ACCEPTED
    if not trace.gamma:
        return PLAIN
    return BONUS if trace.accepted == trace.gamma else CORRECTED
