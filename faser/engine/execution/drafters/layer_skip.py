"""Drafts of the target's own first layers, its final norm and its head: self-speculation without more weights.

Reads and writes the target's KV cache. In the layers that draft, the cache holds what the target computed for
committed tokens, so no token is ever computed again to catch up. Rows of draft tokens write the positions after
them, and verification writes the same values there again.

Source: early exit with shared KV, Elhoushi et al., arXiv 2404.16710 section 4.3; layers skipped without
training, Zhang et al., arXiv 2309.08168.
"""

from collections.abc import Callable, Sequence

from faser.engine.contract.plan import Draft, DraftPlan, SequenceStart
from faser.engine.execution.drafters.drafter import Continuation, Proposals
from faser.engine.execution.drafters.passes import DraftInput, DraftLoop
from faser.errors import ConfigError

METHOD = "layer_skip"


def draft_layers(asked: int | None, num_layers: int) -> int:
    """How many layers draft: as many as asked, or a quarter of the target's, 7 of 30.

    Raises ConfigError outside 1 … num_layers - 1.
    """
    if num_layers < 2:
        raise ConfigError(f"layer_skip needs a target of at least 2 layers; this one has {num_layers}")
    found = max(1, num_layers // 4) if asked is None else asked
    if not 1 <= found < num_layers:
        raise ConfigError(
            f"--speculative-config: draft_layers is {found}; the target has {num_layers} layers, so it must be at "
            f"least 1 and at most {num_layers - 1}"
        )
    return found


class LayerSkip:
    """See Drafter. loop: runs the layers of the target's runner that draft.

    It drafts between the target's steps only, because runner, cache and hidden states are the target's.
    """

    drafts_overlapped = False

    def __init__(self, loop: DraftLoop) -> None:
        self._loop = loop
        self._last: dict[int, tuple[int, int]] = {}  # by slot: position and id of the last known token

    def start(self, start: SequenceStart) -> None:
        self._last[start.slot] = (len(start.token_ids) - 1, start.token_ids[-1])

    def propose(self, plan: DraftPlan, until: Callable[[], bool] | None = None, /) -> Proposals:
        inputs = []
        for request in plan.requests:
            assert not request.unverified, f"slot {request.slot}: layer_skip continues no unverified tokens"
            position, token_id = self._last[request.slot]
            inputs.append(
                DraftInput(slot=request.slot, start=position, token_ids=(token_id,), max_tokens=request.max_tokens)
            )
        batch = self._loop.draft(inputs, plan.stop, until)
        drafts = tuple(
            Draft(slot=each.slot, method=METHOD, token_ids=token_ids, confidences=confidences)
            for each, token_ids, confidences in zip(inputs, batch.token_ids, batch.confidences, strict=True)
        )
        return Proposals(drafts=drafts, passes=batch.passes, probs=batch.probs)

    def commit(self, continuations: Sequence[Continuation]) -> None:
        for each in continuations:
            if each.token_ids:
                position, _ = self._last[each.slot]
                self._last[each.slot] = (position + len(each.token_ids), each.token_ids[-1])

    def release(self, slot: int) -> None:
        self._last.pop(slot, None)
