"""bad_words: a token that would complete a banned sequence of tokens in the output cannot be sampled."""

from collections import defaultdict
from collections.abc import Collection, Sequence

import numpy as np

from faser.engine.contract.plan import SequenceStart
from faser.engine.execution.sampling.logits_processors.processor import ProcessedRows
from faser.engine.execution.sampling.logits_processors.token_ids import distinct
from faser.kernels.interface.sampling.logits_processor_kernels import ForbidEdit, LogitPositions
from faser.kernels.interface.sampling.sampling_kernels import Ints


class BadWords:
    """See LogitsProcessor. Only the output is searched: a word may begin in the prompt."""

    reads_output = True

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._by_slot: dict[int, _Words] = {}

    @property
    def slots(self) -> Collection[int]:
        return self._by_slot

    def start(self, start: SequenceStart) -> None:
        if start.sampling.bad_words:
            words = _Words(start.sampling.bad_words, self._vocab_size)
            words.said(start.token_ids[start.prompt_len :])
            self._by_slot[start.slot] = words

    def accept(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        for slot, token_id in zip(slots, token_ids, strict=True):
            if slot in self._by_slot:
                self._by_slot[slot].said((token_id,))

    def release(self, slot: int) -> None:
        self._by_slot.pop(slot, None)

    def edit(self, rows: ProcessedRows) -> ForbidEdit | None:
        drafts = rows.drafts
        forbidden = {
            row: self._by_slot[rows.slots[row]].completed_after(drafts[row] if drafts else ())
            for row in rows.of(self._by_slot)
        }
        edited = [row for row, token_ids in forbidden.items() if len(token_ids)]
        return ForbidEdit(at=LogitPositions.of(edited, [forbidden[row] for row in edited])) if edited else None


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

    def said(self, token_ids: Sequence[int]) -> None:
        self._output = self._last((*self._output, *token_ids))

    def completed_after(self, drafts: Sequence[int]) -> Ints:
        """[N] ascending: tokens that complete a word after the output and these draft tokens."""
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
