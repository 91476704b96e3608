"""KvDisk: copies the prefix index to disk behind the step loop, and prefixes from there back into blocks.

A thread writes each block that is published, and each snapshot of a recurrent state, unless its content is
forgotten before. When a sequence is about to start and the disk has more of its prompt than the index, blocks are
allocated for that part and the sequence waits beside the queue until the thread has filled them. Then they are
published as if another sequence had computed them, the sequence goes back to the queue, and starts behind them:

    queue ──begin──▶ waits for a _Load ──loaded──▶ queue ──▶ starts behind a longer cached prefix

So nothing else knows of the disk, no step waits for it, and what cannot be read is computed. A digest covers the
cache_salt of its sequence, so a prefix is found by sequences of its salt alone, as in memory.
"""

import logging
import threading
from collections import deque
from collections.abc import Sequence as Numbers
from dataclasses import dataclass, field

from faser.engine.contract.companion import Companion
from faser.engine.contract.kv_memory import KvMemory
from faser.engine.control.kv_cache import KvManager, SequenceBlocks
from faser.engine.control.kv_file import KvFile, state_digests
from faser.engine.control.sequence import Sequence
from faser.engine.control.state_snapshots import NoSnapshots, StateSnapshots
from faser.types.statistics import KvDiskStats

_LEAST_GAIN = 64
_REST_S = 0.005  # after which messages are read
_CLOSE_S = 5.0  # for which the end waits until all is written

_log = logging.getLogger("faser.engine")


@dataclass(slots=True, eq=False)
class _Load:
    """The blocks of a table from `first` on, which are being filled, and perhaps the state behind the last one.

    num_blocks: of the table that are filled, so far. state: the snapshot to fill; None: none is needed.
    """

    table: SequenceBlocks
    token_ids: list[int]
    first: int
    state: int | None
    waiting: list[Sequence] = field(default_factory=list)
    num_blocks: int = 0
    has_state: bool = False


class NoDisk:
    """Stands in for KvDisk in an engine that keeps no KV on disk: no sequence waits for any."""

    num_waiting, is_loading = 0, False

    def __contains__(self, _: Sequence) -> bool:
        return False

    def begin(self, *_: object, **__: object) -> bool:
        return False

    def loaded(self) -> tuple[Sequence, ...]:
        return ()

    def drop(self, _: Sequence) -> None:
        """The sequence waits for nothing."""

    def stats(self) -> None:
        """Nothing is read or written."""


