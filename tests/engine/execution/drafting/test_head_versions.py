"""Which version of a head drafts for which sequence. The versions are fakes that say who they are.

Planted bugs that these tests have caught: drafts in the order of the versions; distributions in that order; a
version that is never freed.
"""

import gc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from faser.engine.contract.plan import DraftPlan, DraftRequest, SequenceStart
from faser.engine.execution.drafting.drafter import Proposals
from faser.engine.execution.drafting.head_versions import MOST_REFRESHED, HeadVersions
from faser.types import SamplingParams
from tests.engine.execution.draft_lines import DraftLine, committed, lines_of, table_with


class Version:
    """Drafts its own number, as many times as it is asked for; each with a distribution that says the slot."""

    drafts_overlapped = False

    def __init__(self, number: int) -> None:
        self.number = number
        self.slots: set[int] = set()
        self.committed: list[int] = []

    def start(self, start: SequenceStart) -> None:
        assert start.slot not in self.slots
        self.slots.add(start.slot)

    def propose(self, plan: DraftPlan, until: Callable[[], bool] | None = None, /) -> Proposals:
        del until
        assert {each.slot for each in plan.requests} <= self.slots
        drafts = tuple(
            DraftLine(slot=each.slot, method="eagle3", token_ids=(self.number,) * each.max_tokens)
            for each in plan.requests
        )
        lines = [[float(each.slot)] * 4 for each in plan.requests for _ in range(each.max_tokens)]
        return Proposals(
            table=table_with(drafts, plan.width),
            passes=2,
            catchup_tokens=1,
            probs=torch.tensor(lines, dtype=torch.float64),
        )

    def commit(self, slots: Sequence[int], counts: Sequence[int], token_ids: Sequence[int]) -> None:
        assert {*slots} <= self.slots
        assert len(token_ids) == sum(counts)
        self.committed += slots

    def release(self, slot: int) -> None:
        self.slots.remove(slot)


def start(slot: int, salt: str | None = None) -> SequenceStart:
    return SequenceStart(
        slot=slot, sampling=SamplingParams(), seed=1, prompt_len=2, token_ids=(1, 2), namespace=salt
    )


def plan(*slots: int) -> DraftPlan:
    return DraftPlan(
        step=1,
        width=16,
        requests=tuple(DraftRequest(slot=slot, max_tokens=1 + slot % 2, new_blocks=()) for slot in slots),
    )


def versions() -> HeadVersions:
    return HeadVersions(Version(0), lambda path: Version(int(path.name)))


def test_each_sequence_keeps_its_version_and_plans_are_answered_in_order() -> None:
    heads = versions()
    heads.start(start(0))
    assert heads.adopt(Path("1"))
    heads.start(start(1))
    heads.start(start(2, salt="mine"))
    assert heads.adopt(Path("2"))
    heads.start(start(3))
    found = heads.propose(plan(3, 0, 1, 2))
    assert [draft.slot for draft in lines_of(found.table)] == [3, 0, 1, 2]
    assert [draft.token_ids for draft in lines_of(found.table)] == [(2, 2), (0,), (1, 1), (0,)]
    assert found.probs is not None
    assert found.probs[:, 0].tolist() == [3, 3, 0, 1, 1, 2]
    assert (found.passes, found.catchup_tokens) == (6, 3)
    heads.commit(*committed(dict.fromkeys((2, 1, 3), (5,))))
    heads.release(1)
    heads.start(start(1))
    assert lines_of(heads.propose(plan(1)).table)[0].token_ids == (2, 2)


def test_an_old_version_ends_with_its_last_sequence_and_two_are_kept_at_most() -> None:
    made: list[weakref.ref[Version]] = []

    def make(path: Path) -> Version:
        version = Version(int(path.name))
        made.append(weakref.ref(version))
        return version

    heads = HeadVersions(Version(0), make)
    for number in (1, 2):
        assert heads.adopt(Path(str(number)))
        heads.start(start(number))
    assert heads.num_refreshed == MOST_REFRESHED
    assert not heads.adopt(Path("3"))
    assert len(made) == 2
    heads.release(1)
    gc.collect()
    assert made[0]() is None
    assert heads.adopt(Path("3"))
    assert lines_of(heads.propose(plan(2)).table)[0].token_ids == (2,)
    heads.release(2)
    assert heads.num_refreshed == 1
