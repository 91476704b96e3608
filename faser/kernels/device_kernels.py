"""The kernels of our own that a CUDA backend uses, as a contract, and those that are written in Triton.

Triton is imported when they are asked for, not with this module.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from faser.kernels.backend import AttentionShape
from faser.kernels.cuda_device import Accelerator
from faser.kernels.device_choice import DeviceChoice
from faser.kernels.draft_verdicts import DraftVerdicts
from faser.kernels.logit_edits import LogitEdits
from faser.kernels.token_choice import TokenChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorms:
    """RMS norms of each head before it is rotated. queries, keys: [D] weights."""

    queries: Tensor
    keys: Tensor
    eps: float


class RopeAppend(Protocol):
    """Normalises, rotates and stores in one launch."""

    def __call__(
        self,
        qkv: Tensor,
        angles: Tensor | None,
        positions: Tensor,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
        shape: AttentionShape,
        norms: HeadNorms | None,
    ) -> Tensor:
        """See Backend.rope_append. positions, slots: [R] int64; a row whose slot is NO_SLOT stores nothing.

        keys, values: [blocks, block_size, Hkv, D] of one layer, contiguous, of the type of qkv or float8_e4m3fn.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKernels:
    """device_choice: makes one for so many rows and tokens of a vocabulary, for one lane."""

    rope_append: RopeAppend
    token_choice: Callable[[Accelerator], TokenChoice]
    device_choice: Callable[[int, int], DeviceChoice]
    logit_edits: Callable[[Accelerator], LogitEdits]
    draft_verdicts: Callable[[Accelerator], DraftVerdicts]


def triton_kernels(device: torch.device) -> DeviceKernels:
    """Those of faser/kernels/triton, for one device. Raises ImportError without Triton."""
    from faser.kernels.triton.device_choice import TritonDeviceChoice
    from faser.kernels.triton.host_choice import TritonTokenChoice
    from faser.kernels.triton.host_verdicts import TritonDraftVerdicts
    from faser.kernels.triton.logit_edits import TritonLogitEdits
    from faser.kernels.triton.rope_append import HeadNorm, rope_append

    def normed(
        qkv: Tensor,
        angles: Tensor | None,
        positions: Tensor,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
        shape: AttentionShape,
        norms: HeadNorms | None,
    ) -> Tensor:
        norm = None
        if norms is not None:
            norm = HeadNorm(q_weight=norms.queries, k_weight=norms.keys, eps=norms.eps)
        return rope_append(qkv, angles, positions, slots, keys, values, shape, norm)

    return DeviceKernels(
        rope_append=normed,
        token_choice=TritonTokenChoice,
        device_choice=lambda max_rows, width: TritonDeviceChoice(max_rows, width, device),
        logit_edits=TritonLogitEdits,
        draft_verdicts=TritonDraftVerdicts,
    )
