"""Tokens chosen where the logits are, by Triton: what recordings of a step end with.

All places are fixed and nothing is allocated by a call, so that it can be recorded; kernels are compiled when they
are first called, so it must be called once before. Not yet run on a GPU: the kernels compile for sm_90, and give
the bits of the tensor operations in Triton's interpreter.
"""

import torch
from torch import Tensor

from faser.kernels.cuda.triton.sampling.token_kernels import TokenKernels
from faser.kernels.cuda.triton.sampling.workspace import BLOCK, SamplingWorkspace, ShapedLogits
from faser.kernels.interface.sampling_metadata import DeviceSamplingMetadata


class TritonDeviceSamplingKernels:
    """See DeviceSamplingKernels. width: of the vocabulary. block: columns of a program, a power of 2.

    All its methods raise EngineError for tensors that do not fit. Rows without a temperature, such as padding, may
    hold anything else: neither their other numbers nor their logits can harm a row beside them.
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
        shaped = ShapedLogits(logits=logits, rows=rows)
        self._kernels.choose(shaped, chosen, top_k=top_k, top_p=top_p, random=random)

    def draft(
        self,
        logits: Tensor,
        rows: DeviceSamplingMetadata,
        window: float,
        chosen: Tensor,
        margins: Tensor,
        *,
        top_k: bool,
        top_p: bool,
        random: bool = True,
    ) -> None:
        shaped = ShapedLogits(logits=logits, rows=rows)
        self._kernels.draft(shaped, window, chosen, margins, top_k=top_k, top_p=top_p, random=random)
