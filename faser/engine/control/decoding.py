"""Decoding: the running sequences that go on token by token, as columns, so that a step costs little for each.

A member has computed all of its known tokens but the last one, and reports nothing but tokens. It enters with the
token that a step has sampled for it, and leaves with its slot. A step gives all members a row each, and takes in
their tokens, in one pass over the columns. Whatever is an exception (a token that may end a sequence, an error, no
token) the scheduler commits one by one.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from itertools import chain, compress, repeat
from operator import add, ge, gt, sub
from typing import Any

from faser.engine.contract.plan import StepDeltas, StepResult, StepRows
from faser.engine.control.kv_cache import KvManager
from faser.engine.control.sequence import PriorityKey, Sequence, Status, Tenant

Draft = tuple[tuple[int, ...], tuple[int, ...]]  # tokens, and the blocks that they take in addition


class Decoding:
    """Columns of the members, the best first. known: their tokens; the other columns are private."""

    def __init__(self, kv: KvManager) -> None:
        self._kv = kv
        self.sequences: list[Sequence] = []
        self.known: list[int] = []
        self._ends: list[int] = []  # tokens at which each has its last one
        self._full_at: list[int] = []  # computed tokens with which one more block is full
        self._slots: list[int] = []
        self._token_ids: list[list[int]] = []  # the sequences' own
        self._request_ids: list[str] = []
        self._indices: list[int] = []
        self._num_cached: list[int] = []
        self._num_preemptions: list[int] = []
        self._first_scheduled_s: list[float | None] = []
        self._members: set[Sequence] = set()
        self._tenants: Counter[Tenant] = Counter()  # sequences of each
        self._may_end: set[int] = set()  # tokens that may end one of them, or one that has left

    def __len__(self) -> int:
        return len(self.sequences)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._members

    def update(self, sequence: Sequence) -> None:
        """Take in what has changed for a sequence: it may be a member from now on."""
        known = len(sequence.token_ids)
        if sequence in self._members:
            at = self.sequences.index(sequence)
            self.known[at], self._full_at[at] = known, self._kv.next_full(known - 1)
            return
        if not (
            sequence.reports_only_tokens
            and sequence.status is Status.RUNNING
            and known > sequence.prompt_len
            and sequence.num_computed == known - 1
        ):
            return
        if not self._members:
            self._may_end.clear()
        self._members.add(sequence)
        self._tenants[sequence.tenant] += 1
        self._may_end |= sequence.may_end_with
        at = bisect_left(self.sequences, sequence.priority_key, key=_priority_key)
        self.sequences.insert(at, sequence)
        self.known.insert(at, known)
        self._ends.insert(at, sequence.max_total)
        self._full_at.insert(at, self._kv.next_full(known - 1))
        self._slots.insert(at, sequence.held_slot)
        self._token_ids.insert(at, sequence.token_ids)
        self._request_ids.insert(at, sequence.request.request_id)
        self._indices.insert(at, sequence.index)
        self._num_cached.insert(at, sequence.num_cached)
        self._num_preemptions.insert(at, sequence.num_preemptions)
        self._first_scheduled_s.insert(at, sequence.first_scheduled_s)

    def leave(self, sequence: Sequence) -> None:
        """The sequence leaves its slot, or pauses. Nothing happens if it is no member."""
        if sequence not in self._members:
            return
        self._members.remove(sequence)
        self._tenants[sequence.tenant] -= 1
        if not self._tenants[sequence.tenant]:
            del self._tenants[sequence.tenant]
        at = self.sequences.index(sequence)
        for column in self._columns():
            del column[at]

    def without_room(self) -> list[Sequence]:
        """Return the members that need a block for their next row."""
        size = self._kv.block_size
        edge = [each for each, known in zip(self.sequences, self.known, strict=True) if known % size == 1 % size]
        return [each for each in edge if len(each.table.blocks) * size <= each.num_computed]

    def may_draft(self) -> list[Sequence]:
        """Return the members that lack more than one token."""
        lacking = [*map(sub, self._ends, self.known)]
        if 1 not in lacking:
            return [*self.sequences]
        return [each for each, count in zip(self.sequences, lacking, strict=True) if count > 1]

    def lay(self, rows: StepRows, kept: Mapping[Sequence, Draft]) -> None:
        """Add a row for the last known token of each member, and rows for the drafts of some, to empty rows."""
        count = len(self.sequences)
        rows.slots += self._slots
        rows.starts += [known - 1 for known in self.known]
        rows.counts += [1] * count
        rows.num_drafts += [0] * count
        rows.samples += [True] * count
        rows.token_ids += [token_ids[-1] for token_ids in self._token_ids]
        if not kept:
            return
        drafting = [at for at, each in enumerate(self.sequences) if each in kept]
        for at in reversed(drafting):
            draft, new_blocks = kept[self.sequences[at]]
            rows.counts[at] += len(draft)
            rows.num_drafts[at] = len(draft)
            rows.token_ids[at + 1 : at + 1] = draft
            if new_blocks:
                rows.new_blocks[self._slots[at]] = new_blocks

    def take(
        self,
        sequences: list[Sequence],
        sampled: list[tuple[int, ...]],
        result: StepResult,
        deltas: StepDeltas,
    ) -> set[int]:
        """Append a step's tokens to the members that go on, and report them. Returns the positions of these.

        sequences, sampled: of the step, in its order, with their tokens.
        """
        own, counts = self.sequences, result.counts
        num_members = len(own)
        at: Many[int] = range(num_members)
        if sequences[:num_members] != own:
            positions = {each: i for i, each in enumerate(sequences)}
            at = [positions.get(each, -1) for each in own]
            sampled = [sampled[i] if i >= 0 else () for i in at]
            counts = [*map(len, sampled)]
        elif len(sampled) > num_members:
            sampled, counts = sampled[:num_members], counts[:num_members]
        known = [*map(add, self.known, counts)]
        is_last = [*map(ge, known, self._ends)]
        may_end = not self._may_end.isdisjoint(result.token_ids)
        going: Many[int] = range(num_members)
        if may_end or result.errors or 0 in counts or True in is_last:
            going = [
                i
                for i, each in enumerate(own)
                if not (is_last[i] or not counts[i] or at[i] in result.errors)
                and (not may_end or each.may_end_with.isdisjoint(sampled[i]))
            ]
            known = _only(going, known, self.known)
            sampled = _only(going, sampled, repeat((), num_members))
            counts = [*map(len, sampled)]
        deltas.token_ids += chain.from_iterable(sampled)
        for each, tokens, new, num_tokens in zip(own, self._token_ids, sampled, known, strict=True):
            tokens += new
            each.num_computed = num_tokens - 1
        self.known = known
        if len(self._tenants) == 1:
            next(iter(self._tenants)).generated(sum(counts))
        else:
            for each, count in zip(own, counts, strict=True):
                each.tenant.generated(count)
        for i in compress(range(num_members), map(gt, known, self._full_at)):
            num_computed = known[i] - 1
            self._kv.publish(own[i].table, own[i].token_ids, num_computed)
            self._full_at[i] = self._kv.next_full(num_computed)
        is_all = len(going) == num_members
        deltas.counts += counts if is_all else [counts[i] for i in going]
        for column, reported in zip(deltas.reported(), self._reported(), strict=True):
            column += reported if is_all else [reported[i] for i in going]
        return {at[i] for i in going}

    def check(self, running: Many[Sequence]) -> None:
        """AssertionError where a column is not that of the sequences. Slow: for tests."""
        fresh = Decoding(self._kv)
        for each in running:
            if each in self._members:
                fresh.update(each)
        assert self._members == fresh._members
        assert self._tenants == fresh._tenants
        assert self._columns() == fresh._columns()
        assert self._may_end >= fresh._may_end

    def _columns(self) -> tuple[list[Any], ...]:
        own = self.sequences, self.known, self._token_ids, self._ends, self._full_at, self._slots
        return *own, *self._reported()

    def _reported(self) -> tuple[list[Any], ...]:
        """The columns of StepDeltas.reported."""
        return self._request_ids, self._indices, self._num_cached, self._num_preemptions, self._first_scheduled_s


def _priority_key(sequence: Sequence) -> PriorityKey:
    return sequence.priority_key


def _only(going: Many[int], new: Many[Any], old: Iterable[Any]) -> list[Any]:
    """The new values of those that go on, and the old ones of the others."""
    found = [*old]
    for i in going:
        found[i] = new[i]
    return found
