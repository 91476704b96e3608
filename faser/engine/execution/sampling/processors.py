"""The logits processors, in alphabetical order, and the order in which they edit logits.

Two have files of their own: penalties.py and thinking.py.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from faser.engine.contract.plan import SequenceStart
from faser.engine.execution.sampling.edits import (
    Entries,
    LogitsEdit,
    LogitsProcessor,
    ProcessedRows,
    add_bias,
    allow_only,
    distinct,
    forbid,
    mask,
)
from faser.engine.execution.sampling.penalties import Penalties
from faser.engine.execution.sampling.thinking import Thinking
from faser.engine.structure.sequence_matchers import SequenceMatchers
from faser.kernels.interface.sampling import MaskKernel
from faser.types.arrays import Ints


def make_logits_processors(
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    matchers: SequenceMatchers | None = None,
    mask_kernel: MaskKernel | None = None,
) -> tuple[LogitsProcessor[Any], ...]:
    """In their order. matchers: None: no request has structured output. mask_kernel: None: tensor operations."""
    return (
        Bias(vocab_size),
        Penalties(),
        AllowedTokens(vocab_size, eos_token_ids),
        BadWords(vocab_size),
        MinTokens(vocab_size, eos_token_ids),
        Thinking(),
        *(() if matchers is None else (Structure(matchers, mask_kernel or mask),)),
    )


class AllowedTokens(LogitsProcessor[Ints]):
    """allowed_token_ids: no other token can be sampled, except the end of an answer with a structure."""

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        super().__init__()
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids

    def start(self, start: SequenceStart) -> None:
        allowed = start.sampling.allowed_token_ids
        if allowed is not None:
            ends = () if start.sampling.structured_output is None else self._eos_token_ids
            self._by_slot[start.slot] = distinct(allowed + ends, self._vocab_size)

    def edit(self, rows: ProcessedRows) -> LogitsEdit | None:
        masked = rows.of(self._by_slot)
        if not masked:
            return None
        allowed = Entries.of(masked, [self._by_slot[rows.slots[row]] for row in masked])
        return partial(allow_only, allowed=allowed)


class BadWords(LogitsProcessor["_Words"]):
    """bad_words: a token that would complete a banned sequence of tokens in the output cannot be sampled.

    Only the output is searched: a word may begin in the prompt.
    """

    reads_output = True

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._vocab_size = vocab_size

    def start(self, start: SequenceStart) -> None:
        if start.sampling.bad_words:
            words = _Words(start.sampling.bad_words, self._vocab_size)
            words.extend(start.token_ids[start.prompt_len :])
            self._by_slot[start.slot] = words

    def accept(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        for slot, token_id in zip(slots, token_ids, strict=True):
            if slot in self._by_slot:
                self._by_slot[slot].extend((token_id,))

    def edit(self, rows: ProcessedRows) -> LogitsEdit | None:
        forbidden = {
            row: self._by_slot[rows.slots[row]].completed_after(rows.drafts[row]) for row in rows.of(self._by_slot)
        }
        edited = [row for row, token_ids in forbidden.items() if len(token_ids)]
        return partial(forbid, at=Entries.of(edited, [forbidden[row] for row in edited])) if edited else None


class _Words:
    """The banned sequences of one slot, and as many of the last output tokens as the longest of them needs."""

    def __init__(self, words: Sequence[tuple[int, ...]], vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._always = distinct((word[0] for word in words if len(word) == 1), vocab_size)
        self._by_token_before = defaultdict[int, list[tuple[int, ...]]](list)
        for word in words:
            if len(word) > 1:
                self._by_token_before[word[-2]].append(word)
        self._num_needed = max(map(len, words)) - 1
        self._output: tuple[int, ...] = ()

    def extend(self, token_ids: Sequence[int]) -> None:
        self._output = self._last((*self._output, *token_ids))

    def completed_after(self, drafts: Sequence[int]) -> Ints:
        """Return the tokens [N], ascending, that complete a word after the output and these draft tokens."""
        before = self._last((*self._output, *drafts)) if drafts else self._output
        if not before or before[-1] not in self._by_token_before:
            return self._always
        ends = [
            word[-1]
            for word in self._by_token_before[before[-1]]
            if len(word) - 1 <= len(before) and before[1 - len(word) :] == word[:-1]
        ]
        if not ends:
            return self._always
        return distinct(np.concatenate((self._always, np.array(ends, dtype=np.int64))), self._vocab_size)

    def _last(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        return token_ids[len(token_ids) - self._num_needed :] if len(token_ids) > self._num_needed else token_ids


class Bias(LogitsProcessor[tuple[Ints, NDArray[np.float32]]]):
    """logit_bias: numbers added to the logits of some tokens. One that is named several times gets the sum."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._vocab_size = vocab_size

    def start(self, start: SequenceStart) -> None:
        if not start.sampling.logit_bias:
            return
        total: dict[int, float] = {}
        for token_id, bias in start.sampling.logit_bias:
            total[token_id] = total.get(token_id, 0.0) + bias
        token_ids = distinct(total, self._vocab_size)
        self._by_slot[start.slot] = (token_ids, np.array([total[i] for i in sorted(total)], np.float32))

    def edit(self, rows: ProcessedRows) -> LogitsEdit | None:
        biased = rows.of(self._by_slot)
        if not biased:
            return None
        asked = [self._by_slot[rows.slots[row]] for row in biased]
        at = Entries.of(biased, [token_ids for token_ids, _ in asked])
        return partial(add_bias, at=at, bias=np.concatenate([values for _, values in asked]))


