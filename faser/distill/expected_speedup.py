"""What a head is expected to bring, by load, from its acceptance and the engine's measured step times."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from faser.engine.control.step_cost import CostModel

LOADS = (1, 4, 16, 32)
_CONTEXT = 256  # cached tokens of each request
_WORTH = 1.02  # less is within what a measurement varies by


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What drafts bring at one load. requests: at once. draft_tokens: the best length; 0: drafts do not pay.

    speedup: over answers without drafts.
    """

    requests: int
    draft_tokens: int
    speedup: float


def expected_speedup(costs: CostModel, accepted: Sequence[float], requests: int) -> Expected:
    """accepted: share of drafts whose tokens 0 … i are all accepted, for each i.

    A step verifies a draft of each request and takes one pass of the head for each drafted token; the first also
    reads what was accepted before.
    """
    kv_tokens = requests * _CONTEXT
    plain_s = costs.step_s(requests, kv_tokens)
    best = Expected(requests=requests, draft_tokens=0, speedup=1.0)
    for length in range(1, len(accepted) + 1):
        brought = sum(accepted[:length])
        rows, draft_rows = requests * (1 + length), requests * length
        read = np.array([round(brought * requests)] + [0] * (requests - 1))
        seconds = costs.step_s(rows, kv_tokens, draft_rows * _CONTEXT)
        seconds += costs.draft_s(np.full(requests, length), read)
        speedup = (1 + brought) * plain_s / seconds
        if speedup > best.speedup:
            best = Expected(requests=requests, draft_tokens=length, speedup=speedup)
    return best


def verdict(found: Sequence[Expected]) -> str:
    """One sentence: is the head worth using. found: of greedy answers, by load, ascending."""
    paying = [each for each in found if each.speedup >= _WORTH]
    if not paying:
        return "not worth using here: at no load do its drafts bring more than they cost"
    most = paying[-1].requests
    few = "at one request at a time" if most == 1 else f"at up to {most} requests at once"
    speedup = max(each.speedup for each in paying)
    return f"worth using {few}: answers at temperature 0 are expected up to {speedup:.2f} times as fast"
