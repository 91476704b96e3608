"""The trace of a step as a stream tells it, where a request asks with `speculative.trace`."""

from typing import Any

from faser.types import StepTrace

ACCEPTED, CORRECTED, BONUS, PLAIN = "accepted", "corrected", "bonus", "plain"


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
