"""Rejection sampling by kernels where the logits are: rule, noise and tokens of rejection.py, with one wait."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from faser.engine.execution.sampling.sampler import ProcessedLogits, Sampler
from faser.engine.execution.verifiers.judged_rows import JudgedRows, lay_out
from faser.engine.execution.verifiers.verifier import AcceptanceResult, DraftedRows, Verifier
from faser.kernels.interface.sampling.rejection_kernels import RejectionInputs, RejectionKernels


class DeviceRejection:
    """See Verifier. Waits a second time only where a row has no token, to say why.

    point_masses: the verifier of drafts that come without probabilities.
    """

    def __init__(self, sampler: Sampler, kernels: RejectionKernels, point_masses: Verifier) -> None:
        self._sampler = sampler
        self._kernels = kernels
        self._point_masses = point_masses

    @torch.inference_mode()
    def judge(
        self, logits: Tensor, sequences: Sequence[DraftedRows], draft_probs: Tensor | None
    ) -> list[AcceptanceResult]:
        if draft_probs is None:
            return self._point_masses.judge(logits, sequences, None)
        rows = lay_out(sequences)
        processed = rows.process(self._sampler, logits)
        num_accepted, final_ids = self._kernels.judge(logits, self._drafts(rows, processed), draft_probs)
        last = rows.first + num_accepted
        best = np.zeros(len(rows.drafted), dtype=np.int64)  # only NO_TOKEN in the rows reached matters
        best[last] = final_ids
        return rows.acceptance_results(self._sampler, self._sampler.with_errors(processed, best), last, final_ids)

    def _drafts(self, rows: JudgedRows, processed: ProcessedLogits) -> RejectionInputs:
        return RejectionInputs(
            first_row=np.append(rows.first, len(rows.drafted)),
            drafted=rows.drafted,
            metadata=self._sampler.metadata(processed.slots, processed.positions),
        )
