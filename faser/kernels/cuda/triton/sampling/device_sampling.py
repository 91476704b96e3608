"""Tokens sampled where the logits are, by Triton: the end of a step's CUDA graphs.

All addresses are fixed and a call allocates nothing, so that a CUDA graph can contain it. Kernels are compiled
when they are first called, so there must be one call before the capture. The kernels give the bits of the tensor
operations in Triton's interpreter, and their tokens on an H200.
"""

import torch
from torch import Tensor

from faser.kernels.cuda.triton.sampling.token_kernels import TokenKernels
from faser.kernels.cuda.triton.sampling.workspace import BLOCK, SamplingInputs, SamplingWorkspace
from faser.kernels.interface.sampling import DeviceSamplingMetadata


class TritonDeviceSamplingKernels:
    """Sampling kernels on the device. width: of the vocabulary. block: columns of a program, a power of 2.

    All its methods raise EngineError for tensors that do not fit. Rows without a temperature, such as padding, may
    hold anything: neither their other numbers nor their logits change another row.
    """

    def __init__(self, max_rows: int, width: int, device: torch.device | str, *, block: int = BLOCK) -> None:
        self._kernels = TokenKernels(SamplingWorkspace(max_rows, width, device, block=block))

    def take(
        self,
        logits: Tensor,
        rows: DeviceSamplingMetadata,
        chosen: Tensor,
        *,
        top_k: bool,
        top_p: bool,
        random: bool = True,
    ) -> None:
        shaped = SamplingInputs(logits=logits, rows=rows)
        self._kernels.choose(shaped, chosen, top_k=top_k, top_p=top_p, random=random)

    def draft(
        self,
        logits: Tensor,
        rows: DeviceSamplingMetadata,
        chosen: Tensor,
        margins: Tensor,
        *,
        top_k: bool,
        top_p: bool,
        random: bool = True,
    ) -> None:
        shaped = SamplingInputs(logits=logits, rows=rows)
        self._kernels.draft(shaped, chosen, margins, top_k=top_k, top_p=top_p, random=random)
