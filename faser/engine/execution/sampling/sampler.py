"""The sampler: from a step's logits to its tokens.

    logits -> logits processors -> kernels (temperature, truncation, draw) -> tokens, and log probabilities

Equal logits, request, seed, position and output so far give an equal token, whatever the slot and the other rows.
`sample` does it all for one row per sequence. The verifiers, which have several rows per sequence with draft
tokens between them, call the stages one by one. Knows nothing of models, blocks, schedules and acceptance.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.contract.plan import SequenceStart
from faser.engine.execution.sampling.distribution import PROB_ONE
from faser.engine.execution.sampling.logits_processors.processor import LogitsProcessor, ProcessedRows
from faser.engine.execution.sampling.logits_processors.registry import make_logits_processors
from faser.engine.execution.sampling.logits_processors.torch_kernels import TorchLogitsProcessorKernels
from faser.engine.execution.sampling.logprobs import position_logprobs
from faser.engine.execution.sampling.noise import Purpose, uniforms
from faser.engine.execution.sampling.state import SamplingState
from faser.engine.execution.sampling.token_samplers import sample_on_host
from faser.engine.execution.sampling.torch_kernels import TorchSamplingKernels
from faser.kernels.interface.sampling.logits_processor_kernels import (
    LogitsEdit,
    LogitsProcessorKernels,
    MaskKernel,
)
from faser.kernels.interface.sampling.sampling_kernels import NO_TOKEN, SamplingKernels
from faser.kernels.interface.sampling.sampling_metadata import SamplingMetadata
from faser.types import PositionLogprobs, SequenceError

__all__ = ["NO_TOKEN", "PreparedRows", "ProcessedLogits", "SampledRow", "Sampler"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRow:
    """The outcome of one row. token_id is NO_TOKEN where error says why no token could be sampled."""

    token_id: int
    logprobs: PositionLogprobs | None = None
    error: SequenceError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedLogits:
    """Rows of a step after the logits processors; whether each row has a token is not known yet.

    logits: [R, V] float32. slots, positions: [R]; several rows may belong to one sequence. sound: [R] bool on the
    device of the logits, whether the row had a finite maximum before it was processed; None where no row was.
    raw: [N, V] float32, the logits as the model gave them, of the rows that report log probabilities; raw_row: the
    index of such a row in it.
    """

    logits: Tensor
    slots: NDArray[np.int64]
    positions: NDArray[np.int64]
    sound: Tensor | None
    raw: Tensor | None
    raw_row: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRows:
    """Rows of a step, ready to be sampled. logits, slots, positions, raw, raw_row: as in ProcessedLogits.

    best: [R] the most likely tokens (from `sample_rows`: the sampled ones); NO_TOKEN where there is none, and
    errors says by row why.
    """

    logits: Tensor
    slots: NDArray[np.int64]
    positions: NDArray[np.int64]
    best: NDArray[np.int64]
    errors: Mapping[int, SequenceError]
    raw: Tensor | None
    raw_row: Mapping[int, int]

    @property
    def sound(self) -> NDArray[np.bool_]:
        """[R] whether the row has a token."""
        sound: NDArray[np.bool_] = self.best != NO_TOKEN
        return sound


class Sampler:
    """Samples tokens for up to num_slots sequences. device: where the logits are.

    kernels, processor_kernels: None: tensor operations.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device | str,
        kernels: SamplingKernels | None = None,
        processor_kernels: LogitsProcessorKernels | None = None,
        processors: Sequence[LogitsProcessor] | None = None,
        mask_kernel: MaskKernel | None = None,
    ) -> None:
        """processors: in the order in which they edit; None: all of the registry that need no grammar.

        mask_kernel: where processor_kernels is None; None: tensor operations.
        """
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._state = SamplingState(num_slots)
        self._processors = (
            make_logits_processors(num_slots, vocab_size, eos_token_ids) if processors is None else processors
        )
        self._kernels: SamplingKernels = TorchSamplingKernels() if kernels is None else kernels
        self._processor_kernels: LogitsProcessorKernels = (
            TorchLogitsProcessorKernels(mask_kernel) if processor_kernels is None else processor_kernels
        )

    @property
    def state(self) -> SamplingState:
        """The parameters by slot, to be read."""
        return self._state

    def start(self, start: SequenceStart) -> None:
        """A sequence takes over a free slot; tokens that it has generated already count for the penalties."""
        self._state.start(start)
        for processor in self._processors:
            processor.start(start)

    def release(self, slot: int) -> None:
        """The slot is free."""
        self._state.release(slot)
        for processor in self._processors:
            processor.release(slot)

    def accept(self, slots: Iterable[int], token_ids: Iterable[int]) -> None:
        """Each slot's sequence is extended by its token, in this order; a slot may occur several times.

        Both are consumed only if a processor needs them.
        """
        active = [each for each in self._processors if each.slots and each.reads_output]
        if active:
            accepted_slots, accepted_ids = list(slots), list(token_ids)
            for processor in active:
                processor.accept(accepted_slots, accepted_ids)

    @torch.inference_mode()
    def sample(self, logits: Tensor, slots: Sequence[int], positions: Sequence[int]) -> list[SampledRow]:
        """Sample a token per row, each of a different sequence. A call changes no later call's result.

        logits: [R, V] float32, overwritten. slots: of the rows. positions: of the sampled tokens.
        A row without a finite maximum gets an error, and so does a row that is left without a token.
        """
        prepared, sampled = self.sample_rows(logits, slots, positions, None)
        token_ids = sampled.tolist()
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
    def sample_rows(
        self,
        logits: Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        drafts: Sequence[tuple[int, ...]] | None,
    ) -> tuple[PreparedRows, NDArray[np.int64]]:
        """A token of every row: `prepare` and `choose` with one wait for the device. May overwrite the logits.

        drafts: per row, the draft tokens before it, which count as output; None: no row has any.
        """
        processed = self.process(logits, slots, positions, drafts)
        if self._state.any_random(processed.slots):
            metadata = self._state.metadata(processed.slots, processed.positions)
            token_ids = sample_on_host(self._kernels, logits, metadata)
        else:
            token_ids = self._kernels.best(logits)
        return self.with_errors(processed, token_ids), token_ids

    @torch.inference_mode()
    def prepare(
        self,
        logits: Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        drafts: Sequence[tuple[int, ...]] | None,
    ) -> PreparedRows:
        """Run the logits processors and find the most likely token of every row. Arguments as in `sample_rows`."""
        processed = self.process(logits, slots, positions, drafts)
        return self.with_errors(processed, self._kernels.best(logits))

    @torch.inference_mode()
    def process(
        self,
        logits: Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        drafts: Sequence[tuple[int, ...]] | None,
    ) -> ProcessedLogits:
        """Run the logits processors, in place. Does not wait for the device if their kernels do not.

        A row without a finite maximum keeps that mark: no mask can hide it. Which rows these are stays on the
        device until `with_errors` has to say why a row has no token.
        """
        assert logits.shape == (len(slots), self._vocab_size), f"logits are {tuple(logits.shape)}"
        scored = _rows_in(self._state.num_top, slots)
        raw = self._rows_of(logits, scored) if scored else None
        edits, sound = self._edits(slots, positions, drafts), None
        if edits:
            sound = logits.amax(-1).isfinite()  # a NaN is the largest of its row
            self._processor_kernels.apply(logits, edits)
            logits[:, 0] = torch.where(sound, logits[:, 0], torch.nan)
        return ProcessedLogits(
            logits=logits,
            slots=np.array(slots, dtype=np.int64),
            positions=np.array(positions, dtype=np.int64),
            sound=sound,
            raw=raw,
            raw_row={row: i for i, row in enumerate(scored)},
        )

    def with_errors(self, processed: ProcessedLogits, best: NDArray[np.int64]) -> PreparedRows:
        """The rows with their most likely tokens, and a reason for each row that has none.

        best: [R], from SamplingKernels.best of the processed logits. Waits for the device only where a row has no
        token.
        """
        errors: dict[int, SequenceError] = {}
        if without := _without_token(best):
            sound = None if processed.sound is None else processed.sound.tolist()
            for row in without:
                is_sound = sound is not None and sound[row]
                errors[row] = SequenceError.NONE_ALLOWED if is_sound else SequenceError.NOT_FINITE
        return PreparedRows(
            logits=processed.logits,
            slots=processed.slots,
            positions=processed.positions,
            best=best,
            errors=errors,
            raw=processed.raw,
            raw_row=processed.raw_row,
        )

    @torch.inference_mode()
    def choose(self, prepared: PreparedRows, rows: NDArray[np.int64] | None) -> NDArray[np.int64]:
        """A token id for each of `rows` (ascending, distinct; None: all); meaningless for a row with an error.

        May overwrite the logits of the rows: call it, or `fixed_point_probs`, once for a row.
        """
        token_ids = prepared.best.copy() if rows is None else prepared.best[rows]
        random = self._state.is_random(prepared.slots if rows is None else prepared.slots[rows])
        if prepared.errors:
            random &= token_ids != NO_TOKEN
        if random.any():
            at = np.flatnonzero(random)
            drawn = at if rows is None else rows[at]
            metadata = self._state.metadata(prepared.slots[drawn], prepared.positions[drawn])
            noise = uniforms(metadata.seeds, metadata.positions, Purpose.TOKEN, generate=self._kernels.philox)
            token_ids[at] = self._kernels.draw(prepared.logits, drawn, prepared.best[drawn], metadata, noise)
        return token_ids

    def needs_only_logits(self, slots: Sequence[int]) -> bool:
        """Whether tokens of these slots depend on logits, seed and position only, and nothing is reported."""
        special: list[Collection[int]] = [each.slots for each in self._processors]
        special.append(self._state.num_top)
        return not any(special) or not any(_rows_in(each, slots) for each in special)

    def metadata(
        self, slots: Sequence[int] | NDArray[np.int64], positions: Sequence[int] | NDArray[np.int64]
    ) -> SamplingMetadata:
        """How tokens of rows of these slots are sampled from processed logits. positions: of the tokens."""
        return self._state.metadata(np.array(slots, dtype=np.int64), np.array(positions, dtype=np.int64))

    def is_cheap(self, logits: Tensor, slots: Sequence[int]) -> bool:
        """Whether sampling all rows of these slots at once costs less than sampling some of them in several calls.

        True where all are greedy, and off the CPU, where every call waits for the device.
        """
        return logits.device.type != "cpu" or not self._state.any_random(list(slots))

    @torch.inference_mode()
    def fixed_point_probs(self, prepared: PreparedRows) -> Tensor:
        """[R, V] float32 whole numbers, in place of the logits, from which each row's token is drawn.

        They are proportional to the probabilities. A greedy row has a single nonzero one, a row with an error
        none.
        """
        logits = prepared.logits
        random = self._state.is_random(prepared.slots) & prepared.sound
        fixed, drawn = np.flatnonzero(~random), np.flatnonzero(random)
        if len(fixed):
            at, best = self._tensor(fixed), prepared.best[fixed]
            logits[at] = 0.0
            logits[at, self._tensor(np.maximum(best, 0))] = self._tensor(
                np.where(best == NO_TOKEN, 0.0, PROB_ONE).astype(np.float32)
            )
        if len(drawn):
            metadata = self._state.metadata(prepared.slots[drawn], prepared.positions[drawn])
            self._kernels.fixed_point_probs(logits, drawn, prepared.best[drawn], metadata)
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
        return self._tensor(uniforms(seeds, positions, purpose, draft_starts, self._kernels.philox))

    @torch.inference_mode()
    def report(
        self, prepared: PreparedRows, rows: Sequence[int], token_ids: Sequence[int]
    ) -> dict[int, PositionLogprobs]:
        """Log probabilities of the tokens of `rows`, of those that report any. token_ids: [R], of all rows."""
        rows = [row for row in rows if row in prepared.raw_row]
        if not rows or prepared.raw is None:
            return {}
        at = [prepared.raw_row[row] for row in rows]
        raw = self._rows_of(prepared.raw, at) if at != list(range(len(prepared.raw))) else prepared.raw
        num_top = [self._state.num_top[int(prepared.slots[row])] for row in rows]
        reports = position_logprobs(raw, [token_ids[row] for row in rows], num_top)
        return dict(zip(rows, reports, strict=True))

    def check_invariants(self) -> None:
        """Nothing is remembered of a free slot."""
        self._state.check_invariants(*(set(each.slots) for each in self._processors))

    def _edits(
        self, slots: Sequence[int], positions: Sequence[int], drafts: Sequence[tuple[int, ...]] | None
    ) -> list[LogitsEdit]:
        """What the processors ask for, in their order."""
        active = [each for each in self._processors if each.slots]
        if not active:
            return []
        rows = ProcessedRows(slots, positions, drafts)
        return [edit for each in active if (edit := each.edit(rows)) is not None]

    def _rows_of(self, values: Tensor, rows: list[int]) -> Tensor:
        """A copy of these rows."""
        if rows == list(range(len(values))):
            return values.clone()
        return values.index_select(0, self._tensor(np.array(rows, dtype=np.int64)))

    def _tensor(self, values: NDArray[np.generic]) -> Tensor:
        """On the device; the host does not wait for the copy."""
        found = torch.from_numpy(values)
        return found if self._device.type == "cpu" else found.pin_memory().to(self._device, non_blocking=True)


def _rows_in(slots: Collection[int], row_slots: Sequence[int]) -> list[int]:
    """Rows whose slot is one of `slots`."""
    return [row for row, slot in enumerate(row_slots) if slot in slots] if slots else []


def _without_token(best: NDArray[np.int64]) -> list[int]:
    return [row for row, token_id in enumerate(best.tolist()) if token_id == NO_TOKEN]
