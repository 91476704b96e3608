"""The Triton kernels that a CUDA backend calls, as one value, so that tests can hand in others.

Importing this module does not import Triton; triton_kernels does.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from faser.kernels.cuda.device import Accelerator
from faser.kernels.interface.logits_processor_kernels import LogitsProcessorKernels
from faser.kernels.interface.rejection_kernels import RejectionKernels
from faser.kernels.interface.sampling_kernels import DeviceSamplingKernels, SamplingKernels
from faser.kernels.interface.shapes import AttentionShape

# (qkv, angles, positions, slots, keys, values, shape, q_norm, k_norm, eps) -> queries; see triton/rope_append.py.
RopeAppend = Callable[
    [Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor, AttentionShape, Tensor | None, Tensor | None, float],
    Tensor,
]
RmsNorm = Callable[[Tensor, Tensor, float, Tensor], Tensor]  # (x, weight, eps, out) -> out; see triton/norm.py
SiluMul = Callable[[Tensor, Tensor], Tensor]  # (gate_up, out) -> out; see triton/gate.py


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKernels:
    """device_sampling_kernels: called with (most rows, vocabulary size), makes the kernels of one lane."""

    rms_norm: RmsNorm
    silu_mul: SiluMul
    rope_append: RopeAppend
    sampling_kernels: Callable[[Accelerator], SamplingKernels]
    device_sampling_kernels: Callable[[int, int], DeviceSamplingKernels]
    logits_processor_kernels: Callable[[Accelerator], LogitsProcessorKernels]
    rejection_kernels: Callable[[Accelerator], RejectionKernels]


def triton_kernels(device: torch.device) -> DeviceKernels:
    """The kernels of this package, for one device. Raises ImportError without Triton."""
    from faser.kernels.cuda.triton.gate import silu_mul
    from faser.kernels.cuda.triton.logits.logit_edits import TritonLogitsProcessorKernels
    from faser.kernels.cuda.triton.norm import rms_norm
    from faser.kernels.cuda.triton.rope_append import rope_append
    from faser.kernels.cuda.triton.sampling.device_sampling import TritonDeviceSamplingKernels
    from faser.kernels.cuda.triton.sampling.host_rejection import TritonRejectionKernels
    from faser.kernels.cuda.triton.sampling.host_sampling import TritonSamplingKernels

    return DeviceKernels(
        rms_norm=rms_norm,
        silu_mul=silu_mul,
        rope_append=rope_append,
        sampling_kernels=TritonSamplingKernels,
        device_sampling_kernels=lambda max_rows, width: TritonDeviceSamplingKernels(max_rows, width, device),
        logits_processor_kernels=TritonLogitsProcessorKernels,
        rejection_kernels=TritonRejectionKernels,
    )