class KvDisk(Companion):
    """file: is closed with it. memory: of the data plane. snapshots: None: the model has no recurrent states.

    least_gain: tokens that a sequence waits for.
    """

    def __init__(
        self,
        file: KvFile,
        memory: KvMemory,
        kv: KvManager,
        snapshots: StateSnapshots | None,
        *,
        least_gain: int = _LEAST_GAIN,
    ) -> None:
        assert file.record_bytes == memory.block_bytes
        self._file = file
        self._memory = memory
        self._kv = kv
        self._snapshots = snapshots or NoSnapshots()
        self._least_gain = least_gain
        self._num_parts = -(-memory.state_bytes // memory.block_bytes)
        self._buffer = memoryview(bytearray(memory.block_bytes))
        self._state = memoryview(bytearray(self._num_parts * memory.block_bytes))
        self._loads: list[_Load] = []  # in progress
        self._queries = self._hits = 0  # tokens
        # Shared with the thread, under the lock.
        self._changed = threading.Condition()
        self._to_load: deque[_Load] = deque()
        self._loaded: deque[_Load] = deque()
        self._to_store: deque[tuple[bytes, int, int, bool]] = deque()  # digest, number, version, is a snapshot
        self._used: deque[list[bytes]] = deque()
        self._ends = False
        kv.on_published = self._store_block
        kv.on_released = self._note_use
        self._snapshots.on_saved = self._store_state
        self._thread = threading.Thread(target=self._run, name="faser-kv-disk", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for their prefix."""
        return sum(len(each.waiting) for each in self._loads)

    @property
    def is_loading(self) -> bool:
        """Return whether blocks are being loaded that no sequence has yet."""
        return bool(self._loads)

    def __contains__(self, sequence: Sequence) -> bool:
        return any(sequence in each.waiting for each in self._loads)

    def begin(self, sequence: Sequence, *, spare: int) -> bool:
        """Begin to load more of the prompt of a sequence that is about to start; return whether it waits for that.

        spare: blocks that must stay available.
        """
        if not sequence.may_load or sequence.scores_prompt:
            return False
        kv, size = self._kv, self._kv.block_size
        cached = kv.cached_prefix(sequence.table, sequence.token_ids)
        digests = kv.prefix_digests(sequence.table, sequence.token_ids)
        following = digests[len(cached) : len(cached) + 1]
        for each in self._loads:
            if following and each.table.digests[len(cached) : len(cached) + 1] == following:
                each.waiting.append(sequence)
                return True
        reach, end, state = self._reach(sequence, cached, digests)
        adopted = cached[:end]
        if not kv.can_allocate(end - len(adopted), adopting=adopted, spare=spare):
            return False
        sequence.may_load = False
        self._queries += sequence.num_tokens - reach * size
        if (end - reach) * size < self._least_gain:
            return False
        snapshot = None
        if state is not None:
            snapshot = self._snapshots.take()
            if snapshot is None:
                return False
        table = kv.copy_of(sequence.table, end)
        kv.adopt(table, adopted)
        kv.allocate(table, end - len(adopted))
        load = _Load(table, sequence.token_ids[: end * size], len(adopted), snapshot, [sequence], len(adopted))
        self._loads.append(load)
        with self._changed:
            self._to_load.append(load)
            self._changed.notify_all()
        return True

    def loaded(self) -> list[Sequence]:
        """Publish what has been filled; the sequences that waited for it."""
        found: list[Sequence] = []
        while self._loaded:
            load = self._loaded.popleft()
            self._loads.remove(load)
            table = load.table
            self._kv.publish(table, load.token_ids, load.num_blocks * self._kv.block_size)
            if load.state is not None:
                self._snapshots.filled(load.state, table.digests[-1] if load.has_state else None)
            self._hits += (load.num_blocks - load.first) * self._kv.block_size
            self._kv.release(table)
            found += load.waiting
        return found

    def drop(self, sequence: Sequence) -> None:
        """A sequence that waits has been aborted. Its blocks are filled nevertheless."""
        for each in self._loads:
            if sequence in each.waiting:
                each.waiting.remove(sequence)

    def rest(self) -> None:
        """There is nothing to compute: take the snapshots that are due, and wait a moment for loads."""
        self._save_states()
        if self._loads:
            with self._changed:
                self._changed.wait_for(lambda: self._loaded, _REST_S)

    def _save_states(self) -> None:
        for each in self._snapshots.take_saves():
            self._memory.save_state(each.slot, each.snapshot, each.num_tokens)
        self._snapshots.note_saved()

    def stats(self) -> KvDiskStats:
        """Return how much has been looked up, read and written."""
        file = self._file
        return KvDiskStats(
            queries=self._queries,
            hits=self._hits,
            num_bytes=file.num_bytes,
            read_bytes=file.num_read_bytes,
            written_bytes=file.num_written_bytes,
        )

    def close(self) -> None:
        """Write what waits, for a few seconds at most, and end the thread. No step may follow."""
        self._save_states()
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            _log.warning("%d blocks of KV were not written to disk in time", len(self._to_store))
            self._to_store.clear()
            self._thread.join()
        self._file.close()

    def _reach(
        self, sequence: Sequence, cached: Numbers[int], digests: list[bytes]
    ) -> tuple[int, int, bytes | None]:
        """Blocks behind which the sequence could start now, and with the disk; and the state to read for that."""
        end = next((i for i in range(len(cached), len(digests)) if not self._file.has(digests[i])), len(digests))
        reach = self._snapshots.reach(sequence, cached)
        for count in range(end, reach, -1):
            digest = digests[count - 1]
            if self._snapshots.has(digest):
                return reach, count, None
            if all(map(self._file.has, state_digests(digest, self._num_parts))):
                return reach, count, digest
        return reach, reach, None

    # Hooks, called in the thread of the steps.

    def _store_block(self, digest: bytes, block: int) -> None:
        if not self._file.has(digest):
            self._store(digest, block, self._kv.version(block), is_state=False)

    def _store_state(self, digest: bytes, snapshot: int) -> None:
        self._store(digest, snapshot, self._snapshots.version(snapshot), is_state=True)

    def _store(self, digest: bytes, number: int, version: int, *, is_state: bool) -> None:
        if self._file.accepts:
            with self._changed:
                self._to_store.append((digest, number, version, is_state))
                self._changed.notify_all()

    def _note_use(self, digests: list[bytes]) -> None:
        with self._changed:
            self._used.append(digests)
            self._changed.notify_all()

    # The thread.

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                if isinstance(job, _Load):
                    self._fill(job)
                elif isinstance(job, list):
                    self._file.use(job)
                else:
                    self._write(*job)
            except Exception:
                _log.exception("KV on disk: a job failed")
            if isinstance(job, _Load):
                with self._changed:
                    self._loaded.append(job)
                    self._changed.notify_all()

    def _next(self) -> _Load | list[bytes] | tuple[bytes, int, int, bool] | None:
        """Loads come first: a sequence waits for each. None: it ends."""
        queues = (self._to_load, self._to_store, self._used)
        with self._changed:
            self._changed.wait_for(lambda: self._ends or any(queues))
            return next((each.popleft() for each in queues if each), None)

    def _fill(self, load: _Load) -> None:
        digests, blocks = load.table.digests, load.table.blocks
        for i in range(load.first, len(digests)):
            if not self._file.read(digests[i], self._buffer):
                return
            self._memory.write_block(blocks[i], self._buffer)
            load.num_blocks = i + 1
        if load.state is None:
            return
        for part, digest in zip(self._parts(), state_digests(digests[-1], self._num_parts), strict=True):
            if not self._file.read(digest, part):
                return
        num_tokens = len(digests) * self._kv.block_size
        self._memory.write_state(load.state, self._state[: self._memory.state_bytes], num_tokens)
        load.has_state = True
        self._file.use([*state_digests(digests[-1], self._num_parts)])

    def _write(self, digest: bytes, number: int, version: int, is_state: bool) -> None:
        """Write a block or a snapshot that still has the content it was queued with, also after it was copied."""
        names = [*state_digests(digest, self._num_parts)] if is_state else [digest]
        owner = self._snapshots if is_state else self._kv
        if all(map(self._file.has, names)) or owner.version(number) != version:
            return
        if is_state:
            self._memory.read_state(number, self._state[: self._memory.state_bytes])
        else:
            self._memory.read_block(number, self._buffer)
        if owner.version(number) != version:
            return
        for name, part in zip(names, self._parts() if is_state else [self._buffer], strict=True):
            self._file.write(name, part)

    def _parts(self) -> list[memoryview]:
        """Return the parts of the buffer of states, one a record."""
        size = self._memory.block_bytes
        return [self._state[i * size : (i + 1) * size] for i in range(self._num_parts)]
