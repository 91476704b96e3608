"""repetition_penalty, frequency_penalty and presence_penalty: tokens that occurred become less likely."""

from collections.abc import Collection, Sequence

import numpy as np

from faser.engine.contract.plan import SequenceStart
from faser.engine.execution.sampling.logits_processors.processor import ProcessedRows
from faser.engine.execution.sampling.logits_processors.token_counts import TokenCounts
from faser.kernels.interface.sampling.logits_processor_kernels import LogitPositions, PenaltyEdit


class Penalties:
    """See LogitsProcessor. Tokens of the prompt count for repetition only."""

    reads_output = True

    def __init__(self, num_slots: int) -> None:
        self._repetition = np.ones(num_slots, dtype=np.float64)
        self._frequency = np.zeros(num_slots, dtype=np.float64)
        self._presence = np.zeros(num_slots, dtype=np.float64)
        self._counts: dict[int, TokenCounts] = {}

    @property
    def slots(self) -> Collection[int]:
        return self._counts

    def start(self, start: SequenceStart) -> None:
        sampling = start.sampling
        repeats = sampling.repetition_penalty != 1.0
        if not (repeats or sampling.frequency_penalty or sampling.presence_penalty):
            return
        self._repetition[start.slot] = sampling.repetition_penalty
        self._frequency[start.slot] = sampling.frequency_penalty
        self._presence[start.slot] = sampling.presence_penalty
        prompt, output = start.token_ids[: start.prompt_len], start.token_ids[start.prompt_len :]
        self._counts[start.slot] = TokenCounts(prompt if repeats else (), output)

    def accept(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        for slot, token_id in zip(slots, token_ids, strict=True):
            if slot in self._counts:
                self._counts[slot].add(token_id)

    def release(self, slot: int) -> None:
        self._counts.pop(slot, None)

    def edit(self, rows: ProcessedRows) -> PenaltyEdit | None:
        penalised = rows.of(self._counts)
        if not penalised:
            return None
        drafts = rows.drafts
        slots = [rows.slots[row] for row in penalised]
        seen = [
            self._counts[slot].followed_by(drafts[row] if drafts else ())
            for row, slot in zip(penalised, slots, strict=True)
        ]
        return PenaltyEdit(
            at=LogitPositions.of(penalised, [token_ids for token_ids, _ in seen]),
            output_counts=np.concatenate([counts for _, counts in seen]),
            repetition=self._repetition[slots],
            frequency=self._frequency[slots],
            presence=self._presence[slots],
        )
