"""Rejection sampling of drafts by Triton, for callers on the host: one copy to the device, and one back.

Kernels are compiled, or read from Triton's cache, when they are first called. Not yet run on a GPU.
"""

import numpy as np
import torch
from torch import Tensor

from faser.kernels.cuda.device import Accelerator
from faser.kernels.cuda.staging import ReadbackPool
from faser.kernels.cuda.triton.common import next_power_of_2, upload_words
from faser.kernels.cuda.triton.sampling.rejection import SampledDrafts, judge_sampled
from faser.kernels.cuda.triton.sampling.token_kernels import TokenKernels
from faser.kernels.cuda.triton.sampling.workspace import BLOCK, SamplingInputs, SamplingWorkspace
from faser.kernels.interface.sampling.rejection_kernels import RejectionInputs
from faser.kernels.interface.sampling.sampling_kernels import Ints
from faser.kernels.interface.sampling.sampling_metadata import DeviceSamplingMetadata


class TritonRejectionKernels:
    """See RejectionKernels, for logits on the accelerator's device. One lane. block: columns of a program.

    The workspace is made for the first drafts, and again for more rows or another vocabulary.
    """

    def __init__(self, accelerator: Accelerator, *, block: int = BLOCK) -> None:
        self._accelerator = accelerator
        self._readbacks = ReadbackPool(accelerator)
        self._block = block
        self._kernels: TokenKernels | None = None

    @torch.inference_mode()
    def judge(self, logits: Tensor, drafts: RejectionInputs, draft_probs: Tensor) -> tuple[Ints, Ints]:
        count, num_sequences = len(drafts.drafted), len(drafts.first_row) - 1
        if not num_sequences:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        rows, sampled = self._sent(drafts, draft_probs)
        kernels = self._for(count, logits)
        metadata = drafts.metadata
        random = metadata.temperature > 0
        kernels.fixed_point_probs(
            SamplingInputs(logits=logits, rows=rows),
            top_k=bool((random & (metadata.top_k > 0)).any()),
            top_p=bool((random & (metadata.top_p < 1)).any()),
        )
        room = num_sequences + num_sequences % 2  # as in upload_words
        found = torch.zeros(2 * room, dtype=torch.int64, device=logits.device)
        final_ids, num_accepted = found[:num_sequences], found[room:].view(torch.int32)[:num_sequences]
        judge_sampled(logits, rows, sampled, kernels.space, num_accepted, final_ids)
        (words,) = self._readbacks.read_back((found,)).wait()
        return words[room:].view(np.int32)[:num_sequences].astype(np.int64), words[:num_sequences]

    def _sent(self, drafts: RejectionInputs, draft_probs: Tensor) -> tuple[DeviceSamplingMetadata, SampledDrafts]:
        metadata, count = drafts.metadata, len(drafts.drafted)
        room = -(-count // 4) * 4  # so that both halves of the last line begin at a multiple of 16 bytes
        narrow = np.zeros(2 * room, dtype=np.float32)
        narrow[:count] = metadata.temperature
        # Rounded as engine/execution/sampling/distribution.py does.
        narrow[room : room + count] = torch.from_numpy(metadata.min_p).log().float().numpy()
        first_row = np.zeros(-(-len(drafts.first_row) // 2) * 2, dtype=np.int32)
        first_row[: len(drafts.first_row)] = drafts.first_row
        top_k, top_p, seeds, positions, drafted, floats, starts = upload_words(
            self._accelerator,
            [
                metadata.top_k,
                metadata.top_p,
                metadata.seeds,
                metadata.positions,
                drafts.drafted,
                narrow.view(np.int64),
                first_row.view(np.int64),
            ],
        )
        numbers = floats.view(torch.float32)
        rows = DeviceSamplingMetadata(
            temperature=numbers[:count],
            log_min_p=numbers[room : room + count],
            top_k=top_k,
            top_p=top_p.view(torch.float64),
            seeds=seeds,
            positions=positions,
        )
        sampled = SampledDrafts(
            drafted=drafted,
            draft_probs=draft_probs,
            first_row=starts.view(torch.int32)[: len(drafts.first_row)],
            max_draft=int(np.diff(drafts.first_row).max()) - 1,
        )
        return rows, sampled

    def _for(self, num_rows: int, logits: Tensor) -> TokenKernels:
        width = logits.shape[1]
        kernels = self._kernels
        if kernels is None or kernels.space.max_rows < num_rows or kernels.space.width != width:
            space = SamplingWorkspace(next_power_of_2(num_rows), width, logits.device, block=self._block)
            kernels = self._kernels = TokenKernels(space)
        return kernels
