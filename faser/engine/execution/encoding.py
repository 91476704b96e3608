"""EncoderExecutor: from the tokens of texts to their vectors, or to the logits of pairs.

Owns the encoder and its head. Knows neither requests nor why texts share a batch.
"""

from collections.abc import Sequence

import numpy as np
import torch

from faser.engine.contract.encoding import EncodingBatch
from faser.engine.execution.models.encoder import Encoder, TextRows
from faser.engine.execution.models.encoder_loader import Classifier
from faser.types.pooling import PoolingKind


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


def _pooled(states: "np.ndarray", texts: TextRows, kinds: Sequence[PoolingKind]) -> "np.ndarray":
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
