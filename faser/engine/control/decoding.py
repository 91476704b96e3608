"""Decoding: the running sequences that go on token by token, as columns, so that a step costs little for each.

A member has computed all of its known tokens but the last one, and reports nothing but tokens. It enters with the
token that a step has sampled for it, and leaves with its slot. A step gives all members a row each, and takes in
their tokens, in one pass over the columns. Whatever is an exception (a token that may end a sequence, an error, no
token) the scheduler commits one by one.
"""

from bisect import bisect_left
from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import Any

from faser.engine.contract.plan import StepDeltas, StepRows
from faser.engine.control.kv_cache import KvManager
from faser.engine.control.sequence import PriorityKey, Sequence, Status

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
        self._request_ids: list[str] = []
        self._indices: list[int] = []
        self._num_cached: list[int] = []
        self._num_preemptions: list[int] = []
        self._first_scheduled_s: list[float | None] = []
        self._members: set[Sequence] = set()
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
        self._may_end |= sequence.may_end_with
        at = bisect_left(self.sequences, sequence.priority_key, key=_priority_key)
        self.sequences.insert(at, sequence)
        self.known.insert(at, known)
        self._ends.insert(at, sequence.max_total)
        self._full_at.insert(at, self._kv.next_full(known - 1))
        self._slots.insert(at, sequence.held_slot)
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
        at = self.sequences.index(sequence)
        own: tuple[list[Any], ...] = (self.sequences, self.known, self._ends, self._full_at, self._slots)
        for column in (*own, *self._reported()):
            del column[at]

    def without_room(self) -> list[Sequence]:
        """Return the members that need a block for their next row."""
        size = self._kv.block_size
        edge = [each for each, known in zip(self.sequences, self.known, strict=True) if known % size == 1 % size]
        return [each for each in edge if len(each.table.blocks) * size <= each.num_computed]

    def may_draft(self) -> list[Sequence]:
        """Return the members that lack more than one token."""
        columns = zip(self.sequences, self.known, self._ends, strict=True)
        return [each for each, known, end in columns if end - known > 1]

    def lay(self, rows: StepRows, kept: Mapping[Sequence, Draft]) -> None:
        """Add a row for the last known token of each member, and rows for the drafts of some, to empty rows."""
        count = len(self.sequences)
        rows.slots += self._slots
        rows.starts += [known - 1 for known in self.known]
        rows.counts += [1] * count
        rows.num_drafts += [0] * count
        rows.samples += [True] * count
        rows.token_ids += [each.token_ids[-1] for each in self.sequences]
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
        positions: Mapping[Sequence, int],
        sampled: Many[tuple[int, ...]],
        token_ids: Many[int],
        failed: Mapping[int, object],
        deltas: StepDeltas,
    ) -> set[int]:
        """Append a step's tokens to the members that go on, and report them. Returns the positions of these.

        positions: in the step, by sequence. sampled: tokens by position; token_ids: all of them. failed: by
        position.
        """
        may_end = not self._may_end.isdisjoint(token_ids)
        known, ends, full_at = self.known, self._ends, self._full_at
        taken, done, counts = [], set[int](), deltas.counts
        for i, each in enumerate(self.sequences):
            at = positions.get(each)
            if at is None:
                continue
            new = sampled[at]
            num_tokens = known[i] + len(new)
            if not new or num_tokens >= ends[i] or at in failed:
                continue
            if may_end and not each.may_end_with.isdisjoint(new):
                continue
            each.token_ids += new
            each.num_computed = num_tokens - 1
            each.tenant.generated(len(new))
            known[i] = num_tokens
            if num_tokens > full_at[i]:
                self._kv.publish(each.table, each.token_ids, num_tokens - 1)
                full_at[i] = self._kv.next_full(num_tokens - 1)
            taken.append(i)
            done.add(at)
            counts.append(len(new))
            deltas.token_ids += new
        for column, own in zip(deltas.reported(), self._reported(), strict=True):
            column += own if len(taken) == len(own) else [own[i] for i in taken]
        return done

    def check(self, running: Many[Sequence]) -> None:
        """AssertionError where a column is not that of the sequences. Slow: for tests."""
        fresh = Decoding(self._kv)
        for each in running:
            if each in self._members:
                fresh.update(each)
        assert self._members == fresh._members
        columns = (self.sequences, self.known, self._ends, self._full_at, self._slots, *self._reported())
        expected = (fresh.sequences, fresh.known, fresh._ends, fresh._full_at, fresh._slots, *fresh._reported())
        assert columns == expected
        assert self._may_end >= fresh._may_end

    def _reported(self) -> tuple[list[Any], ...]:
        """The columns of StepDeltas.reported."""
        return self._request_ids, self._indices, self._num_cached, self._num_preemptions, self._first_scheduled_s


def _priority_key(sequence: Sequence) -> PriorityKey:
    return sequence.priority_key
