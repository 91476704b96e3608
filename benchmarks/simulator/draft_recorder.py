"""DraftRecorder: wraps a drafter and records what it proposes, while nothing of it is verified.

Owns the recordings. To the engine it is a drafter with empty drafts, so every step yields one token and every
position of an output gets its draft.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.simulator.selected_drafter import SelectedDrafter
from faser.config.speculation import AUTO, DRAFT_METHODS, SpeculationConfig
from faser.engine.contract.drafts import DraftTable, empty_table
from faser.engine.contract.plan import DraftPlan, SequenceStart
from faser.engine.execution.drafting.drafter import Drafter, Proposals, by_slot


@dataclass(slots=True, kw_only=True)
class Recording:
    """One sequence. drafts: tables of one line, by the number of output tokens they follow. max_tokens: what was
    asked for there.
    """

    seed: int
    prompt_token_ids: tuple[int, ...]
    output_token_ids: list[int] = field(default_factory=list)
    drafts: dict[int, DraftTable] = field(default_factory=dict)
    max_tokens: dict[int, int] = field(default_factory=dict)


class DraftRecorder:
    """A Drafter. recordings: of all sequences, in the order in which they started.

    selects: the drafter chooses between drafters itself, so it answers the round for text and no other one. A
    sequence that is preempted continues its recording: prompt and seed identify it. Never drafts overlapped,
    because nothing is ever under verification.
    """

    drafts_overlapped = False

    def __init__(self, drafter: Drafter, *, selects: bool = False) -> None:
        self._drafter = drafter
        self._selects = selects
        self._recordings: dict[tuple[int, tuple[int, ...]], Recording] = {}
        self._slots: dict[int, Recording] = {}

    @property
    def recordings(self) -> tuple[Recording, ...]:
        return tuple(self._recordings.values())

    def start(self, start: SequenceStart) -> None:
        prompt = start.token_ids[: start.prompt_len]
        new = Recording(seed=start.seed, prompt_token_ids=prompt)
        self._slots[start.slot] = self._recordings.setdefault((start.seed, prompt), new)
        self._drafter.start(start)

    def propose(self, plan: DraftPlan, until: Callable[[], bool] | None = None, /) -> Proposals:
        if self._selects and not plan.from_text:
            slots = [request.slot for request in plan.requests]
            # The drafter has chosen and answered in the first round.
            return Proposals(table=empty_table(slots, DRAFT_METHODS[0], plan.width))
        proposals = self._drafter.propose(plan, until)
        assert proposals.probs is None, "drafts that were drawn cannot be replayed: drafting must be greedy"
        table = proposals.table
        for at, request in enumerate(plan.requests):
            assert not request.unverified, f"slot {request.slot}: a recorder never drafts overlapped"
            recording = self._slots[request.slot]
            position = len(recording.output_token_ids)
            recording.drafts[position] = table.take(np.array([at]))
            recording.max_tokens[position] = request.max_tokens
        assert len(table.slots) == len(plan.requests), "a recorder records one drafter"
        nothing = table.cut(np.zeros(len(table.slots), dtype=np.int64))
        return Proposals(table=nothing, passes=proposals.passes, catchup_tokens=proposals.catchup_tokens)

    def commit(self, slots: Sequence[int], counts: Sequence[int], token_ids: Sequence[int]) -> None:
        for slot, tokens in by_slot(slots, counts, token_ids):
            self._slots[slot].output_token_ids += tokens
        self._drafter.commit(slots, counts, token_ids)

    def release(self, slot: int) -> None:
        self._slots.pop(slot, None)
        self._drafter.release(slot)


def make_recorder(drafter: Drafter, config: SpeculationConfig, *, num_slots: int) -> DraftRecorder:
    """With method `auto`, whose selection is the control plane's, the recorder has a selection of its own."""
    if config.method != AUTO:
        return DraftRecorder(drafter)
    model_cap = 0 if config.model is None else config.model_cap
    selected = SelectedDrafter(drafter, num_slots=num_slots, cap=config.cap, model_cap=model_cap)
    return DraftRecorder(selected, selects=True)
