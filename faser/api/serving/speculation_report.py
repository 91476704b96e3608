"""What speculation did for an answer: metrics.faser, and vLLM's metrics.speculative_decoding beside it.

Counted while the answer comes; each sample's summary comes with its end. An engine without drafter sends none,
and then the answer has no metrics.
"""

from itertools import pairwise
from typing import Any

from faser.types import OutputDelta, SpeculationParams, SpeculationSummary

NONE, SUMMARY, DETAILED = "none", "summary", "detailed"


class SpeculationReport:
    """One answer's. params: the effective wishes. level: of vLLM's part. cap: the server's."""

    def __init__(self, params: SpeculationParams, *, num_choices: int, level: str, cap: int) -> None:
        self._params = params
        self._num_choices = num_choices
        self._level = level
        self._cap = cap
        self._summaries: dict[int, SpeculationSummary] = {}

    def take(self, index: int, delta: OutputDelta) -> None:
        """index: of the choice."""
        if delta.speculation is not None:
            self._summaries[index] = delta.speculation

    def as_json(self) -> dict[str, Any]:
        """{"metrics": …}, or nothing."""
        if not self._summaries:
            return {}
        metrics: dict[str, Any] = {"faser": self._faser()}
        if self._level != NONE:
            alone = self._num_choices == 1
            metrics["speculative_decoding"] = (
                acceptance(self._summaries[0], self._cap, detailed=self._level == DETAILED) if alone else None
            )
        return {"metrics": metrics}

    def _faser(self) -> dict[str, Any]:
        """Sums over the choices; where there are several, each of them too."""
        summaries = [self._summaries[index] for index in sorted(self._summaries)]
        slo = self._params.slo
        told = {
            "policy": summaries[0].policy,
            "max_tokens": self._params.max_tokens,
            "class": self._params.class_name,
            "slo": {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms},
            **_counts(*summaries),
        }
        if self._num_choices > 1:
            told["choices"] = [
                {"index": index, **_counts(summary)} for index, summary in sorted(self._summaries.items())
            ]
        return told


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
    """One sample in vLLM's words: a step counts where it verified a draft; draft tokens are those verified.

    Field names: vllm-project/vllm, pull request 48915.
    """
    steps, verified, accepted = summary.drafts, summary.verified, summary.accepted
    told: dict[str, Any] = {
        "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
        "draft_acceptance_rate": accepted / verified if verified else 0.0,
        "acceptance_histogram": _histogram(summary, cap),
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": verified,
        "num_spec_tokens": cap,
    }
    if detailed:
        told["per_step_accepted"] = [step_accepted for _, step_accepted in summary.per_step]
        told["per_step_drafted"] = [step_verified for step_verified, _ in summary.per_step]
    return told


def _histogram(summary: SpeculationSummary, cap: int) -> list[int]:
    """[cap + 1] how many drafts had exactly so many tokens accepted.

    accepted_per_position counts those with more than so many; the differences count those with exactly as many.
    """
    most = len(summary.accepted_per_position)
    at_least = [summary.drafts, *summary.accepted_per_position, *[0] * (cap + 1 - most)]
    return [more - still for more, still in pairwise(at_least)]
