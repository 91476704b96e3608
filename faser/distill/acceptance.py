"""Acceptance of a head's drafts on conversations it has not learned from, and what it is expected to bring.

Greedy answers: position i is accepted where the head's best tokens of positions 0 … i are the answer's.
Sampled answers: draft and answer are drawn from q and p at the same temperature; Σ min(p, q) is the largest share
that can agree, and what is multiplied over the positions here.
Each row of an answer begins a draft. A server begins one after each verification, which is nearly the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from faser.distill.batch import SampleStore, TrainingBatch, make_batch
from faser.distill.trainable import Trainable
from faser.engine.control.step_cost import CostModel

LOADS = (1, 4, 16, 32)
_CONTEXT = 256  # cached tokens of each request
_WORTH = 1.02  # less is within what a measurement varies by


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutAcceptance:
    """greedy, sampled: share of drafts whose positions 0 … i are all accepted, for each i.

    Empty without answers of that kind. greedy_rows, sampled_rows: drafts that were tried.
    """

    greedy: tuple[float, ...]
    sampled: tuple[float, ...]
    greedy_rows: int
    sampled_rows: int


class _Sums:
    """Accepted drafts by position."""

    def __init__(self, steps: int) -> None:
        self.accepted = np.zeros(steps)
        self.rows = 0

    def add(self, accepted: Tensor, rows: Tensor) -> None:
        """accepted: [S, N], of each position alone."""
        self.accepted += accepted[:, rows].cumprod(0).sum(1).cpu().numpy()
        self.rows += int(rows.sum())

    def shares(self) -> tuple[float, ...]:
        return tuple((self.accepted / self.rows).tolist()) if self.rows else ()


@torch.inference_mode()
def measure_acceptance(
    head: Trainable,
    store: SampleStore,
    draft_ids: Tensor,
    batches: Sequence[Sequence[int]],
    *,
    steps: int,
    temperature: float,
    on_batch: Callable[[], None] = lambda: None,
) -> HeldOutAcceptance:
    """temperature: of the sampled answers."""
    greedy, sampled = _Sums(steps), _Sums(steps)
    for indices in batches:
        batch = make_batch([store.sample(index) for index in indices], steps).to(head.device)
        hits, overlaps = [], []
        for step, logits in enumerate(head.logits(batch, steps)):
            hits.append(draft_ids[logits.argmax(-1)] == batch.said[step])
            overlaps.append(_overlap(logits, batch, step, temperature))
        whole = batch.valid.all(0)  # a draft that reaches beyond the answer says nothing of its last positions
        greedy.add(torch.stack(hits).double(), whole & batch.greedy)
        sampled.add(torch.stack(overlaps).double(), whole & ~batch.greedy)
        on_batch()
    return HeldOutAcceptance(
        greedy=greedy.shares(), sampled=sampled.shares(), greedy_rows=greedy.rows, sampled_rows=sampled.rows
    )


def _overlap(logits: Tensor, batch: TrainingBatch, step: int, temperature: float) -> Tensor:
    """Return Σ min(p, q) [N] over the tokens that the target likes best, both at this temperature."""
    wanted = batch.wanted_probs[step].pow(1 / temperature)
    wanted /= wanted.sum(-1, keepdim=True).clamp_min(1e-9)
    said = (logits / temperature).softmax(-1).gather(-1, batch.wanted_ids[step])
    return torch.minimum(wanted, said).sum(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Expected gain of drafts at one load. requests: at once. draft_tokens: the best length; 0: drafts do not pay.

    speedup: over answers without drafts.
    """

    requests: int
    draft_tokens: int
    speedup: float


def expected_speedup(costs: CostModel, accepted: Sequence[float], requests: int) -> Expected:
    """Return the draft length that pays best.

    accepted: share of drafts whose tokens 0 … i are all accepted, for each i.
    A step verifies a draft of each request, and takes one pass of a head for each drafted token, or one of a block
    drafter for all; the first also reads what was accepted before.
    """
    kv_tokens = requests * _CONTEXT
    plain_s = costs.step_s(requests, kv_tokens)
    best = Expected(requests=requests, draft_tokens=0, speedup=1.0)
    for length in range(1, len(accepted) + 1):
        accepted_tokens = sum(accepted[:length])
        rows, draft_rows = requests * (1 + length), requests * length
        read = np.array([round(accepted_tokens * requests)] + [0] * (requests - 1))
        seconds = costs.step_s(rows, kv_tokens, draft_rows * _CONTEXT)
        seconds += costs.draft_s(np.full(requests, length), read)
        speedup = (1 + accepted_tokens) * plain_s / seconds
        if speedup > best.speedup:
            best = Expected(requests=requests, draft_tokens=length, speedup=speedup)
    return best


def speedup_in_words(found: Sequence[Expected]) -> str:
    """One sentence: is the head worth using. found: of greedy answers, by load, ascending."""
    paying = [each for each in found if each.speedup >= _WORTH]
    if not paying:
        return "not worth using here: at no load do its drafts bring more than they cost"
    most = paying[-1].requests
    few = "at one request at a time" if most == 1 else f"at up to {most} requests at once"
    speedup = max(each.speedup for each in paying)
    return f"worth using {few}: answers at temperature 0 are expected up to {speedup:.2f} times as fast"
