"""The kernels of our own that a CUDA backend uses, as a contract, and those that are written in Triton.

Triton is imported when they are asked for, not with this module.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from faser.kernels.cuda.device import Accelerator
from faser.kernels.interface.backend import AttentionShape
from faser.kernels.interface.logits_processor_kernels import LogitsProcessorKernels
from faser.kernels.interface.rejection_kernels import RejectionKernels
from faser.kernels.interface.sampling_kernels import DeviceSamplingKernels, SamplingKernels


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
    """device_sampling_kernels: makes one for so many rows and tokens of a vocabulary, for one lane."""

    rope_append: RopeAppend
    sampling_kernels: Callable[[Accelerator], SamplingKernels]
    device_sampling_kernels: Callable[[int, int], DeviceSamplingKernels]
    logits_processor_kernels: Callable[[Accelerator], LogitsProcessorKernels]
    rejection_kernels: Callable[[Accelerator], RejectionKernels]


def triton_kernels(device: torch.device) -> DeviceKernels:
    """Those of faser/kernels/triton, for one device. Raises ImportError without Triton."""
    from faser.kernels.cuda.triton.logits.logit_edits import TritonLogitsProcessorKernels
    from faser.kernels.cuda.triton.rope_append import HeadNorm, rope_append
    from faser.kernels.cuda.triton.sampling.device_sampling import TritonDeviceSamplingKernels
    from faser.kernels.cuda.triton.sampling.host_rejection import TritonRejectionKernels
    from faser.kernels.cuda.triton.sampling.host_sampling import TritonSamplingKernels

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
        sampling_kernels=TritonSamplingKernels,
        device_sampling_kernels=lambda max_rows, width: TritonDeviceSamplingKernels(max_rows, width, device),
        logits_processor_kernels=TritonLogitsProcessorKernels,
        rejection_kernels=TritonRejectionKernels,
    )
