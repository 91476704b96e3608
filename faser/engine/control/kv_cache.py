"""KvManager: which sequence holds which KV block, what the block contains, when it may be used again.

Owns the free list, the reference counts and the prefix index. Sees block numbers and token ids only, never
tensors, devices or requests. A block is in exactly one state:

    free ──allocate──▶ referenced ──last release──▶ free            content unknown or unpublished
                           ▲      └──────────────▶ evictable        content published, least recently used first
                           └─────────adopt────────────┘ └─allocate─▶ referenced, content forgotten

Between begin_step and end_step a released block is deferred first: work already launched may still read or write
it, so it stays closed until every step that had begun by then has ended.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from hashlib import blake2b

from faser.engine.contract.cache_salt import salt_digest
from faser.engine.contract.kv_events import BlockRemoved, BlockStored, KvEvent
from faser.errors import ConfigError
from faser.types.adapter import Adapter

# Wide enough that two prefixes with one digest cannot be found, not even on purpose.
_DIGEST_BYTES = 32
_ID_DIGITS = 7  # hexadecimal, of an adapter's number in events


class SequenceBlocks:
    """The blocks of one sequence, in order of position. Only KvManager writes it.

    blocks[p // block_size] holds position p. Digests belong to the tokens, not to the blocks, so they
    survive a release: a sequence's block is hashed once in its life.
    """

    __slots__ = ("adapter", "blocks", "digests", "num_published", "root")

    def __init__(self, root: bytes, adapter: Adapter | None = None) -> None:
        self.blocks: list[int] = []
        self.digests: list[bytes] = []  # digests[i] identifies all tokens up to the end of block i
        self.num_published = 0  # leading blocks that are published, or will never be
        self.root = root
        self.adapter = adapter


class KvManager:
    """A pool of num_blocks blocks of block_size tokens. Raises ConfigError when either is below 1.

    records_events: what changes in the prefix index waits for take_events.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True, records_events: bool = False
    ) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self._caching = enable_prefix_caching
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._deferred: OrderedDict[int, int] = OrderedDict()  # block: the step whose end opens it, ascending
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._holders: set[SequenceBlocks] = set()
        self._events: list[KvEvent] | None = [] if records_events else None
        self._num_begun = self._num_ended = 0  # steps
        self._versions = [0] * num_blocks  # how often each block was allocated
        self.on_forgotten: Callable[[bytes], None] | None = None  # called with every digest that leaves the index
        self.on_published: Callable[[bytes, int], None] | None = (
            None  # with every digest that enters it, and its block
        )
        self.on_released: Callable[[list[bytes]], None] | None = (
            None  # with those of the blocks of a released table
        )

    def new_table(self, cache_salt: str | None = None, adapter: Adapter | None = None) -> SequenceBlocks:
        """An empty table. Tables of different salts or adapters never share content through the prefix index."""
        return SequenceBlocks(salt_digest(cache_salt, adapter), adapter)

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free) + len(self._evictable)

    @property
    def usage(self) -> float:
        """Share of the pool that is referenced or deferred, 0 to 1. Evictable content counts as free."""
        return 1.0 - self.num_available / self.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold num_tokens tokens: 0 for 0, 1 for 1."""
        return -(-num_tokens // self.block_size)

    def next_full(self, num_computed: int) -> int:
        """Return the number of computed tokens with which one more block can be published."""
        return (num_computed // self.block_size + 1) * self.block_size

    def cached_prefix(self, table: SequenceBlocks, token_ids: list[int]) -> list[int]:
        """Published blocks that hold the beginning of token_ids, which are table's tokens.

        The last token is never among them, because its logits are needed. Nothing is reserved: adopt the blocks
        before anything else is allocated.
        """
        found: list[int] = []
        if not self._caching:
            return found
        for i in range((len(token_ids) - 1) // self.block_size):
            block = self._block_of.get(self._digest_at(table, token_ids, i))
            if block is None:
                break
            found.append(block)
        return found

    def prefix_digests(self, table: SequenceBlocks, token_ids: list[int]) -> list[bytes]:
        """Digests of all blocks that cached_prefix could find."""
        count = (len(token_ids) - 1) // self.block_size
        if count:
            self._digest_at(table, token_ids, count - 1)
        return table.digests[:count]

    def copy_of(self, table: SequenceBlocks, num_blocks: int) -> SequenceBlocks:
        """An empty table for the same content as the first num_blocks blocks of another one."""
        found = SequenceBlocks(table.root, table.adapter)
        found.digests = table.digests[:num_blocks]
        return found

    def version(self, block: int) -> int:
        """A number that changes before the content of a published block does. May be asked for in any thread."""
        return self._versions[block]

    def can_allocate(self, num_blocks: int, *, adopting: Collection[int] = (), spare: int = 0) -> bool:
        """Return whether num_blocks fit after adopting the blocks `adopting`, with `spare` blocks left."""
        if num_blocks + spare + len(adopting) <= self.num_available:
            return True
        revived = sum(block in self._evictable for block in adopting)
        return num_blocks + spare + revived <= self.num_available

    def adopt(self, table: SequenceBlocks, blocks: list[int], *, num_queried: int = 0) -> None:
        """Begin an empty table with blocks that hold its first tokens: a cached prefix, or a running sample's.

        num_queried: tokens that the prefix cache's statistics count as queried.
        """
        assert not table.blocks, f"only an empty table can adopt; this one has {len(table.blocks)} blocks"
        for block in blocks:
            if self._references[block] == 0:
                del (self._evictable if block in self._evictable else self._deferred)[block]
            self._references[block] += 1
        table.blocks.extend(blocks)
        table.num_published = len(blocks)
        self._note_holder(table)
        if self._caching:
            self.num_query_tokens += num_queried
            self.num_hit_tokens += min(num_queried, len(blocks) * self.block_size)

    def allocate(self, table: SequenceBlocks, num_blocks: int) -> list[int]:
        """Append num_blocks blocks of unknown content and return them. Needs a can_allocate that returned True."""
        assert num_blocks <= self.num_available, f"{num_blocks} blocks wanted, {self.num_available} available"
        taken = [self._take() for _ in range(num_blocks)]
        table.blocks.extend(taken)
        self._note_holder(table)
        return taken

    def publish(self, table: SequenceBlocks, token_ids: list[int], num_computed: int) -> None:
        """Add the blocks that the first num_computed tokens fill to the prefix index; these tokens are final.

        Content that another block has published already stays there; this block remains private.
        """
        num_full = num_computed // self.block_size
        if num_full <= table.num_published or not self._caching:
            return
        for i in range(table.num_published, num_full):
            digest = self._digest_at(table, token_ids, i)
            if digest not in self._block_of:
                self._block_of[digest] = table.blocks[i]
                self._digest_of[table.blocks[i]] = digest
                if self._events is not None:
                    self._events.append(self._stored(table, token_ids, i))
                if self.on_published is not None:
                    self.on_published(digest, table.blocks[i])
        table.num_published = num_full

    def is_published(self, digest: bytes) -> bool:
        """Return whether a block in the prefix index has this digest."""
        return digest in self._block_of

    def take_events(self) -> list[KvEvent]:
        """Return and forget the changes of the prefix index since the last call, in order."""
        taken, self._events = self._events or [], [] if self._events is not None else None
        return taken

    def _stored(self, table: SequenceBlocks, token_ids: list[int], i: int) -> BlockStored:
        """Block i of a sequence has entered the index."""
        size, adapter = self.block_size, table.adapter
        keys = [] if adapter is None else [adapter.name]
        if i == 0 and table.root != salt_digest(None, adapter):
            keys.append(table.root.hex())
        return BlockStored(
            block_hashes=[_short(table.digests[i])],
            parent_block_hash=_short(table.digests[i - 1]) if i else None,
            token_ids=token_ids[i * size : (i + 1) * size],
            block_size=size,
            lora_id=None if adapter is None else int(adapter.digest[:_ID_DIGITS], 16),
            lora_name=None if adapter is None else adapter.name,
            extra_keys=[keys] if keys else None,
        )

    def release(self, table: SequenceBlocks) -> None:
        """Drop all references of table. Blocks without further references go back, the last one first.

        So the beginning of a sequence, which others are likelier to share, is evicted last.
        """
        if self.on_released is not None and table.num_published:
            self.on_released(table.digests[: table.num_published])
        for block in reversed(table.blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._num_begun > self._num_ended:
                    self._deferred[block] = self._num_begun
                else:
                    self._reopen(block)
        table.blocks.clear()
        table.num_published = 0
        self._holders.discard(table)

    def begin_step(self) -> None:
        """Blocks released from now on stay closed until the end of this step."""
        self._num_begun += 1

    def end_step(self) -> None:
        """The oldest step in flight has ended: open the blocks that waited only for it."""
        assert self._num_ended < self._num_begun, "no step has begun"
        self._num_ended += 1
        while self._deferred and next(iter(self._deferred.values())) <= self._num_ended:
            block, _ = self._deferred.popitem(last=False)
            self._reopen(block)

    def check_invariants(self) -> None:
        """AssertionError where the states above do not hold. Slow: for tests."""
        held = Counter(block for table in self._holders for block in table.blocks)
        assert [held[block] for block in range(self.num_blocks)] == self._references
        states = Counter([*self._free, *self._evictable, *self._deferred, *held.keys()])
        assert states == Counter(range(self.num_blocks)), "every block has exactly one state"
        waiting = list(self._deferred.values())
        assert waiting == sorted(waiting)
        assert all(self._num_ended < step <= self._num_begun for step in waiting)
        assert self._digest_of == {block: digest for digest, block in self._block_of.items()}
        assert all(block in self._digest_of for block in self._evictable)
        assert not any(block in self._digest_of for block in self._free)
        assert self._caching or not self._digest_of
        for table in self._holders:
            assert len(set(table.blocks)) == len(table.blocks)
            assert table.num_published <= len(table.blocks)
        assert 0 <= self.num_hit_tokens <= self.num_query_tokens

    def _digest_at(self, table: SequenceBlocks, token_ids: list[int], i: int) -> bytes:
        """Digest of block i of a sequence: of its tokens, chained to everything before it."""
        digests = table.digests
        while len(digests) <= i:
            at = len(digests) * self.block_size
            packed = array("q", token_ids[at : at + self.block_size]).tobytes()
            digests.append(_digest((digests[-1] if digests else table.root) + packed))
        return digests[i]

    def _note_holder(self, table: SequenceBlocks) -> None:
        if table.blocks:
            self._holders.add(table)

    def _take(self) -> int:
        """A free block, or else the least recently used evictable one, whose content is forgotten."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
            digest = self._digest_of.pop(block)
            del self._block_of[digest]
            if self.on_forgotten is not None:
                self.on_forgotten(digest)
            if self._events is not None:
                self._events.append(BlockRemoved([_short(digest)]))
        self._references[block] = 1
        self._versions[block] += 1
        return block

    def _reopen(self, block: int) -> None:
        if block in self._digest_of:
            self._evictable[block] = None
        else:
            self._free.append(block)


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _short(digest: bytes) -> int:
    """Return the 64 bits by which events name the digest."""
    return int.from_bytes(digest[-8:])
