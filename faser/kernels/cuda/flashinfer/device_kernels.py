"""The Triton kernels that a CUDA backend calls, as one value, so that tests can hand in others.

Importing this module does not import Triton; triton_kernels does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from faser.kernels.cuda.device import Accelerator
from faser.kernels.cuda.flashinfer.paged_layout import PagedLayout
from faser.kernels.cuda.low_bit import CudaLowBit, LowBitMatrix
from faser.kernels.interface.adapters import Adapters
from faser.kernels.interface.blocks import DecoderLayer, Experts
from faser.kernels.interface.delta_net import DeltaNet
from faser.kernels.interface.drafting import FollowedRows, StepMatch
from faser.kernels.interface.fp8 import Fp8Rows
from faser.kernels.interface.mixers import LayerStates
from faser.kernels.interface.sampling import DeviceSamplingKernels, SamplingKernels
from faser.kernels.interface.shapes import AttentionShape
from faser.optional import maybe

if TYPE_CHECKING:
    from faser.kernels.cuda.triton.expert_weights import ExpertWeights

# See triton/layer_ops.py for the arguments of these.
RopeAppend = Callable[..., Tensor]
RmsNorm = Callable[[Tensor, Tensor, float, Tensor, Tensor | None], Tensor]
Gate = Callable[[Tensor, Tensor, str], Tensor]
# Of x, logits, hidden, read, of a shared expert what it gives and its logits, and slots; see triton/experts.py.
# That of low-bit weights takes `piece_bytes` as well.
RunExperts = Callable[..., None]
# Of qkv, rates, net, held, numbers, out; see triton/delta_net.py.
RunDeltaNet = Callable[[Tensor, Tensor, DeltaNet, LayerStates, Tensor, Tensor], None]
ScaleBySinks = Callable[[Tensor, Tensor, Tensor], None]  # see triton/sinks.py
# See triton/drafting.py for the arguments of these.
Match = Callable[[StepMatch], None]
Advance = Callable[[FollowedRows, StepMatch | None, PagedLayout, int], None]
FewRows = Callable[..., Tensor]  # see triton/few_rows.py


class FewRowAttention(Protocol):
    """Attention of few rows in one launch; see triton/few_row_attention.py."""

    def takes(self, shape: AttentionShape, rows_each: int) -> bool: ...

    def __call__(
        self,
        layer: DecoderLayer,
        shape: AttentionShape,
        qkv: Tensor,
        pages: tuple[Tensor, Tensor],
        layout: PagedLayout,
        rows_each: int,
        out: Tensor,
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class CudaLinear:
    """A packed weight in 16 bits. weight: [N, K]. bias: [N]."""

    weight: Tensor
    bias: Tensor | None

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape


@dataclass(frozen=True, slots=True, kw_only=True)
class LowBitKernels:
    """Products with low-bit weights; see triton/low_bit.py for the arguments. lines: of an embedding."""

    few_rows: FewRows
    rows: Callable[..., Tensor]
    dequantise: Callable[[LowBitMatrix, int, Tensor], Tensor]
    lines: Callable[[LowBitMatrix, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMatrices:
    """One product of each expert. weights: [N, K] each, in 8 bits those of the rows of `quantised`.

    biases: [N] each; None: there are none. quantised: None: weights are not in 8 bits. low_bit: then there are no
    weights; None: there are.
    """

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...] | None
    quantised: tuple[Fp8Rows, ...] | None = None
    low_bit: tuple[CudaLowBit, ...] | None = None


ExpertsKernels = Callable[[Experts, ExpertMatrices, ExpertMatrices], RunExperts]  # gate_up, down
# Of hidden, norm, eps, what is added to, read, slots, and the router's norm; see triton/few_row_experts.py.
RunFewRowExperts = Callable[[Tensor, Tensor, float, Tensor, Tensor, Tensor | None, Tensor | None], None]
# Of a mixture, its router, gate_up and down, with those of a shared expert last.
FewRowExpertsKernels = Callable[
    [Experts, ExpertMatrices, ExpertMatrices, ExpertMatrices], Mapping[str, RunFewRowExperts]
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKernels:
    """device_sampling_kernels: called with (most rows, vocabulary size), makes the kernels of one lane.

    few_rows: None: there is none. few_row_attention: makes that of one backend; None: there is none.
    experts: called with a mixture and its products gate_up and down, makes its kernels; None: there are none.
    few_row_experts: ways to compute a mixture of up to FEW_ROWS rows, by name; None: there are none.
    delta_net, low_bit: None: there are none. adapters: makes those of a device; None: tensor operations serve.
    """

    rms_norm: RmsNorm
    gate: Gate
    rope_append: RopeAppend
    scale_by_sinks: ScaleBySinks
    match: Match
    advance: Advance
    sampling_kernels: Callable[[Accelerator], SamplingKernels]
    device_sampling_kernels: Callable[[int, int], DeviceSamplingKernels]
    few_rows: FewRows | None = None
    few_row_attention: Callable[[], FewRowAttention] | None = None
    experts: ExpertsKernels | None = None
    few_row_experts: FewRowExpertsKernels | None = None
    delta_net: RunDeltaNet | None = None
    low_bit: LowBitKernels | None = None
    adapters: Callable[[Accelerator], Adapters] | None = None


def experts_kernels(block: Experts, gate_up: ExpertMatrices, down: ExpertMatrices) -> RunExperts:
    """Those of triton/experts.py. Raises EngineError for matrices that are not alike."""
    from faser.kernels.cuda.triton.experts import experts

    return partial(
        experts,
        _networks(gate_up, down),
        top_k=block.top_k,
        renormalise=block.renormalise,
        activation=block.activation,
        scales=block.scales,
    )


def few_row_experts_kernels(
    block: Experts, router: ExpertMatrices, gate_up: ExpertMatrices, down: ExpertMatrices
) -> dict[str, RunFewRowExperts]:
    """Those of triton/few_row_experts.py. Raises EngineError for matrices that are not alike."""
    from faser.kernels.cuda.triton.few_row_experts import FEW_ROW_TILES, FewRowExperts

    run = FewRowExperts(
        networks=_networks(gate_up, down),
        router=router.weights[0],
        router_bias=None if router.biases is None else router.biases[0],
        top_k=block.top_k,
        renormalise=block.renormalise,
        activation=block.activation,
        scales=block.scales,
        shares=block.shared is not None,
    )
    return {name: partial(run, tiles=tiles) for name, tiles in FEW_ROW_TILES.items()}


def _networks(gate_up: ExpertMatrices, down: ExpertMatrices) -> "ExpertWeights":
    from faser.kernels.cuda.triton.expert_weights import ExpertProduct, ExpertScaling, ExpertWeights

    def product(name: str, given: ExpertMatrices) -> ExpertProduct:
        if given.low_bit is not None:
            return ExpertProduct.of_codes(name, given.low_bit, given.biases)
        return ExpertProduct.of(name, given.weights, given.biases, maybe(ExpertScaling.of, given.quantised))

    return ExpertWeights(gate_up=product("gate_up", gate_up), down=product("down", down))


def triton_kernels(device: torch.device) -> DeviceKernels:
    """The kernels of triton/, for one device. Raises ImportError without Triton."""
    from faser.kernels.cuda.triton.adapters import TritonAdapters
    from faser.kernels.cuda.triton.delta_net import delta_net
    from faser.kernels.cuda.triton.drafting import advance, match
    from faser.kernels.cuda.triton.few_row_attention import FewRowAttention
    from faser.kernels.cuda.triton.few_rows import few_rows
    from faser.kernels.cuda.triton.layer_ops import gate, rms_norm, rope_append
    from faser.kernels.cuda.triton.low_bit import dequantise, few_low_bit_rows, lines_of, low_bit_rows
    from faser.kernels.cuda.triton.sampling.device_sampling import TritonDeviceSamplingKernels
    from faser.kernels.cuda.triton.sampling.host_sampling import TritonSamplingKernels
    from faser.kernels.cuda.triton.sinks import scale_by_sinks

    return DeviceKernels(
        rms_norm=rms_norm,
        gate=gate,
        rope_append=rope_append,
        scale_by_sinks=scale_by_sinks,
        match=match,
        advance=advance,
        sampling_kernels=TritonSamplingKernels,
        device_sampling_kernels=lambda max_rows, width: TritonDeviceSamplingKernels(max_rows, width, device),
        few_rows=few_rows,
        few_row_attention=FewRowAttention,
        experts=experts_kernels,
        few_row_experts=few_row_experts_kernels,
        delta_net=delta_net,
        low_bit=LowBitKernels(few_rows=few_low_bit_rows, rows=low_bit_rows, dequantise=dequantise, lines=lines_of),
        adapters=TritonAdapters,
    )
