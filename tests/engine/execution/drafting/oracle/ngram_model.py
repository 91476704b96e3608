"""NgramModelDrafter: chains of the token that an n-gram model finds likeliest.

Owns the last tokens of each sequence.
"""

from collections.abc import Callable, Sequence

from faser.engine.checkpoints.ngram_model import NgramModel
from faser.engine.contract.plan import DraftPlan, SequenceStart
from faser.engine.execution.drafting.drafter import Proposals, by_slot
from faser.types.arrays import NO_TOKEN
from tests.engine.execution.draft_lines import DraftLine, table_with

METHOD = "ngram_model"
_LEAST_SURVIVAL = 0.02  # of a drafted token, by the model's own chances


class NgramModelDrafter:
    """A Drafter. Of all contexts that a text ends with, the one whose next token is most likely counts.

    The longer one in a tie. A draft ends before a token that is unlikely to be reached and right. The confidence
    of a token is its chance.
    """

    drafts_overlapped = True

    def __init__(self, model: NgramModel, *, cap: int) -> None:
        self._width = model.contexts.shape[1]
        self._cap = cap
        self._next = {
            tuple(token for token in context if token != NO_TOKEN): (following, chance)
            for context, following, chance in zip(
                model.contexts.tolist(), model.following.tolist(), model.chances.tolist(), strict=True
            )
        }
        self._tails: dict[int, tuple[int, ...]] = {}

    def start(self, start: SequenceStart) -> None:
        self._tails[start.slot] = start.token_ids[-self._width :]

    def propose(self, plan: DraftPlan, _until: Callable[[], bool] | None = None, /) -> Proposals:
        drafts = []
        for request in plan.requests:
            found = self._chain((*self._tails[request.slot], *request.unverified), request.max_tokens)
            drafts.append(
                DraftLine(
                    slot=request.slot,
                    method=METHOD,
                    token_ids=tuple(token for token, _ in found),
                    confidences=tuple(chance for _, chance in found),
                )
            )
        return Proposals(table=table_with(drafts, plan.width))

    def commit(self, slots: Sequence[int], counts: Sequence[int], token_ids: Sequence[int]) -> None:
        for slot, tokens in by_slot(slots, counts, token_ids):
            self._tails[slot] = (*self._tails[slot], *tokens)[-self._width :]

    def release(self, slot: int) -> None:
        del self._tails[slot]

    def _chain(self, text: tuple[int, ...], most: int) -> list[tuple[int, float]]:
        found: list[tuple[int, float]] = []
        survival = 1.0
        while len(found) < min(most, self._cap):
            best: tuple[int, float] | None = None
            for length in range(1, min(self._width, len(text)) + 1):
                entry = self._next.get(text[-length:])
                if entry is None:
                    break  # nor is a longer context known
                if best is None or entry[1] >= best[1]:
                    best = entry
            if best is None:
                break
            survival *= best[1]
            if survival < _LEAST_SURVIVAL:
                break
            found.append(best)
            text = (*text, best[0])
        return found
