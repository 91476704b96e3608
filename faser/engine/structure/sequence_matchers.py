"""SequenceMatchers: where each sequence stands in its grammar.

A matcher has taken the tokens of its sequence that are committed, and no others. What asks about draft tokens
after them leaves it as it was:

    committed     c1 c2 ... cn
    draft                       x1   x2   x3
    rows                        | r0 | r1 | r2 | r3      row k is masked as after x1 … xk: `masks`
    allowed                       yes  yes  no           x3 is no row: `num_allowed` is asked before the step

The masks are llguidance's, computed for all rows of a step in one call, by threads of its own.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from faser.engine.structure.compiler import GrammarCompiler
from faser.types import StructuredOutput

Words = NDArray[np.int64]

_MOST_THREADS = 8  # masks take microseconds: more threads wait for each other


@dataclass(slots=True)
class _Place:
    """matcher: of one slot. may_end_from: before this position the answer ends only if nothing else is allowed."""

    matcher: LLMatcher
    may_end_from: float


class SequenceMatchers:
    """Of all slots whose request asks for structure. num_threads: that compute masks.

    Called by the thread of the steps alone.
    """

    def __init__(self, compiler: GrammarCompiler, *, num_threads: int) -> None:
        self._compiler = compiler
        self._executor = LLExecutor(min(num_threads, _MOST_THREADS))
        self._places: dict[int, _Place] = {}
        self._ends: Words | None = None  # [W] a mask of the end-of-sequence tokens

    @property
    def slots(self) -> Collection[int]:
        return self._places

    def start(
        self, slot: int, asked: StructuredOutput, output: Sequence[int], *, may_end_from: float = 0.0
    ) -> None:
        """A sequence takes over a free slot. output: tokens that it has generated already."""
        matcher = self._compiler.matcher(asked)
        if output:
            matcher.consume_tokens([*output])
        self._places[slot] = _Place(matcher, may_end_from)

    def release(self, slot: int) -> None:
        """The slot is free; it need not be one of `slots`."""
        self._places.pop(slot, None)

    def accept(self, slot: int, token_id: int) -> None:
        """The sequence continues with this token. One that its grammar forbids leaves it without any token."""
        self._places[slot].matcher.consume_token(token_id)

    def masks(self, drafts: Sequence[tuple[int, tuple[int, ...]]], positions: Sequence[int]) -> Words:
        """[R, W] bit i % 64 of word i // 64 is set where token i is allowed.

        drafts: (slot, draft tokens) for each sequence, which has a row for its next token and one more for each
        draft token. positions: of the token that the first row of each sequence decides. Rows after a draft token
        that is forbidden, or that ends the sequence, allow every token: no step reaches them. A sequence whose
        grammar failed is allowed no token.
        """
        num_rows = sum([len(draft) + 1 for _, draft in drafts])
        words = np.full((num_rows, self._compiler.mask_words), -1, dtype=np.int64)
        drafted: list[tuple[LLMatcher, int, list[int]]] = []
        others: list[tuple[LLMatcher, int]] = []
        row = 0
        for slot, draft in drafts:
            matcher = self._places[slot].matcher
            if draft:
                drafted.append((matcher, row, [*draft]))
            else:
                others.append((matcher, row))
            row += len(draft) + 1
        address, row_bytes = words.ctypes.data, words.strides[0]
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, address, row_bytes, num_rows)
        if len(others) == 1:
            others[0][0].unsafe_compute_mask_ptr(address + others[0][1] * row_bytes, row_bytes)
        elif others:
            self._executor.unsafe_compute_mask_ptr(others, address, row_bytes, num_rows)
        self._settle_ends(words, drafts, positions)
        return words

    def num_allowed(self, slot: int, token_ids: Sequence[int]) -> int:
        """How many of these tokens, from the first one on, the grammar allows to follow. Changes nothing."""
        return int(self._places[slot].matcher.validate_tokens([*token_ids]))

    def forced(self, slot: int, after: Sequence[int], limit: int) -> list[int]:
        """Tokens that have to follow: at most limit of the text that the grammar leaves no choice about.

        It is divided as the tokenizer divides it, without tokens at its end that further text may change; the
        model may divide it otherwise. The first token that the tokenizer has and the model has not ends them.
        after: draft tokens that come first. Changes nothing.
        """
        matcher = self._places[slot].matcher
        num_taken = int(matcher.try_consume_tokens([*after])) if after else 0
        found: list[int] = []
        if num_taken == len(after):
            wanted = matcher.compute_ff_tokens()[:limit]
            found = [*takewhile(lambda token_id: token_id < self._compiler.vocab_size, wanted)]
            num_taken += int(matcher.try_consume_tokens(found)) if found else 0
            if len(found) < limit and matcher.is_stopped() and not matcher.is_error():
                found.append(self._compiler.eos_token_ids[0])
        if num_taken:
            matcher.rollback(num_taken)
        return found

    def _settle_ends(
        self, words: Words, drafts: Sequence[tuple[int, tuple[int, ...]]], positions: Sequence[int]
    ) -> None:
        """Where an answer may not end yet, it may if nothing else is allowed. A failed grammar allows nothing."""
        row = 0
        for (slot, draft), position in zip(drafts, positions, strict=True):
            place, count = self._places[slot], len(draft) + 1
            if place.matcher.is_error():
                words[row : row + count] = 0
            elif position < place.may_end_from:
                early = words[row : row + int(min(count, place.may_end_from - position))]
                going_on = early & ~self._ends_mask()
                early[:] = np.where(going_on.any(-1, keepdims=True), going_on, early)
            row += count

    def _ends_mask(self) -> Words:
        if self._ends is None:
            bits = np.zeros(self._compiler.mask_words * 64, dtype=np.uint8)
            bits[[*self._compiler.eos_token_ids]] = 1
            self._ends = np.packbits(bits, bitorder="little").view(np.int64)
        return self._ends
