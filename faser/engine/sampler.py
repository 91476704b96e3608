"""The sampler: from a step's logits to its tokens, one row per sequence.

Runs the stages in order (`processors`, then `sampling`) over the rows that asked for them, and reports log
probabilities. Equal logits, request, seed and position give an equal token, whatever the slot and whatever
the other rows. Knows nothing of models, blocks and schedules.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.logprobs import position_logprobs
from faser.engine.noise import Purpose, uniforms
from faser.engine.plan import SequenceStart
from faser.engine.processors import Entries, Penalties, add_bias, allow_only, forbid, penalise
from faser.engine.ranking import argmax
from faser.engine.sampling import Truncation, choose, scale
from faser.engine.sampling_state import SamplingState
from faser.types import PositionLogprobs

NO_TOKEN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRow:
    """The outcome of one row. token_id is NO_TOKEN where error says why none could be chosen."""

    token_id: int
    logprobs: PositionLogprobs | None = None
    error: str | None = None


class Sampler:
    """Chooses tokens for up to num_slots sequences. device: where the logits are."""

    def __init__(
        self, num_slots: int, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device | str
    ) -> None:
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._state = SamplingState(num_slots, vocab_size, eos_token_ids)

    def start(self, start: SequenceStart) -> None:
        """A sequence takes over a free slot; its generated tokens, if any, count for the penalties."""
        self._state.start(start)

    def release(self, slot: int) -> None:
        """The slot is free."""
        self._state.release(slot)

    def accept(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        """Each sequence goes on with its token."""
        for slot, token_id in zip(slots, token_ids, strict=True):
            self._state.accept(slot, token_id)

    @torch.inference_mode()
    def sample(self, logits: Tensor, slots: Sequence[int], positions: Sequence[int]) -> list[SampledRow]:
        """Choose a token per row; changes nothing that a later call could see.

        logits: [R, V] float32, overwritten. slots: of the rows. positions: of the tokens to be chosen.
        A row without a finite maximum gets an error, and so does one whose masks leave no token.
        """
        assert logits.shape == (len(slots), self._vocab_size), f"logits are {tuple(logits.shape)}"
        errors: list[str | None] = [
            None if sound else f"the logits for position {position} are not finite numbers"
            for sound, position in zip(_has_finite_maximum(logits), positions, strict=True)
        ]
        scored = [row for row, slot in enumerate(slots) if slot in self._state.num_top]
        raw = logits[scored] if scored else None
        if self._process(logits, slots, positions):
            _find_empty(logits, positions, errors)
        token_ids = self._choose(logits, slots, positions, errors)
        reports = {} if raw is None else self._report(raw, scored, slots, token_ids)
        return [
            SampledRow(token_id=token_id, logprobs=reports.get(row))
            if error is None
            else SampledRow(token_id=NO_TOKEN, error=error)
            for row, (token_id, error) in enumerate(zip(token_ids, errors, strict=True))
        ]

    @torch.inference_mode()
    def prompt_logprobs(
        self, logits: Tensor, token_ids: Sequence[int], num_top: int
    ) -> tuple[PositionLogprobs, ...]:
        """Of known next tokens, one per row. logits: [R, V] float32, not written to."""
        return position_logprobs(logits, token_ids, [num_top] * len(token_ids))

    def check_invariants(self) -> None:
        """No free slot is remembered."""
        self._state.check_invariants()

    def _process(self, logits: Tensor, slots: Sequence[int], positions: Sequence[int]) -> bool:
        """Bias, penalties and masks, in place. Returns whether a mask was applied."""
        state = self._state
        if rows := _rows_in(state.bias, slots):
            bias = np.concatenate([state.bias[slots[row]][1] for row in rows])
            at = self._entries(rows, [state.bias[slots[row]][0] for row in rows])
            add_bias(logits, at, self._tensor(bias))
        if rows := _rows_in(state.counts, slots):
            at = self._entries(rows, [state.counts[slots[row]].token_ids for row in rows])
            penalise(logits, at, self._penalties([slots[row] for row in rows]))
        allowed = _rows_in(state.allowed, slots)
        if allowed:
            at = self._entries(allowed, [state.allowed[slots[row]] for row in allowed])
            allow_only(logits, self._tensor(np.array(allowed)), at)
        held = [row for row in _rows_in(state.held, slots) if positions[row] < state.held[slots[row]].until]
        if held:
            forbid(logits, self._entries(held, [state.held[slots[row]].token_ids for row in held]))
        return bool(allowed or held)

    def _penalties(self, slots: list[int]) -> Penalties:
        """Of the entries of these slots' counts, in the same order."""
        state = self._state
        counts = [state.counts[slot].output_counts for slot in slots]
        sizes = [len(each) for each in counts]
        return Penalties(
            output_counts=self._tensor(np.concatenate(counts)),
            repetition=self._tensor(np.repeat(state.repetition[slots], sizes)),
            frequency=self._tensor(np.repeat(state.frequency[slots], sizes)),
            presence=self._tensor(np.repeat(state.presence[slots], sizes)),
        )

    def _choose(
        self, logits: Tensor, slots: Sequence[int], positions: Sequence[int], errors: list[str | None]
    ) -> list[int]:
        """Token ids; those of rows with an error mean nothing. Overwrites the logits."""
        rows = [row for row, slot in enumerate(slots) if slot in self._state.random and errors[row] is None]
        if len(rows) == len(slots):
            return self._draw(logits, slots, positions).tolist()
        token_ids = argmax(logits)
        if rows:
            drawn = self._draw(logits[rows], [slots[row] for row in rows], [positions[row] for row in rows])
            token_ids[self._tensor(np.array(rows))] = drawn
        return token_ids.tolist()

    def _draw(self, logits: Tensor, slots: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Random tokens [R] int64. logits: overwritten."""
        state, at = self._state, np.array(slots)
        scaled = scale(logits, self._tensor(state.temperature[at]))
        cut = Truncation(
            min_p=self._tensor(state.min_p[at]),
            top_k=self._tensor(state.top_k[at]),
            top_p=self._tensor(state.top_p[at]),
        )
        noise = uniforms(state.seed[at], np.array(positions, dtype=np.int64), Purpose.TOKEN)
        return choose(scaled, cut, self._tensor(noise))

    def _report(
        self, raw: Tensor, scored: list[int], slots: Sequence[int], token_ids: list[int]
    ) -> dict[int, PositionLogprobs]:
        """Log probabilities of the chosen tokens, by row. raw: [len(scored), V], logits as the model gave them."""
        num_top = [self._state.num_top[slots[row]] for row in scored]
        reports = position_logprobs(raw, [token_ids[row] for row in scored], num_top)
        return dict(zip(scored, reports, strict=True))

    def _entries(self, rows: list[int], token_ids: list[NDArray[np.int64]]) -> Entries:
        sizes = [len(each) for each in token_ids]
        return Entries(
            rows=self._tensor(np.repeat(np.array(rows), sizes)), token_ids=self._tensor(np.concatenate(token_ids))
        )

    def _tensor(self, values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def _rows_in(mapping: Mapping[int, object], slots: Sequence[int]) -> list[int]:
    """Rows whose slot asked for the feature."""
    return [row for row, slot in enumerate(slots) if slot in mapping] if mapping else []


def _has_finite_maximum(logits: Tensor) -> list[bool]:
    """Per row; a NaN anywhere in it counts as no. Logits of -inf are tokens that cannot be chosen."""
    return logits.amax(-1).isfinite().tolist()


def _find_empty(logits: Tensor, positions: Sequence[int], errors: list[str | None]) -> None:
    """Add errors for rows in which the masks left no token."""
    for row, sound in enumerate(_has_finite_maximum(logits)):
        if not sound and errors[row] is None:
            errors[row] = (
                f"no token may be chosen at position {positions[row]}: allowed_token_ids, min_tokens and "
                f"stop_token_ids together leave none"
            )
