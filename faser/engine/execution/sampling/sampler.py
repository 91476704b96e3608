"""The sampler: from a step's logits to rows that give tokens, probabilities and log probabilities.

    logits -> logits processors -> kernels (temperature, truncation, draw) -> tokens, and log probabilities

Equal logits, request, seed, position and output so far give an equal token, whatever the slot and the other rows.
Owns the parameters of every slot and the logits processors. Knows nothing of models, blocks, schedules and
acceptance: `verify.py` decides which draft tokens are accepted.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.contract.plan import SequenceStart
from faser.engine.execution.sampling.edits import LogitsProcessor, ProcessedRows
from faser.engine.execution.sampling.kernels import TORCH_SAMPLING
from faser.engine.execution.sampling.parameters import Purpose, SamplingState, noise_words, uniforms
from faser.engine.execution.sampling.processors import make_logits_processors
from faser.engine.execution.sampling.rows import DraftLayout, LogitRows
from faser.kernels.interface.sampling import SamplingKernels, SamplingMetadata
from faser.optional import or_else, present
from faser.types.arrays import Floats


class Sampler:
    """Samples tokens for up to num_slots sequences.

    kernels: None: tensor operations. processors: in the order in which they edit; None: all that need no grammar.
    state: the parameters by slot, to be read.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        kernels: SamplingKernels | None = None,
        processors: Sequence[LogitsProcessor[Any]] | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self.state = SamplingState(num_slots)
        self._kernels: SamplingKernels = or_else(kernels, TORCH_SAMPLING)
        self._processors = make_logits_processors(vocab_size, eos_token_ids) if processors is None else processors

    def start(self, start: SequenceStart) -> None:
        """A sequence takes over a free slot; tokens that it has generated already count for the penalties."""
        self.state.start(start)
        for processor in self._processors:
            processor.start(start)

    def release(self, slot: int) -> None:
        """The slot is free."""
        self.state.release(slot)
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

    def rows(self, logits: Tensor, layout: DraftLayout) -> LogitRows:
        """The rows after the logits processors. logits: [R, V] float32; edited in place."""
        rows = LogitRows(layout, logits, self.state, self._kernels)
        assert logits.shape == (len(rows.slots), self._vocab_size), f"logits are {tuple(logits.shape)}"
        active = [each for each in self._processors if each.slots]
        if active:
            processed = ProcessedRows(rows.slots.tolist(), rows.positions.tolist(), rows.drafts)
            rows.edit(present(each.edit(processed) for each in active))
            for each in active:
                rows.without_token |= each.without_token
        return rows

    def needs_only_logits(self, slots: Sequence[int]) -> bool:
        """Return whether tokens of these slots need logits, seed and position only, and nothing is reported."""
        special: list[Collection[int]] = [each.slots for each in self._processors]
        special.append(self.state.num_top)
        return not any(special) or not any(slot in each for each in special if each for slot in slots)

    def follows_output(self, slots: Sequence[int]) -> bool:
        """Return whether the edits of any of these slots depend on its output so far."""
        active = [each.slots for each in self._processors if each.slots and each.reads_output]
        return any(slot in each for each in active for slot in slots)

    def is_late(self, slot: int) -> bool:
        """Return whether an edit that the slot's next token needs is still being computed."""
        return any(each.is_late(slot) for each in self._processors)

    def metadata(
        self, slots: Sequence[int] | NDArray[np.int64], positions: Sequence[int] | NDArray[np.int64]
    ) -> SamplingMetadata:
        """Return how tokens of rows of these slots are sampled from processed logits. positions: of the tokens."""
        return self.state.metadata(np.array(slots, dtype=np.int64), np.array(positions, dtype=np.int64))

    def accept_noise(self, layout: DraftLayout) -> Floats:
        """Return the random numbers [R] that accept or reject the rows' draft tokens, in [0, 1)."""
        starts = layout.positions[layout.first][layout.sequence]
        return uniforms(noise_words(self.state.seed[layout.slots], layout.positions, Purpose.ACCEPT, starts))

    def check_invariants(self) -> None:
        """Nothing is remembered of a free slot."""
        self.state.check_invariants(*(set(each.slots) for each in self._processors))
