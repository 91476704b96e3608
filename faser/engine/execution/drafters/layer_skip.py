"""Drafts of the target's own first layers, its final norm and its head: self-speculation without more weights.

Reads and writes the target's KV cache. Below the last drafting layer the cache holds what the target itself
computed for committed tokens, so nothing is ever caught up; the rows of drafted tokens write these layers
beyond, and verification writes the same values there again.

Source: early exit with shared KV, Elhoushi et al., arXiv 2404.16710 section 4.3; layers skipped without
training, Zhang et al., arXiv 2309.08168.
"""

from collections.abc import Callable, Sequence

from faser.engine.contract.plan import Draft, DraftPlan, SequenceStart
from faser.engine.execution.drafters.draft_samplers import DraftSampler
from faser.engine.execution.drafters.drafter import Continuation, Proposals
from faser.engine.execution.drafters.passes import DraftInput, DraftLoop
from faser.errors import ConfigError

METHOD = "layer_skip"


def draft_layers(asked: int | None, num_layers: int) -> int:
    """How many layers draft: what was asked for, else a quarter of the target's, 7 of 30.

    Raises ConfigError outside 1 … num_layers - 1.
    """
    if num_layers < 2:
        raise ConfigError(f"layer_skip needs a target of at least 2 layers; this one has {num_layers}")
    found = max(1, num_layers // 4) if asked is None else asked
    if not 1 <= found < num_layers:
        raise ConfigError(
            f"draft_layers is {found}; the target has {num_layers} layers, so it must be at least 1 and at most "
            f"{num_layers - 1}"
        )
    return found


class LayerSkip:
    """See Drafter. loop: over the target's runner, limited to the layers that draft.

    It drafts only between the target's steps: runner, cache and hidden states are the target's.
    """

    drafts_overlapped = False

    def __init__(self, loop: DraftLoop, choice: DraftSampler) -> None:
        self._loop = loop
        self._choice = choice
        self._last: dict[int, tuple[int, int]] = {}  # by slot: position and id of the last known token

    def start(self, start: SequenceStart) -> None:
        self._last[start.slot] = (len(start.token_ids) - 1, start.token_ids[-1])

    def propose(self, plan: DraftPlan, until: Callable[[], bool] | None = None, /) -> Proposals:
        openings = []
        for request in plan.requests:
            assert not request.unverified, f"slot {request.slot}: layer_skip drafts nothing ahead of the target"
            position, token_id = self._last[request.slot]
            openings.append(
                DraftInput(slot=request.slot, start=position, token_ids=(token_id,), max_tokens=request.max_tokens)
            )
        found = self._loop.draft(openings, plan.stop, until, wants_top_ids=plan.wants_top_ids)
        drafts = tuple(
            Draft(slot=opening.slot, method=METHOD, token_ids=course.token_ids, confidences=course.confidences)
            for opening, course in zip(openings, found.courses, strict=True)
        )
        return Proposals(drafts=drafts, passes=found.passes, probs=found.probs, top_ids=found.top_ids)

    def commit(self, continuations: Sequence[Continuation]) -> None:
        for each in continuations:
            if each.token_ids:
                position, _ = self._last[each.slot]
                self._last[each.slot] = (position + len(each.token_ids), each.token_ids[-1])

    def release(self, slot: int) -> None:
        self._last.pop(slot, None)
