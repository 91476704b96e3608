"""NgramDrafter: what followed the last few tokens the last time they occurred in this sequence.

Owns a copy of each sequence's tokens and, for each n, the latest position of every n-gram. A draft depends on its
own sequence alone. Source: prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding),
which scans the prompt; here an index answers, brought up to date only when a sequence drafts.
"""

from collections.abc import Callable, Sequence

from faser.engine.contract.plan import DraftPlan, SequenceStart
from faser.engine.execution.drafting.drafter import Proposals, by_slot
from faser.engine.execution.drafting.text import prediction_prefix
from tests.engine.execution.draft_lines import DraftLine, table_with


class NgramDrafter:
    """A Drafter. Tries n = max_n first, min_n last, and never drafts more than cap tokens.

    A draft that reaches the end of the known text continues with its own tokens: what has begun to repeat is
    expected to repeat again. The confidence of each token is n. Raises ValueError unless 1 <= min_n <= max_n.
    """

    drafts_overlapped = True

    def __init__(self, *, min_n: int, max_n: int, cap: int) -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError(f"min_n is {min_n} and max_n is {max_n}; 1 <= min_n <= max_n must hold")
        self._lengths = range(max_n, min_n - 1, -1)
        self._cap = cap
        self._indexes: dict[int, _NgramIndex] = {}

    def start(self, start: SequenceStart) -> None:
        self._indexes[start.slot] = _NgramIndex((*prediction_prefix(start), *start.token_ids), self._lengths)

    def propose(self, plan: DraftPlan, _until: Callable[[], bool] | None = None, /) -> Proposals:
        drafts = []
        for request in plan.requests:
            index = self._indexes[request.slot]
            length, token_ids = index.continuation(request.unverified, min(self._cap, request.max_tokens))
            confidences = (float(length),) * len(token_ids)
            draft = DraftLine(slot=request.slot, method="ngram", token_ids=token_ids, confidences=confidences)
            drafts.append(draft)
        return Proposals(table=table_with(drafts, plan.width))

    def commit(self, slots: Sequence[int], counts: Sequence[int], token_ids: Sequence[int]) -> None:
        for slot, tokens in by_slot(slots, counts, token_ids):
            self._indexes[slot].tokens.extend(tokens)

    def release(self, slot: int) -> None:
        del self._indexes[slot]


class _NgramIndex:
    """One sequence's tokens; for each n, the latest position that each n-gram comes right before.

    Keys are hashes, so the tokens of an n-gram are compared before it counts as found.
    """

    def __init__(self, token_ids: tuple[int, ...], lengths: range) -> None:
        self.tokens = list(token_ids)
        self._latest: dict[int, dict[int, int]] = {n: {} for n in lengths}
        self._indexed = 0  # positions before it are indexed

    def continuation(self, unverified: tuple[int, ...], num_tokens: int) -> tuple[int, tuple[int, ...]]:
        """Length of the longest match, 0 for none, and the num_tokens tokens that are expected next.

        unverified: follow the tokens during this call; they are scanned, never indexed.
        """
        self._index()
        num_known = len(self.tokens)
        self.tokens.extend(unverified)
        found = self._longest_match(num_tokens)
        del self.tokens[num_known:]
        return found

    def _longest_match(self, num_tokens: int) -> tuple[int, tuple[int, ...]]:
        tokens = self.tokens
        is_indexed = self._indexed == len(tokens)
        for n, latest in self._latest.items():
            tail = tokens[-n:]
            begin = None if is_indexed else self._scan(n, tail)
            if begin is None:
                begin = latest.get(hash(tuple(tail)))
            if begin is None or tokens[begin - n : begin] != tail:
                continue
            known = tokens[begin : begin + num_tokens]
            repeats = -(-num_tokens // len(known))
            return n, tuple((known * repeats)[:num_tokens])
        return 0, ()

    def _scan(self, n: int, tail: list[int]) -> int | None:
        """The latest position, of those not indexed, that the n tokens of tail come right before."""
        for begin in range(len(self.tokens) - 1, max(n, self._indexed) - 1, -1):
            if self.tokens[begin - n : begin] == tail:
                return begin
        return None

    def _index(self) -> None:
        """Add every position that has n tokens before it and one at it."""
        end = len(self.tokens)
        for n, latest in self._latest.items():
            begin = max(n, self._indexed)
            recent = tuple(self.tokens[begin - n : end - 1])
            for position in range(begin, end):
                latest[hash(recent[position - begin : position - begin + n])] = position
        self._indexed = end
