"""HeadCache: which blocks of a head's own KV cache each slot holds, and how many rows the head has computed there.

Counts and block numbers only. A row's place is its number among the rows that the head has computed for the slot,
not its position in the sequence: so the cache knows nothing of prefixes that others have computed, and a gap in
the states leaves no hole. Rotary embeddings turn by distance, so only distances across a gap are wrong.

    position   | cached prefix | 40  41  42 ...... 58 | gap | 64 ... 70 |
    row        |               |  0   1   2 ...... 18 |     | 19 ... 25 | draft rows: overwritten by the next draft
"""

from faser.engine.execution.runner.batch import BlockTable


class HeadCache:
    """table: the head's own, with as many slots as the engine's. num_blocks: of its cache."""

    def __init__(self, table: BlockTable, *, num_slots: int, num_blocks: int, block_size: int) -> None:
        self.table = table
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_rows = [0] * num_slots

    def num_rows(self, slot: int) -> int:
        """Rows that the head has computed since the slot began anew."""
        return self._num_rows[slot]

    def set_rows(self, slot: int, num_rows: int) -> None:
        """The first num_rows places of the slot are rows of committed tokens."""
        self._num_rows[slot] = num_rows

    def reserve(self, slot: int, num_places: int) -> bool:
        """Let the slot hold blocks for this many places; False and unchanged where too few are free."""
        wanted = -(-num_places // self._block_size) - len(self.table.blocks(slot))
        if wanted <= 0:
            return True
        if wanted > len(self._free):
            return False
        self.table.append(slot, tuple([self._free.pop() for _ in range(wanted)]))
        return True

    def begin_anew(self, slot: int) -> None:
        """Give all blocks of the slot back: nothing of it is computed."""
        self._free.extend(reversed(self.table.blocks(slot)))
        self.table.clear(slot)
        self._num_rows[slot] = 0

    def check_invariants(self) -> None:
        """Raises AssertionError unless every block is free or held by one slot that has room. Slow: for tests."""
        held = [block for slot in range(len(self._num_rows)) for block in self.table.blocks(slot)]
        assert sorted([*held, *self._free]) == list(range(self._num_blocks))
        for slot, num_rows in enumerate(self._num_rows):
            assert num_rows <= len(self.table.blocks(slot)) * self._block_size
