"""repetition_penalty, frequency_penalty and presence_penalty: tokens that occurred become less likely.

They depend on which tokens a sequence contains, and how often it has generated each of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from faser.engine.contract.plan import SequenceStart
from faser.engine.execution.sampling.edits import (
    Entries,
    EntryPenalties,
    LogitsEdit,
    LogitsProcessor,
    ProcessedRows,
    penalise,
)

_SPARE = 64  # entries allocated beyond the need, so that few tokens make the arrays grow


@dataclass(frozen=True, slots=True, kw_only=True)
class _Penalised:
    """A sequence that asks for penalties."""

    counts: "TokenCounts"
    repetition: float
    frequency: float
    presence: float


class Penalties(LogitsProcessor[_Penalised]):
    """Tokens of the prompt count for repetition only."""

    reads_output = True

    def start(self, start: SequenceStart) -> None:
        sampling = start.sampling
        repeats = sampling.repetition_penalty != 1.0
        if not (repeats or sampling.frequency_penalty or sampling.presence_penalty):
            return
        prompt, output = start.token_ids[: start.prompt_len], start.token_ids[start.prompt_len :]
        self._by_slot[start.slot] = _Penalised(
            counts=TokenCounts(prompt if repeats else (), output),
            repetition=sampling.repetition_penalty,
            frequency=sampling.frequency_penalty,
            presence=sampling.presence_penalty,
        )

    def accept(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        for slot, token_id in zip(slots, token_ids, strict=True):
            if slot in self._by_slot:
                self._by_slot[slot].counts.add(token_id)

    def edit(self, rows: ProcessedRows) -> LogitsEdit | None:
        penalised = rows.of(self._by_slot)
        if not penalised:
            return None
        asked = [self._by_slot[rows.slots[row]] for row in penalised]
        seen = [each.counts.followed_by(rows.drafts[row]) for row, each in zip(penalised, asked, strict=True)]
        at = Entries.of(penalised, [token_ids for token_ids, _ in seen])
        penalties = EntryPenalties(
            output_counts=np.concatenate([counts for _, counts in seen]),
            repetition=np.array([each.repetition for each in asked]).repeat(at.sizes),
            frequency=np.array([each.frequency for each in asked]).repeat(at.sizes),
            presence=np.array([each.presence for each in asked]).repeat(at.sizes),
        )
        return partial(penalise, at=at, penalties=penalties)


class TokenCounts:
    """Distinct tokens of a prompt and an output, in arrays that grow; counts are of the output only."""

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        distinct = dict.fromkeys((*prompt, *output))
        self._index = {token_id: i for i, token_id in enumerate(distinct)}
        self._token_ids = np.empty(len(distinct) + _SPARE, dtype=np.int64)
        self._token_ids[: len(distinct)] = list(distinct)
        self._counts = np.zeros(len(distinct) + _SPARE, dtype=np.float64)
        for token_id in output:
            self._counts[self._index[token_id]] += 1

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """Return the distinct token ids [N]; a view, valid until the next `add`."""
        return self._token_ids[: len(self._index)]

    @property
    def output_counts(self) -> NDArray[np.float64]:
        """Return the counts [N] in the output, in the order of token_ids; a view, valid until the next `add`."""
        return self._counts[: len(self._index)]

    def followed_by(self, drafts: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """token_ids and output_counts, [N] each, as they would be if the draft tokens were added to the output.

        Without draft tokens they are the views themselves.
        """
        if not drafts:
            return self.token_ids, self.output_counts
        index, num = dict[int, int](), len(self._index)
        for token_id in drafts:
            if token_id not in self._index:
                index.setdefault(token_id, num + len(index))
        token_ids = np.concatenate((self.token_ids, np.fromiter(index, np.int64, len(index))))
        counts = np.concatenate((self.output_counts, np.zeros(len(index))))
        np.add.at(counts, [self._index[i] if i in self._index else index[i] for i in drafts], 1.0)
        return token_ids, counts

    def add(self, token_id: int) -> None:
        """One more token was generated."""
        at = self._index.setdefault(token_id, len(self._index))
        if at == len(self._token_ids):
            grown = at + at // 2
            self._token_ids = np.resize(self._token_ids, grown)
            self._counts = np.concatenate((self._counts, np.zeros(grown - at)))
        self._token_ids[at] = token_id
        self._counts[at] += 1
