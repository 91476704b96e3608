"""Marks of the target's blocks: which of them a drafter has filled as well, by content.

A drafter's KV cache has the target's blocks: one block table, one set of block numbers, tensors of its own. The
target may give a slot a block that other sequences have filled. Whether the drafter has filled it too is decided
by content: a block that is full of committed tokens is marked with the digest of all tokens up to its end, and
loses the mark before the drafter writes anything else to it.
"""

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from faser.engine.execution.runner.batch import BlockTable

_DIGEST_BYTES = 32  # as in the target's prefix index: two prefixes with one digest cannot be found


class MarkedLine:
    """The known tokens of one sequence. num_marked: leading blocks that have their mark.

    digests[i]: of all tokens up to the end of block i.
    """

    __slots__ = ("digests", "num_marked", "token_ids")

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = array("i", token_ids)
        self.digests: list[bytes] = []
        self.num_marked = 0


class BlockMarks:
    """The mark of every block. table: of the target."""

    def __init__(self, table: BlockTable, *, num_blocks: int, block_size: int) -> None:
        self._table = table
        self.block_size = block_size
        self._marks: list[bytes | None] = [None] * num_blocks

    def adopt(self, slot: int, line: MarkedLine) -> int:
        """Take over the leading blocks whose mark is that of the line's own tokens; returns how many tokens.

        While the prompt is computed, the slot may hold fewer blocks than it has tokens.
        """
        num_full = len(line.token_ids) // self.block_size
        for i, block in enumerate(self._table.blocks(slot)[:num_full]):
            if self._marks[block] != self._digest(line, i):
                break
            line.num_marked = i + 1
        return line.num_marked * self.block_size

    def clear(self, slot: int, line: MarkedLine, position: int) -> None:
        """The drafter is about to write to this position and to later ones."""
        first = position // self.block_size
        for block in self._table.blocks(slot, first):
            self._marks[block] = None
        line.num_marked = min(line.num_marked, first)

    def mark(self, slot: int, line: MarkedLine, num_tokens: int) -> list[int]:
        """Mark the blocks within the first num_tokens tokens, which are filled; returns those that had no mark."""
        first, num_full = line.num_marked, num_tokens // self.block_size
        if first >= num_full:
            return []
        blocks = self._table.blocks(slot, first)[: num_full - first]
        for i, block in enumerate(blocks):
            self._marks[block] = self._digest(line, first + i)
        line.num_marked = num_full
        return blocks

    def keep(self, slots: Iterable[int]) -> None:
        """Clear the marks of blocks that none of these slots holds."""
        held = {block for slot in slots for block in self._table.blocks(slot)}
        self._marks = [mark if block in held else None for block, mark in enumerate(self._marks)]

    def check_invariants(self, slot: int, line: MarkedLine) -> None:
        """Raises AssertionError where marks and tokens disagree. Slow: for tests."""
        blocks = self._table.blocks(slot)
        for i in range(line.num_marked):
            assert self._marks[blocks[i]] == self._digest(line, i)

    def _digest(self, line: MarkedLine, i: int) -> bytes:
        size = self.block_size
        while len(line.digests) <= i:
            k = len(line.digests)
            before = line.digests[-1] if k else b""
            content = line.token_ids[k * size : (k + 1) * size].tobytes()
            line.digests.append(blake2b(before + content, digest_size=_DIGEST_BYTES).digest())
        return line.digests[i]
