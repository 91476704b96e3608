"""Vectors of prompts: of the requests that ask for one, as the rows of their prompts are computed.

Pooler owns which sequences of a model that generates ask for one, and the sums of those whose prompts take several
steps; EncoderExecutor owns an encoder, whose texts take one step.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.contract.plan import EncodingBatch, SequenceStart, StepRows
from faser.engine.execution.models.encoder import Encoder, TextRows
from faser.engine.execution.models.encoder_loader import Classifier
from faser.engine.execution.runner.runner import Runner
from faser.kernels.interface.graph_capture import Readback
from faser.types.pooling import PoolingKind

Floats = NDArray[np.float32]

Vectors = Callable[[], dict[int, bytes]]  # [D] float32 of a step's sequences, by position; may wait for the device


class Pooler:
    """max_logit_rows: most rows whose logits are computed at once, which bounds memory."""

    def __init__(self, runner: Runner, *, max_logit_rows: int) -> None:
        self._runner = runner
        self._max_logit_rows = max_logit_rows
        self._asking: dict[int, SequenceStart] = {}
        self._sums: dict[int, Tensor] = {}  # [H] float64 of the rows before, by slot

    def start(self, start: SequenceStart) -> None:
        """Take over a slot for a sequence."""
        if start.sampling.pooling is not None:
            self._asking[start.slot] = start

    def release(self, slot: int) -> None:
        """Forget the sequence of a slot."""
        self._asking.pop(slot, None)
        self._sums.pop(slot, None)

    @torch.inference_mode()
    def of_step(self, rows: StepRows, last_rows: NDArray[np.int64]) -> Vectors:
        """Start reading the vectors of the prompts that the last forward completed, before the next forward.

        last_rows: [S] index of each sequence's last row in the forward.
        """
        if not self._asking:
            return dict
        reading: list[tuple[list[int], Readback]] = []
        ends: dict[tuple[int, ...], list[int]] = {}
        for at, slot in enumerate(rows.slots):
            if (asked := self._asking.get(slot)) is None:
                continue
            end = rows.starts[at] + rows.counts[at]
            pooling = asked.sampling.pooling
            assert pooling is not None, "only sequences that ask for a vector are kept"
            if pooling.reads_all:
                self._add(slot, int(last_rows[at]), rows.counts[at])
                if end == asked.prompt_len:
                    reading.append(([at], self._read((self._sums.pop(slot) / end)[None])))
            elif end == asked.prompt_len:
                ends.setdefault(pooling.token_ids, []).append(at)
        for token_ids, positions in ends.items():
            reading.append((positions, self._read(self._at(last_rows[positions], token_ids))))
        return lambda: {
            at: row.tobytes()
            for positions, values in reading
            for at, row in zip(positions, values.wait()[0], strict=True)
        }

    def _add(self, slot: int, last_row: int, count: int) -> None:
        """Add the states of a sequence's rows to its sum."""
        states = self._runner.normed(np.arange(last_row + 1 - count, last_row + 1))
        summed = states.double().sum(dim=0)
        self._sums[slot] = summed + self._sums[slot] if slot in self._sums else summed

    def _at(self, rows: NDArray[np.int64], token_ids: tuple[int, ...]) -> Tensor:
        """Return the states [N, H] of rows, or with tokens their logits [N, len(token_ids)]."""
        if not token_ids:
            return self._runner.normed(rows)
        parts = np.split(rows, range(self._max_logit_rows, len(rows), self._max_logit_rows))
        return torch.cat([self._runner.logits(part)[:, list(token_ids)] for part in parts])

    def _read(self, values: Tensor) -> Readback:
        return self._runner.read_back(values.float())


class EncoderExecutor:
    """classifier: of a cross-encoder, whose vectors are logits."""

    def __init__(self, encoder: Encoder, classifier: Classifier | None) -> None:
        self._encoder, self._classifier = encoder, classifier

    def run(self, batch: EncodingBatch) -> list[bytes]:
        """Return the vector [D] float32 of each text, not yet normalised; [1] of a pair."""
        texts = TextRows(batch.token_ids, batch.counts, batch.seconds)
        states = self._encoder.forward(texts)
        kinds = batch.kinds if self._classifier is None else (self._classifier.kind,) * len(batch.counts)
        pooled = _pooled(states.numpy(force=True), texts, kinds)
        if self._classifier is not None:
            logits = self._classifier.logits(torch.from_numpy(pooled).to(states.device))
            pooled = logits.numpy(force=True)
        return [each.tobytes() for each in pooled]


def _pooled(states: Floats, texts: TextRows, kinds: Sequence[PoolingKind]) -> Floats:
    """Return a vector [N, H] of each text's rows. states: [R, H]."""
    starts = texts.starts[:-1]
    last = texts.starts[1:] - 1
    at = np.array([kind is PoolingKind.LAST for kind in kinds])
    found = states[np.where(at, last, starts)]
    means = np.array([kind is PoolingKind.MEAN for kind in kinds])
    if means.any():
        # Sums a text after the other, row after row: a text's bits depend on no neighbour.
        sums = np.add.reduceat(states, starts, axis=0, dtype=np.float64)
        found[means] = (sums / texts.counts[:, None])[means]
    return found
