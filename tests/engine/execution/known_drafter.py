"""KnownDrafter: a drafter of known quality, over a text that it knows."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from faser.engine.contract.plan import DraftPlan, DraftRequest, SequenceStart
from faser.engine.execution.drafting.drafter import Proposals, by_slot
from faser.types.sampling import SamplingParams
from tests.engine.execution.draft_lines import DraftLine, table_with


def start_of(slot: int, token_ids: tuple[int, ...] = ()) -> SequenceStart:
    return SequenceStart(
        slot=slot, sampling=SamplingParams(), seed=0, prompt_len=len(token_ids), token_ids=token_ids
    )


@dataclass
class KnownDrafter:
    """Knows the coming text of each slot and drafts each token of it correctly with the slot's quality.

    A quality of None: nothing to propose. Wrong tokens are negative. sampled: as if drawn from a distribution.
    """

    method: str
    quality: dict[int, float | None]
    confidence: float = 1.0
    sampled: bool = False
    drafts_overlapped: bool = True
    to_come: dict[int, int] = field(default_factory=dict)
    plans: list[DraftPlan] = field(default_factory=list)
    untils: list[Callable[[], bool] | None] = field(default_factory=list)
    rng: random.Random = field(default_factory=lambda: random.Random(5))

    def start(self, start: SequenceStart) -> None:
        assert start.slot not in self.to_come
        self.to_come[start.slot] = len(start.token_ids)

    def propose(self, plan: DraftPlan, until: Callable[[], bool] | None = None, /) -> Proposals:
        assert plan.requests
        self.plans.append(plan)
        self.untils.append(until)
        drafts = tuple(self._draft(request) for request in plan.requests)
        probs = self._probs([token for draft in drafts for token in draft.token_ids]) if self.sampled else None
        return Proposals(table=table_with(drafts, plan.width), passes=3, catchup_tokens=7, probs=probs)

    def commit(self, slots: Sequence[int], counts: Sequence[int], token_ids: Sequence[int]) -> None:
        for slot, tokens in by_slot(slots, counts, token_ids):
            self.to_come[slot] += len(tokens)

    def release(self, slot: int) -> None:
        del self.to_come[slot]

    def _draft(self, request: DraftRequest) -> DraftLine:
        quality = self.quality[request.slot]
        if quality is None:
            return DraftLine(slot=request.slot, method=self.method)
        first = self.to_come[request.slot]
        token_ids = tuple(
            next_token(first + offset) if self.rng.random() < quality else -1
            for offset in range(request.max_tokens)
        )
        confidences = (self.confidence,) * request.max_tokens
        return DraftLine(slot=request.slot, method=self.method, token_ids=token_ids, confidences=confidences)

    @staticmethod
    def _probs(token_ids: list[int]) -> Tensor:
        """Distinct rows: token t has probability 1 / (t + 2), token 0 has the rest."""
        probs = torch.zeros(len(token_ids), 100, dtype=torch.float64)
        for row, token_id in enumerate(token_ids):
            probs[row, token_id] += 1 / (token_id + 2)
            probs[row, 0] += 1 - 1 / (token_id + 2)
        return probs


def next_token(position: int) -> int:
    """The text of every sequence: a token does not determine the next one."""
    return position * 37 % 89 + 1
