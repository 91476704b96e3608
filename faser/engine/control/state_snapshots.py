"""StateSnapshots: which snapshot holds the recurrent state after which tokens, and of which states one is taken.

A model with recurrent states goes on behind a cached prefix only from the state after exactly its tokens, and a
state cannot be taken back to fewer of them. The data plane has a few snapshots of states. One belongs to the
published block that ends where it was taken: it has that block's digest, and goes with the block's content. Sees
tables, slots and numbers of snapshots only; the blocks are KvManager's, and what a snapshot is the data plane's
(execution/runner/state_cache.py).

    blocks      | 0 | 1 | 2 | 3 | 4 |     a prompt that begins with the published blocks 0 … 3 goes on behind
    published     x   x   x   x           block 1, and leaves a snapshot behind block 3
    snapshot          x

In Qwen3.5-0.8B a snapshot takes 19.5 MB, as much memory as the keys and values of 1,590 tokens (99 blocks of 16).
So not every block has one. Snapshots are taken where another sequence is likeliest to part:

- near the end of a prompt, for its other samples and for the next turn of a conversation;
- where a sequence leaves its slot, for the next turn if it has ended, and for itself if it was preempted;
- behind a cached prefix that reached further than its snapshots: two prompts had it, a third one may;
- every few thousand tokens of a long prompt.

The least recently used one makes room. Ideas: Pan et al., arXiv:2411.19379, section 4.1 (branching points, last
tokens); vLLM's mamba_cache_mode align; SGLang's MambaRadixCache.
"""

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Numbers

from faser.engine.contract.plan import StateSave, StepRows
from faser.engine.control.kv_cache import KvManager
from faser.engine.control.sequence import Sequence
from faser.types.answer import FinishReason

# Tokens at the end of a prompt that later turns may lack, where the request does not say how many: Qwen3.5's
# chat template ends it with <think>, a blank line, </think>, a blank line. A snapshot behind the first of them
# serves no later turn.
_TAIL = 4

_LEAST_GAIN = 64  # tokens: a step ends at a branching point only if a snapshot there spares as many
_INTERVAL = 2048  # tokens of a long prompt from snapshot to snapshot
_SHARE = 4  # one prompt's snapshots on its way are a quarter of all, at most


class NoSnapshots:
    """Stands in for StateSnapshots of a model without recurrent states, which goes on behind any prefix."""

    on_saved: Callable[[bytes, int], None] | None = None

    def reach(self, _: Sequence, prefix: Numbers[int]) -> int:
        return len(prefix)

    def has(self, _: bytes) -> bool:
        return True

    def rows_to_end(self, _: Sequence, __: int, num_rows: int) -> int:
        return num_rows

    def launch(self, _: StepRows) -> tuple[StateSave, ...]:
        return ()

    def take_saves(self) -> tuple[StateSave, ...]:
        return ()

    def version(self, _: int) -> int:
        return 0

    def nothing(self, *_: object) -> None:
        """There is nothing to keep, and no record of it."""

    start = take = filled = note_saved = commit = leave = check_invariants = nothing


