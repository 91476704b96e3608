"""ReplayDrafter: drafts of a given acceptance, made of answers that are known beforehand.

For planning: what a drafter with this acceptance would gain. A draft repeats the known answer up to a place drawn
at random, where it has another token. The model verifies it like any draft, so answers stay its own.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from faser.engine.contract.drafts import empty_table
from faser.engine.contract.plan import DraftPlan, SequenceStart
from faser.engine.execution.drafting.drafter import Proposals
from faser.types.arrays import NO_TOKEN, Ints

METHOD = "suffix"  # its confidence is an estimated probability, and the policy takes it for a look-up

AnswerKey = tuple[int, tuple[int, ...]]  # seed and prompt


class _Replayed(NamedTuple):
    """The draft after each number of output tokens n. token_ids: [n, K]. lengths: [n]."""

    token_ids: Ints
    lengths: Ints


class ReplayDrafter:
    """Drafter that is right at given rates. rates: by position the share of drafts right so far; they never rise.

    A draft is right up to position i where one uniform number per output position is below rates[i]. These numbers
    depend on the request's seed and the position alone, so every run has the same ones. The confidence of a token
    is its chance to be right after the ones before it; it says nothing about the single draft.
    draft_s: what drafting takes before a step, however many drafts it makes. pause: takes that time.
    """

    drafts_overlapped = False

    def __init__(
        self, rates: Sequence[float], *, draft_s: float = 0.0, pause: Callable[[float], None] = time.sleep
    ) -> None:
        self._rates = np.array(rates)
        self._confidences = np.array(
            [after / before if before else 0.0 for before, after in pairwise((1.0, *rates))]
        )
        self._draft_s, self._pause = draft_s, pause
        self._answers: dict[AnswerKey, _Replayed] = {}
        self._slots: dict[int, _Replayed] = {}
        self._positions: dict[int, int] = {}

    def expect(self, answers: Mapping[AnswerKey, Sequence[int]]) -> None:
        """From now on, requests have these answers."""
        self._answers = {key: self._replayed(key[0], answer) for key, answer in answers.items()}

    def _replayed(self, seed: int, answer: Sequence[int]) -> _Replayed:
        count, width = len(answer), len(self._rates)
        padded = np.concatenate((np.array(answer, dtype=np.int64), np.full(width, NO_TOKEN)))
        token_ids = np.lib.stride_tricks.sliding_window_view(padded, width)[:count].copy()
        num_right = (np.random.default_rng(seed).random((count, 1)) < self._rates).sum(axis=1)
        first_wrong = (np.arange(width) == num_right[:, None]) & (token_ids != NO_TOKEN)
        token_ids[first_wrong] += np.where(token_ids[first_wrong] > 0, -1, 1)
        return _Replayed(token_ids, np.minimum(width, count - np.arange(count)))

    def start(self, start: SequenceStart) -> None:
        seed = start.sampling.seed
        assert seed is not None, "answers are known by seed and prompt"
        self._slots[start.slot] = self._answers[seed, start.token_ids[: start.prompt_len]]
        self._positions[start.slot] = len(start.token_ids) - start.prompt_len

    def propose(self, plan: DraftPlan, _until: Callable[[], bool] | None = None, /) -> Proposals:
        table = empty_table([each.slot for each in plan.requests], METHOD, plan.width)
        for at, request in enumerate(plan.requests):
            replayed, position = self._slots[request.slot], self._positions[request.slot]
            if position < len(replayed.lengths):
                count = min(int(replayed.lengths[position]), request.max_tokens)
                table.lengths[at] = count
                table.token_ids[at, :count] = replayed.token_ids[position, :count]
                table.confidences[at, :count] = self._confidences[:count]
        if self._draft_s and len(plan.requests):
            self._pause(self._draft_s)
        return Proposals(table=table)

    def commit(self, slots: Sequence[int], counts: Sequence[int], _token_ids: Sequence[int]) -> None:
        for slot, count in zip(slots, counts, strict=True):
            self._positions[slot] += count

    def release(self, slot: int) -> None:
        self._slots.pop(slot, None)
        self._positions.pop(slot, None)