class MinTokens(LogitsProcessor[tuple[int, Ints]]):
    """min_tokens: tokens that would end a sequence cannot be sampled before it is long enough.

    They are the request's stop_token_ids and, unless it ignores them, the EOS ones. Where the answer has a
    structure, its mask holds back the EOS tokens. By slot: the first position at which it may end, and the tokens.
    """

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        super().__init__()
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids

    def start(self, start: SequenceStart) -> None:
        sampling = start.sampling
        if sampling.min_tokens:
            by_eos = not sampling.ignore_eos and sampling.structured_output is None
            ends = sampling.stop_token_ids + (self._eos_token_ids if by_eos else ())
            self._by_slot[start.slot] = (start.prompt_len + sampling.min_tokens, distinct(ends, self._vocab_size))

    def edit(self, rows: ProcessedRows) -> LogitsEdit | None:
        short = [row for row in rows.of(self._by_slot) if rows.positions[row] < self._by_slot[rows.slots[row]][0]]
        if not short:
            return None
        return partial(forbid, at=Entries.of(short, [self._by_slot[rows.slots[row]][1] for row in short]))


class Structure(LogitsProcessor[None]):
    """structured_output: only tokens can be sampled that the request's grammar allows next.

    It alone starts, advances and releases the matchers; the drafter only asks them.
    """

    reads_output = True

    def __init__(self, matchers: SequenceMatchers, mask_kernel: MaskKernel) -> None:
        super().__init__()
        self._matchers = matchers
        self._mask = mask_kernel

    @property
    def slots(self) -> Collection[int]:
        return self._matchers.slots

    def start(self, start: SequenceStart) -> None:
        sampling = start.sampling
        if sampling.structured_output is not None:
            self._matchers.start(
                start.slot,
                sampling.structured_output,
                start.token_ids[start.prompt_len :],
                may_end_from=math.inf if sampling.ignore_eos else start.prompt_len + sampling.min_tokens,
            )

    def accept(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        structured = self._matchers.slots
        for slot, tokens in groupby(zip(slots, token_ids, strict=True), itemgetter(0)):
            if slot in structured:
                self._matchers.accept(slot, *[token_id for _, token_id in tokens])

    def is_late(self, slot: int) -> bool:
        return self._matchers.is_late(slot)

    def release(self, slot: int) -> None:
        self._matchers.release(slot)

    def edit(self, rows: ProcessedRows) -> LogitsEdit | None:
        self.without_token = {}
        masked = rows.of(self._matchers.slots)
        if not masked:
            return None
        drafted, positions = _by_sequence(rows, masked)
        words, self.without_token = self._matchers.masks(drafted, positions, alone=len(masked) == len(rows.slots))
        at = np.array(masked, dtype=np.int64)
        return lambda logits: self._mask(logits, at, words)


def _by_sequence(rows: ProcessedRows, masked: list[int]) -> tuple[list[tuple[int, tuple[int, ...]]], list[int]]:
    """The sequences of these rows with their whole drafts, and the positions of their first tokens.

    The rows of a sequence follow each other, and the drafts before them grow by a token a row.
    """
    drafted: list[tuple[int, tuple[int, ...]]] = []
    positions: list[int] = []
    for row in masked:
        draft = rows.drafts[row]
        if draft:
            slot, before = drafted[-1]
            assert slot == rows.slots[row], "the rows of a sequence do not follow each other"
            assert len(before) == len(draft) - 1, "a row of a draft is missing"
            drafted[-1] = (slot, draft)
        else:
            drafted.append((rows.slots[row], ()))
            positions.append(rows.positions[row])
    return drafted, positions
