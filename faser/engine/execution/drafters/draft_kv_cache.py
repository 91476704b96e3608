"""What a draft model's KV cache holds: of each slot how far, of each block which content.

Owns the tokens of every slot and the content marks of the blocks; has never heard of tensors. The cache has the
target's blocks, so a block that the target shares between sequences comes to a slot unannounced. Whether the
draft model's half of it is there too is answered by content: a block that was filled with committed tokens is
marked with the digest of all tokens up to its end, and loses the mark before anything else is written to it.

    position    0 ......... computed ......... num_known | drafted, or behind a draft that is being verified
    draft KV    |    valid     |      missing            | fed: valid as far as the sequence goes on like this

Fed tokens there are only where no known one is missing.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from faser.engine.execution.drafters.passes import DraftInput
from faser.engine.execution.runner.batch import BlockTable

_DIGEST_BYTES = 32  # as in the target's prefix index: nobody finds two prefixes of one digest


class _Line:
    """One slot. fed: tokens after the known ones that are in the cache as well.

    digests[i]: of all tokens up to the end of block i. num_marked: leading blocks that carry their mark.
    """

    __slots__ = ("adopted", "computed", "digests", "fed", "num_marked", "token_ids")

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = array("i", token_ids)
        self.computed = 0
        self.fed: tuple[int, ...] = ()
        self.digests: list[bytes] = []
        self.num_marked = 0
        self.adopted = False


class DraftKvCache:
    """Books of one draft cache. table: the target's, which is the draft model's as well."""

    def __init__(self, table: BlockTable, *, num_blocks: int, block_size: int) -> None:
        self._table = table
        self._block_size = block_size
        self._marks: list[bytes | None] = [None] * num_blocks
        self._lines: dict[int, _Line] = {}

    def start(self, slot: int, token_ids: Sequence[int]) -> None:
        self._lines[slot] = _Line(token_ids)

    def release(self, slot: int) -> None:
        self._lines.pop(slot, None)

    def num_known(self, slot: int) -> int:
        return len(self._lines[slot].token_ids)

    def open(self, slot: int, max_tokens: int, behind: tuple[int, ...] = ()) -> DraftInput:
        """The known tokens and those behind them that the cache lacks, at least the last one of all.

        Their blocks lose their marks. Reads the block table; call only when it holds the blocks of all these
        tokens and of max_tokens more.
        """
        line = self._lines[slot]
        if not line.adopted:
            self._adopt(line, self._table.blocks(slot))
            line.adopted = True
        num_known = len(line.token_ids)
        start = min(line.computed + _num_shared(line.fed, behind), num_known + len(behind) - 1)
        first = start // self._block_size
        for block in self._table.blocks(slot, first):
            self._marks[block] = None
        line.num_marked = min(line.num_marked, first)
        missing: Sequence[int]
        if start >= num_known:
            missing = behind[start - num_known :]
        else:
            missing = line.token_ids[start:]
            missing.extend(behind)
        return DraftInput(slot=slot, start=start, token_ids=missing, max_tokens=max_tokens)

    def fill(self, slot: int, fed: tuple[int, ...]) -> None:
        """The cache now holds all known tokens, and after them these: behind, and what was drafted and fed."""
        line = self._lines[slot]
        line.computed = len(line.token_ids)
        line.fed = fed
        self._mark(slot, line)

    def extend(self, slot: int, token_ids: tuple[int, ...]) -> None:
        """The sequence goes on with these. Fed tokens that agree stay; those beyond, if all agree."""
        line = self._lines[slot]
        if line.fed:
            num_shared = _num_shared(line.fed, token_ids)
            line.computed += num_shared
            line.fed = line.fed[num_shared:] if num_shared == len(token_ids) else ()
        line.token_ids.extend(token_ids)
        self._mark(slot, line)

    def check_invariants(self) -> None:
        """AssertionError where the books disagree. Slow: for tests."""
        for slot, line in self._lines.items():
            assert 0 <= line.computed <= len(line.token_ids)
            assert line.num_marked * self._block_size <= line.computed
            blocks = self._table.blocks(slot)
            assert not line.fed or line.computed == len(line.token_ids)
            assert line.computed + len(line.fed) <= len(blocks) * self._block_size
            for i in range(line.num_marked):
                assert self._marks[blocks[i]] == self._digest(line, i)

    def _adopt(self, line: _Line, blocks: list[int]) -> None:
        """Count the leading blocks whose mark is that of the sequence's own tokens."""
        for i in range(len(line.token_ids) // self._block_size):
            if self._marks[blocks[i]] != self._digest(line, i):
                break
            line.num_marked = i + 1
        line.computed = line.num_marked * self._block_size

    def _mark(self, slot: int, line: _Line) -> None:
        num_full = line.computed // self._block_size
        if line.num_marked >= num_full:
            return
        for i, block in enumerate(self._table.blocks(slot, line.num_marked)[: num_full - line.num_marked]):
            self._marks[block] = self._digest(line, line.num_marked + i)
        line.num_marked = num_full

    def _digest(self, line: _Line, i: int) -> bytes:
        size = self._block_size
        while len(line.digests) <= i:
            k = len(line.digests)
            before = line.digests[-1] if k else b""
            content = line.token_ids[k * size : (k + 1) * size].tobytes()
            line.digests.append(blake2b(before + content, digest_size=_DIGEST_BYTES).digest())
        return line.digests[i]


def _num_shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Length of the common beginning."""
    count = min(len(one), len(other))
    if one[:count] == other[:count]:
        return count
    return next(i for i in range(count) if one[i] != other[i])
