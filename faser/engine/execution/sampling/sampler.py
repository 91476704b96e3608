"""The sampler: from a step's logits to its tokens.

Runs the stages in order (`processors`, then `sampling`) over the rows that asked for them, and reports log
probabilities. Equal logits, request, seed, position and output so far give an equal token, whatever the slot and
whatever the other rows. `sample` does it all for one row per sequence; whoever has several, with drafted tokens
between them, takes the stages one by one. Knows nothing of models, blocks, schedules and verdicts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.contract.plan import SequenceStart
from faser.engine.execution.sampling.distribution import MASS_ONE
from faser.engine.execution.sampling.logits_processors import TorchLogitsProcessors
from faser.engine.execution.sampling.logprobs import position_logprobs
from faser.engine.execution.sampling.metadata import SamplingMetadata
from faser.engine.execution.sampling.noise import Purpose, uniforms
from faser.engine.execution.sampling.state import SamplingState
from faser.engine.execution.sampling.torch_kernels import TorchSamplingKernels
from faser.kernels.interface.logits_processor_kernels import (
    Bias,
    LogitPositions,
    LogitsEdits,
    LogitsProcessorKernels,
    Penalties,
)
from faser.kernels.interface.sampling_kernels import NO_TOKEN, SamplingKernels, TruncationParams
from faser.types import PositionLogprobs

__all__ = ["NO_TOKEN", "EditedRows", "PreparedRows", "SampledRow", "Sampler", "not_finite"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRow:
    """The outcome of one row. token_id is NO_TOKEN where error says why none could be chosen."""

    token_id: int
    logprobs: PositionLogprobs | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EditedRows:
    """Rows of a step after bias, penalties and masks; whether a token can be chosen is not known yet.

    Most as in PreparedRows. sound: [R] bool, where the logits are: these were numbers before that; None where no
    row asked for any of it.
    """

    logits: Tensor
    slots: NDArray[np.int64]
    positions: NDArray[np.int64]
    sound: Tensor | None
    raw: Tensor | None
    raw_row: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRows:
    """Rows of a step, ready for their tokens to be chosen.

    logits: [R, V] float32, after bias, penalties and masks. slots, positions: [R]; several rows may be of one
    sequence. best: [R] the most likely tokens (from `take`: those chosen); NO_TOKEN where none can be chosen, and
    errors says by row why. raw: [N, V] float32, the logits as the model gave them, of the rows that report log
    probabilities; raw_row: where a row stands in it.
    """

    logits: Tensor
    slots: NDArray[np.int64]
    positions: NDArray[np.int64]
    best: NDArray[np.int64]
    errors: Mapping[int, str]
    raw: Tensor | None
    raw_row: Mapping[int, int]

    @property
    def sound(self) -> NDArray[np.bool_]:
        """[R] a token can be chosen."""
        sound: NDArray[np.bool_] = self.best != NO_TOKEN
        return sound


class Sampler:
    """Chooses tokens for up to num_slots sequences. device: where the logits are.

    choice, edits: None is by tensors.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device | str,
        choice: SamplingKernels | None = None,
        edits: LogitsProcessorKernels | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._state = SamplingState(num_slots, vocab_size, eos_token_ids)
        self._choice: SamplingKernels = TorchSamplingKernels() if choice is None else choice
        self._logit_edits: LogitsProcessorKernels = TorchLogitsProcessors() if edits is None else edits

    def start(self, start: SequenceStart) -> None:
        """A sequence takes over a free slot; its generated tokens, if any, count for the penalties."""
        self._state.start(start)

    def release(self, slot: int) -> None:
        """The slot is free."""
        self._state.release(slot)

    def accept(self, slots: Iterable[int], token_ids: Iterable[int]) -> None:
        """Each sequence goes on with its token; a slot that stands here several times, in that order."""
        if self._state.counts:
            for slot, token_id in zip(slots, token_ids, strict=True):
                self._state.accept(slot, token_id)

    @torch.inference_mode()
    def sample(self, logits: Tensor, slots: Sequence[int], positions: Sequence[int]) -> list[SampledRow]:
        """Choose a token per row, each of a different sequence; changes nothing that a later call could see.

        logits: [R, V] float32, overwritten. slots: of the rows. positions: of the tokens to be chosen.
        A row without a finite maximum gets an error, and so does one whose masks leave no token.
        """
        prepared, chosen = self.take(logits, slots, positions, None)
        token_ids = chosen.tolist()
        if not prepared.errors and prepared.raw is None:
            return [SampledRow(token_id=token_id) for token_id in token_ids]
        reports = self.report(prepared, [row for row in prepared.raw_row if row not in prepared.errors], token_ids)
        errors = prepared.errors
        return [
            SampledRow(token_id=NO_TOKEN, error=errors[row])
            if row in errors
            else SampledRow(token_id=token_id, logprobs=reports.get(row))
            for row, token_id in enumerate(token_ids)
        ]

    @torch.inference_mode()
    def prepare(
        self,
        logits: Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        ahead: Sequence[tuple[int, ...]] | None,
    ) -> PreparedRows:
        """Bias, penalties and masks of every row. logits, slots, positions: as in `sample`; slots may repeat.

        ahead: per row, drafted tokens that the row takes for output, behind the accepted ones; None: no row does.
        """
        edited = self.edit(logits, slots, positions, ahead)
        return self.settle(edited, self._choice.best(logits))

    @torch.inference_mode()
    def take(
        self,
        logits: Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        ahead: Sequence[tuple[int, ...]] | None,
    ) -> tuple[PreparedRows, NDArray[np.int64]]:
        """`prepare` and `choose` of all rows; waits for the device once, at its end. May overwrite the logits."""
        edited = self.edit(logits, slots, positions, ahead)
        random = self._state.is_random[edited.slots]
        if not random.any():
            token_ids = self._choice.best(logits)
        else:
            at = np.flatnonzero(random)
            noise = np.zeros(len(random))
            noise[at] = self._token_noise(edited.slots[at], edited.positions[at])
            shaping = self._shaping(edited.slots)
            warm = replace(shaping, temperature=np.where(random, shaping.temperature, np.float32(0)))
            token_ids = self._choice.take(logits, warm, noise)
        return self.settle(edited, token_ids), token_ids

    @torch.inference_mode()
    def edit(
        self,
        logits: Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        ahead: Sequence[tuple[int, ...]] | None,
    ) -> EditedRows:
        """The first part of `prepare`. Does not wait for the device, given edits that do not.

        A row that was no numbers before it was edited still is none: a mask cannot hide that. Which rows these are
        stays on the device until `settle` has to say why a row has no token.
        """
        assert logits.shape == (len(slots), self._vocab_size), f"logits are {tuple(logits.shape)}"
        scored = _rows_in(self._state.num_top, slots)
        raw = self._rows_of(logits, scored) if scored else None
        edits, sound = self._edits(slots, positions, ahead), None
        if edits:
            sound = logits.amax(-1).isfinite()  # a NaN is the largest of its row
            self._logit_edits.apply(logits, edits)
            logits[:, 0] = torch.where(sound, logits[:, 0], torch.nan)
        return EditedRows(
            logits=logits,
            slots=np.array(slots, dtype=np.int64),
            positions=np.array(positions, dtype=np.int64),
            sound=sound,
            raw=raw,
            raw_row={row: i for i, row in enumerate(scored)},
        )

    def settle(self, edited: EditedRows, best: NDArray[np.int64]) -> PreparedRows:
        """The second part of `prepare`. best: [R], as SamplingKernels.best has it of the edited logits.

        Waits for the device only where some row has no token.
        """
        positions, errors = edited.positions, dict[int, str]()
        if without := _without_token(best):
            sound = None if edited.sound is None else edited.sound.tolist()
            for row in without:
                why = _nothing_left if sound is not None and sound[row] else not_finite
                errors[row] = why(int(positions[row]))
        return PreparedRows(
            logits=edited.logits,
            slots=edited.slots,
            positions=positions,
            best=best,
            errors=errors,
            raw=edited.raw,
            raw_row=edited.raw_row,
        )

    @torch.inference_mode()
    def choose(self, prepared: PreparedRows, rows: NDArray[np.int64] | None) -> NDArray[np.int64]:
        """A token id for each of `rows` (ascending, distinct; None: all); of one with an error it means nothing.

        May overwrite the logits of the rows: choose for a row once, or take its masses.
        """
        token_ids = prepared.best.copy() if rows is None else prepared.best[rows]
        random = self._state.is_random[prepared.slots if rows is None else prepared.slots[rows]]
        if prepared.errors:
            random &= token_ids != NO_TOKEN
        if random.any():
            at = np.flatnonzero(random)
            drawn = at if rows is None else rows[at]
            slots, positions = prepared.slots[drawn], prepared.positions[drawn]
            token_ids[at] = self._choice.draw(
                prepared.logits,
                drawn,
                prepared.best[drawn],
                self._shaping(slots),
                self._token_noise(slots, positions),
            )
        return token_ids

    def needs_only_logits(self, slots: Sequence[int]) -> bool:
        """Whether tokens of these slots follow from logits, seed and position alone, and nothing is reported."""
        state = self._state
        special = (state.num_top, state.bias, state.counts, state.allowed, state.held)
        return not any(special) or not any(_rows_in(each, slots) for each in special)

    def requests(
        self, slots: Sequence[int] | NDArray[np.int64], positions: Sequence[int] | NDArray[np.int64]
    ) -> SamplingMetadata:
        """How tokens of rows of these slots are chosen from their edited logits. positions: of the tokens."""
        state, at = self._state, np.array(slots, dtype=np.int64)
        return SamplingMetadata(
            temperature=np.where(state.is_random[at], state.temperature[at], np.float32(0)),
            min_p=state.min_p[at],
            top_k=state.top_k[at],
            top_p=state.top_p[at],
            seeds=state.seed[at],
            positions=np.array(positions, dtype=np.int64),
        )

    def is_cheap(self, logits: Tensor, slots: Sequence[int]) -> bool:
        """Choosing for all rows of these slots at once is better than asking again and again for some of them.

        So it is where all are greedy, and off the CPU, where every question waits for the device.
        """
        return logits.device.type != "cpu" or not self._state.is_random[list(slots)].any()

    @torch.inference_mode()
    def masses(self, prepared: PreparedRows) -> Tensor:
        """[R, V] float32 whole numbers, in place of the logits: what each row's token is drawn from.

        They are proportional to the probabilities; a greedy row has them at one token, a row with an error none.
        """
        logits = prepared.logits
        random = self._state.is_random[prepared.slots] & prepared.sound
        fixed, drawn = np.flatnonzero(~random), np.flatnonzero(random)
        if len(fixed):
            at, best = self._tensor(fixed), prepared.best[fixed]
            logits[at] = 0.0
            logits[at, self._tensor(np.maximum(best, 0))] = self._tensor(
                np.where(best == NO_TOKEN, 0.0, MASS_ONE).astype(np.float32)
            )
        if len(drawn):
            self._choice.masses(logits, drawn, prepared.best[drawn], self._shaping(prepared.slots[drawn]))
        return logits

    def noise(
        self,
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
        purpose: Purpose,
        draft_starts: NDArray[np.int64] | None = None,
    ) -> Tensor:
        """Random numbers of the rows' requests, [R] float64 in [0, 1); see `noise.uniforms`."""
        seeds = self._state.seed[slots]
        return self._tensor(uniforms(seeds, positions, purpose, draft_starts, self._choice.philox))

    @torch.inference_mode()
    def report(
        self, prepared: PreparedRows, rows: Sequence[int], token_ids: Sequence[int]
    ) -> dict[int, PositionLogprobs]:
        """Log probabilities of the tokens of `rows`, those among them that report. token_ids: [R], of all rows."""
        rows = [row for row in rows if row in prepared.raw_row]
        if not rows or prepared.raw is None:
            return {}
        at = [prepared.raw_row[row] for row in rows]
        raw = self._rows_of(prepared.raw, at) if at != list(range(len(prepared.raw))) else prepared.raw
        num_top = [self._state.num_top[int(prepared.slots[row])] for row in rows]
        reports = position_logprobs(raw, [token_ids[row] for row in rows], num_top)
        return dict(zip(rows, reports, strict=True))

    @torch.inference_mode()
    def prompt_logprobs(
        self, logits: Tensor, token_ids: Sequence[int], num_top: int
    ) -> tuple[PositionLogprobs, ...]:
        """Of known next tokens, one per row. logits: [R, V] float32, not written to."""
        return position_logprobs(logits, token_ids, [num_top] * len(token_ids))

    def check_invariants(self) -> None:
        """No free slot is remembered."""
        self._state.check_invariants()

    def _edits(
        self, slots: Sequence[int], positions: Sequence[int], ahead: Sequence[tuple[int, ...]] | None
    ) -> LogitsEdits:
        """What these rows ask for. ahead: as in `prepare`."""
        state = self._state
        bias = penalties = allowed = forbidden = None
        if rows := _rows_in(state.bias, slots):
            at = _places(rows, [state.bias[slots[row]][0] for row in rows])
            bias = Bias(at=at, values=np.concatenate([state.bias[slots[row]][1] for row in rows]))
        if rows := _rows_in(state.counts, slots):
            seen = [state.counts[slots[row]].followed_by(ahead[row] if ahead else ()) for row in rows]
            penalised = [slots[row] for row in rows]
            penalties = Penalties(
                at=_places(rows, [token_ids for token_ids, _ in seen]),
                output_counts=np.concatenate([counts for _, counts in seen]),
                repetition=state.repetition[penalised],
                frequency=state.frequency[penalised],
                presence=state.presence[penalised],
            )
        if rows := _rows_in(state.allowed, slots):
            allowed = _places(rows, [state.allowed[slots[row]] for row in rows])
        held = [row for row in _rows_in(state.held, slots) if positions[row] < state.held[slots[row]].until]
        if held:
            forbidden = _places(held, [state.held[slots[row]].token_ids for row in held])
        return LogitsEdits(bias=bias, penalties=penalties, allowed=allowed, forbidden=forbidden)

    def _shaping(self, slots: NDArray[np.int64]) -> TruncationParams:
        """Of rows of these slots."""
        state = self._state
        return TruncationParams(
            temperature=state.temperature[slots],
            min_p=state.min_p[slots],
            top_k=state.top_k[slots],
            top_p=state.top_p[slots],
        )

    def _token_noise(self, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
        """The numbers that decide the tokens of rows of these slots."""
        return uniforms(self._state.seed[slots], positions, Purpose.TOKEN, generate=self._choice.philox)

    def _rows_of(self, values: Tensor, rows: list[int]) -> Tensor:
        """A copy of these rows."""
        if rows == list(range(len(values))):
            return values.clone()
        return values.index_select(0, self._tensor(np.array(rows, dtype=np.int64)))

    def _tensor(self, values: NDArray[np.generic]) -> Tensor:
        """On the device; nobody waits for the copy."""
        found = torch.from_numpy(values)
        return found if self._device.type == "cpu" else found.pin_memory().to(self._device, non_blocking=True)


def _places(rows: list[int], token_ids: list[NDArray[np.int64]]) -> LogitPositions:
    """token_ids: of each of the rows."""
    return LogitPositions(
        rows=np.array(rows, dtype=np.int64),
        sizes=np.array([len(each) for each in token_ids], dtype=np.int64),
        token_ids=np.concatenate(token_ids),
    )


def _rows_in(mapping: Mapping[int, object], slots: Sequence[int]) -> list[int]:
    """Rows whose slot asked for the feature."""
    return [row for row, slot in enumerate(slots) if slot in mapping] if mapping else []


def _without_token(best: NDArray[np.int64]) -> list[int]:
    """Rows in which nothing can be chosen."""
    return [row for row, token_id in enumerate(best.tolist()) if token_id == NO_TOKEN]


def not_finite(position: int) -> str:
    return f"the logits for position {position} are not finite numbers"


def _nothing_left(position: int) -> str:
    return (
        f"no token may be chosen at position {position}: allowed_token_ids, min_tokens and "
        f"stop_token_ids together leave none"
    )
