"""A drafter that notes what it proposed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from faser.engine.contract.plan import DraftPlan, SequenceStart
from faser.engine.execution.drafting.drafter import Drafter, Proposals, by_slot
from tests.engine.execution.draft_lines import lines_of


@dataclass
class Recorded:
    """A drafter, and what it proposed after which tokens."""

    drafter: Drafter
    proposed: list[tuple[list[int], tuple[int, ...]]] = field(default_factory=list)
    known: dict[int, list[int]] = field(default_factory=dict)

    drafts_overlapped = False

    def start(self, start: SequenceStart) -> None:
        self.known[start.slot] = list(start.token_ids)
        self.drafter.start(start)

    def propose(self, plan: DraftPlan, until: Callable[[], bool] | None = None, /) -> Proposals:
        found = self.drafter.propose(plan, until)
        for draft in lines_of(found.table):
            self.proposed.append((list(self.known[draft.slot]), draft.token_ids))
        return found

    def commit(self, slots: Sequence[int], counts: Sequence[int], token_ids: Sequence[int]) -> None:
        for slot, tokens in by_slot(slots, counts, token_ids):
            self.known[slot] += tokens
        self.drafter.commit(slots, counts, token_ids)

    def release(self, slot: int) -> None:
        self.drafter.release(slot)
