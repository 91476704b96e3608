"""Synthetic acceptance: draft tokens are accepted at given rates, whatever the logits are. For cost curves only.

The output is not the model's. The work is real: the rows run, and the final token of a step is sampled from the
target's logits.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.verifiers.judged_rows import lay_out
from faser.engine.execution.verifiers.rejection import accept_noise
from faser.engine.execution.verifiers.verifier import AcceptanceResult, DraftedRows


class Synthetic:
    """rates: the i-th is the probability that the first i + 1 draft tokens are all accepted; 0 after the last."""

    def __init__(self, sampler: Sampler, rates: tuple[float, ...]) -> None:
        self._sampler = sampler
        unconditional = np.array([1.0, *rates, 0.0])
        before = unconditional[:-1]
        self._rates = np.where(before > 0, unconditional[1:] / np.where(before > 0, before, 1.0), 0.0)

    def judge(
        self, logits: Tensor, sequences: Sequence[DraftedRows], _draft_probs: Tensor | None
    ) -> list[AcceptanceResult]:
        rows = lay_out(sequences)
        prepared = rows.prepare(self._sampler, logits)
        noise = accept_noise(self._sampler, rows, prepared).numpy(force=True)
        last = rows.last_reached(noise < self._rates[np.minimum(rows.depth, len(self._rates) - 1)])
        return rows.acceptance_results(self._sampler, prepared, last, self._sampler.choose(prepared, last))