class StateSnapshots:
    """num_snapshots: of the data plane, at least 1. chunk: tokens; a slot's state is kept after whole ones."""

    def __init__(self, kv: KvManager, num_snapshots: int, *, num_slots: int, chunk: int) -> None:
        assert num_snapshots > 0, "a model without snapshots shares no prefixes"
        assert kv.block_size % chunk == 0, f"blocks of {kv.block_size} tokens do not end with chunks of {chunk}"
        self._kv = kv
        self._chunk = chunk
        self._num_snapshots = num_snapshots
        self._free = list(range(num_snapshots - 1, -1, -1))
        self._snapshot_of: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._restoring: set[int] = set()  # that the plan in the making reads
        self._saves: dict[int, StateSave] = {}  # by snapshot, that the next plan writes
        self._sent: list[int] = []  # snapshots that the plans since the last commit write
        self._filling: set[int] = set()  # that are being filled from elsewhere
        self._versions = [0] * num_snapshots  # how often each was taken
        self.on_saved: Callable[[bytes, int], None] | None = None  # called with each snapshot that was written
        self._known = [0] * num_slots  # tokens that the rows launched last do not take back
        self._wanted: dict[Sequence, list[int]] = {}  # tokens after which a snapshot is to be taken, ascending
        kv.on_forgotten = self._forget

    def reach(self, sequence: Sequence, prefix: Numbers[int]) -> int:
        """Return how many blocks of its cached prefix end with a snapshot at the latest."""
        digests = sequence.table.digests
        return next((count for count in range(len(prefix), 0, -1) if digests[count - 1] in self._snapshot_of), 0)

    def start(self, sequence: Sequence, num_cached: int) -> int | None:
        """The snapshot with which a sequence starts behind its first num_cached tokens; None: behind none.

        It stays as it is until the plan in the making has gone out. num_cached: that `reach` allows.
        """
        size = self._kv.block_size
        self._known[sequence.held_slot] = num_cached
        self._want(sequence, self._ends(sequence, num_cached))
        if not num_cached:
            return None
        digest = sequence.table.digests[num_cached // size - 1]
        self._snapshot_of.move_to_end(digest)
        self._restoring.add(self._snapshot_of[digest])
        return self._snapshot_of[digest]

    def rows_to_end(self, sequence: Sequence, start: int, num_rows: int) -> int:
        """Return how many of num_rows rows from position start a step may have, to keep the state wanted next."""
        wanted = next((end for end in self._wanted.get(sequence, ()) if end > start), None)
        return num_rows if wanted is None or start + num_rows < wanted + self._chunk else wanted - start

    def launch(self, rows: StepRows) -> tuple[StateSave, ...]:
        """Return the saves that a plan of these rows makes first. The plan is in the making no longer."""
        saves = self.take_saves()
        known = self._known
        columns = zip(rows.slots, rows.starts, rows.counts, rows.num_drafts, strict=True)
        for slot, start, count, num_drafts in columns:
            known[slot] = start + count - num_drafts
        self._restoring.clear()
        return saves

    def take_saves(self) -> tuple[StateSave, ...]:
        """Return the saves of the next plan, whatever it is, and forget them."""
        saves, self._saves = tuple(self._saves.values()), {}
        self._sent += [each.snapshot for each in saves]
        return saves

    def note_saved(self) -> None:
        """Note that the snapshots which take_saves returned have been written."""
        sent, self._sent = self._sent, []
        if self.on_saved is None or not sent:
            return
        digest_of = {snapshot: digest for digest, snapshot in self._snapshot_of.items()}
        for snapshot in sent:
            if snapshot in digest_of and snapshot not in self._saves:
                self.on_saved(digest_of[snapshot], snapshot)

    def has(self, digest: bytes) -> bool:
        """Return whether there is a snapshot behind the block with this digest."""
        return digest in self._snapshot_of

    def version(self, snapshot: int) -> int:
        """A number that changes before the content of a snapshot does. May be asked for in any thread."""
        return self._versions[snapshot]

    def take(self) -> int | None:
        """A snapshot that is filled from elsewhere; None: each is in use. `filled` must follow."""
        found = self._take()
        if found is not None:
            self._filling.add(found)
        return found

    def filled(self, snapshot: int, digest: bytes | None) -> None:
        """A snapshot holds the state behind the block with this digest now; None: it could not be filled."""
        self._filling.remove(snapshot)
        if digest is None or digest in self._snapshot_of or not self._kv.is_published(digest):
            self._free.append(snapshot)
        else:
            self._snapshot_of[digest] = snapshot

    def commit(self) -> None:
        """The blocks of a step's rows are published: take the snapshots that are wanted behind them."""
        self.note_saved()
        for sequence, wanted in list(self._wanted.items()):
            end = self._end(sequence)
            if end in wanted:
                self._save(sequence, end)
            if end >= wanted[0]:
                self._want(sequence, [each for each in wanted if each > end])

    def leave(self, sequence: Sequence) -> None:
        """It is about to lose its slot and its blocks."""
        self._want(sequence, [])
        if sequence.finish_reason is not FinishReason.ERROR:
            self._save(sequence, self._end(sequence))

    def check_invariants(self) -> None:
        """AssertionError where the records disagree. Slow: for tests."""
        used = [*self._free, *self._snapshot_of.values(), *self._filling]
        assert sorted(used) == list(range(self._num_snapshots)), "a snapshot is free, or has one digest"
        assert all(map(self._kv.is_published, self._snapshot_of)), "a snapshot outlives its block"
        assert self._saves.keys() <= set(self._snapshot_of.values()), "what is saved has a digest"
        assert not self._restoring, "no plan is in the making"

    def _want(self, sequence: Sequence, ends: list[int]) -> None:
        if ends:
            self._wanted[sequence] = ends
        else:
            self._wanted.pop(sequence, None)

    def _ends(self, sequence: Sequence, num_cached: int) -> list[int]:
        """Return the positions at which the rows that a sequence starts with are to leave snapshots."""
        size = self._kv.block_size
        tail = sequence.request.prompt_tail
        last = (sequence.prompt_len - (_TAIL if tail is None else tail)) // size * size
        branch = len(self._kv.cached_prefix(sequence.table, sequence.token_ids)) * size
        share = max(1, self._num_snapshots // _SHARE)
        interval = -(-max(_INTERVAL, last // share) // size) * size
        found = {last, *range(interval, last, interval)}
        if branch < last and branch - num_cached >= _LEAST_GAIN:
            found.add(branch)
        return sorted(end for end in found if end > num_cached)

    def _end(self, sequence: Sequence) -> int:
        """Tokens that are in the state which its slot keeps once the launched rows have run."""
        return self._known[sequence.held_slot] // self._chunk * self._chunk

    def _save(self, sequence: Sequence, end: int) -> None:
        """Take a snapshot of the state after its first `end` tokens, if a published block ends there."""
        if not 0 < end <= sequence.num_computed or end % self._kv.block_size:
            return
        digest = sequence.table.digests[end // self._kv.block_size - 1]
        if not self._kv.is_published(digest):
            return
        snapshot = self._snapshot_of.get(digest)
        if snapshot is None and (snapshot := self._take()) is not None:
            self._snapshot_of[digest] = snapshot
            self._saves[snapshot] = StateSave(sequence.held_slot, snapshot, end)
        if snapshot is not None:
            self._snapshot_of.move_to_end(digest)

    def _take(self) -> int | None:
        """A free snapshot, or else the least recently used one that the plan in the making does not read."""
        if not self._free:
            unread = (each for each, snapshot in self._snapshot_of.items() if snapshot not in self._restoring)
            if (digest := next(unread, None)) is None:
                return None
            self._forget(digest)
        found = self._free.pop()
        self._versions[found] += 1
        return found

    def _forget(self, digest: bytes) -> None:
        snapshot = self._snapshot_of.pop(digest, None)
        if snapshot is not None:
            self._saves.pop(snapshot, None)
            self._free.append(snapshot)
