"""SpeculationReport: what speculation did for an answer, as metrics.faser and vLLM's metrics.speculative_decoding.

Collects the summary in the last delta of each sample. An engine without a drafter sends no summaries; the
answer then has no metrics. Which drafts there were, and which were accepted, depends on the past answers that the
request may draft from: a request that shares them with other clients is told no counts.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from faser.types import OutputDelta, SpeculationParams, SpeculationSummary

NONE, SUMMARY, DETAILED = "none", "summary", "detailed"

WITHHELD = "counts would tell of other clients' answers; send a cache_salt to have past answers of your own"


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
        """For the operator, whether or not the client is told. None: no sample with a summary has ended."""
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
            "slo": {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms},
        }
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
    """[cap + 1] histogram[k]: number of drafts of which exactly k tokens were accepted.

    accepted_per_position[k] is the number of drafts of which more than k tokens were accepted.
    """
    depth = len(summary.accepted_per_position)
    at_least = [summary.drafts, *summary.accepted_per_position, *[0] * (cap + 1 - depth)]
    return [upper - lower for upper, lower in pairwise(at_least)]
