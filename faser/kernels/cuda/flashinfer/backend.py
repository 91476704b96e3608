"""The CUDA backend: FlashInfer's paged attention and fused kernels, torch's matrix products. bfloat16 and float16.

Owns the cache's layout, a workspace, and attention wrappers for every place; what these are is in paged_attention,
where kernels come from in flashinfer_library and device_kernels, what only CUDA has in cuda_device, recordings in
cuda_capture. An eager step is planned once for each kind of attention layer that a model has, from arrays on the
host. Nothing waits for the device but planning, until it has copied what was planned before. Like torch's, its
products may give a row other bits in another batch.

A layer is eight launches and its attention, which is one or two: two norms, four products, rotating with storing,
the gate. A residual is added by the product before it, in place, so that nothing is copied; adding it in the norm
behind (fused_add_rmsnorm) would be as many launches and read as much.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from faser.errors import ConfigError
from faser.kernels.cuda.device import Accelerator, Fence
from faser.kernels.cuda.flashinfer.graph_capture import CudaCapture, FixedPlan
from faser.kernels.cuda.flashinfer.library import FlashInfer, PagedAttention
from faser.kernels.cuda.flashinfer.paged_attention import (
    AttentionKind,
    AttentionWorkspace,
    AttentionWrappers,
    plan_attention,
)
from faser.kernels.cuda.triton.own_kernels import DeviceKernels, HeadNorms
from faser.kernels.cuda.triton.scaled_fp8 import LOWEST_CAPABILITY
from faser.kernels.interface.backend import AttentionShape, KvShape, RowLayout
from faser.kernels.interface.fp8 import FP8, Fp8Linear, Fp8Products, Fp8Rows, pack_fp8
from faser.kernels.interface.fp8_cache import as_bytes, check_cache_dtype
from faser.kernels.interface.logits_processor_kernels import LogitsProcessorKernels
from faser.kernels.interface.paged_layout import PagedLayout, paged_layout
from faser.kernels.interface.processors import DeviceLane, Processors
from faser.kernels.interface.rejection_kernels import RejectionKernels
from faser.kernels.interface.sampling_kernels import DeviceSamplingKernels, SamplingKernels

DTYPES = (torch.bfloat16, torch.float16)
KV_DTYPES = (*DTYPES, FP8)  # of keys and values
HEAD_DIMS = (64, 128)  # the sizes that kernels are compiled for


@dataclass(frozen=True, slots=True)
class _Linear:
    weight: Tensor  # [N, K]
    bias: Tensor | None  # [N]


@dataclass(frozen=True, slots=True)
class _Cache:
    """data: [L, 2, blocks, block_size, Hkv, D]; keys and values of a layer are in line each."""

    data: Tensor

    @property
    def block_size(self) -> int:
        return self.data.shape[3]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values, [blocks, block_size, Hkv, D] each, with the same strides: kernels want that."""
        keys, values = self.data[layer].unbind()
        return keys, values


@dataclass(slots=True)
class _Planned:
    """A wrapper, and the plan it is planned for. copied: behind the copy of what planning left in its buffer."""

    wrapper: PagedAttention
    copied: Fence
    plan: "_EagerPlan | None" = None


class _EagerPlan:
    """A digested layout. `host` is read when attention is planned, `device` by kernels."""

    def __init__(self, host: PagedLayout, device: PagedLayout, block_size: int, place: "_Place") -> None:
        self.host = host
        self.device = device
        self.block_size = block_size
        self.one_row_each = host.one_row_each
        self._place = place

    def attention(self, kind: AttentionKind) -> PagedAttention:
        """The wrapper of a kind, planned for this layout."""
        return self._place.planned(kind, self)


class _Place:
    """The whole device, or a lane's part of it: recordings there, and wrappers of eager steps.

    Of each kind there is one such wrapper, which all steps use one after the other.
    """

    def __init__(
        self, accelerator: Accelerator, library: FlashInfer, workspace: AttentionWorkspace, lane: DeviceLane | None
    ) -> None:
        self.lane = lane
        self._accelerator = accelerator
        num_processors = accelerator.num_processors if lane is None else lane.num_processors
        self._wrappers = AttentionWrappers(accelerator, library, workspace, num_processors)
        self._planned: dict[AttentionKind, _Planned] = {}
        self._capture: CudaCapture | None = None

    @property
    def capture(self) -> CudaCapture:
        if self._capture is None:
            self._capture = CudaCapture(self._accelerator, self._wrappers, self.lane)
        return self._capture

    def planned(self, kind: AttentionKind, plan: _EagerPlan) -> PagedAttention:
        planned = self._planned.get(kind)
        if planned is None:
            planned = _Planned(self._wrappers.eager(kind), self._accelerator.fence())
            self._planned[kind] = planned
        if planned.plan is not plan:
            planned.copied.wait()
            plan_attention(planned.wrapper, kind, plan.host, plan.block_size, plan.device.page_indices)
            planned.plan = plan
            planned.copied.mark()
        return planned.wrapper


class FlashInferBackend:
    """See Backend. Nothing is allocated on the device before it is needed.

    kernels: of our own. fp8: None where the device has no products of quantised weights.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        library: FlashInfer,
        kernels: DeviceKernels,
        fp8: Fp8Products | None = None,
    ) -> None:
        self.device = accelerator.device
        self.name = "flashinfer"
        self.sampling_kernels: SamplingKernels | None = kernels.sampling_kernels(accelerator)
        self.logits_processor_kernels: LogitsProcessorKernels | None = kernels.logits_processor_kernels(
            accelerator
        )
        self.rejection_kernels: RejectionKernels | None = kernels.rejection_kernels(accelerator)
        self.has_fp8 = fp8 is not None
        self._accelerator = accelerator
        self._library = library
        self._kernels = kernels
        self._fp8 = fp8
        self._workspace = AttentionWorkspace(accelerator)
        self._places: dict[DeviceLane | None, _Place] = {}
        self._here = self._place_of(None)

    def _place_of(self, lane: DeviceLane | None) -> _Place:
        if lane not in self._places:
            self._places[lane] = _Place(self._accelerator, self._library, self._workspace, lane)
        return self._places[lane]

    def use(self, processors: Processors | None) -> None:
        """See Backend. A GPU has no cores to be named: only its lanes are possible.

        Kernels go to the caller's current stream. Attention is planned for the lane's processors, but for what
        decodes without tensor cores: that is always cut into pieces for all of the device.
        """
        if isinstance(processors, tuple):
            raise ConfigError(
                f"the flashinfer backend computes on {self.device}; it cannot use cores {processors}"
            )
        self._here = self._place_of(processors)

    @property
    def place(self) -> DeviceLane | None:
        return self._here.lane

    def beside(self) -> "FlashInferBackend":
        """See Backend. The other one has wrappers, a workspace, and a pool of recordings of its own."""
        return FlashInferBackend(self._accelerator, self._library, self._kernels, self._fp8)

    @property
    def capture(self) -> CudaCapture:
        return self._place_of(None).capture

    def capture_on(self, place: DeviceLane) -> CudaCapture:
        return self._place_of(place).capture

    def device_sampling_kernels(self, max_rows: int, width: int) -> DeviceSamplingKernels:
        return self._kernels.device_sampling_kernels(max_rows, width)

    def wait(self) -> None:
        self._accelerator.wait()

    def pack(self, weight: Tensor | Fp8Rows, bias: Tensor | None = None) -> _Linear | Fp8Linear:
        """See Backend. Raises ConfigError for dtypes but bfloat16 and float16, too."""
        if isinstance(weight, Fp8Rows):
            return self._pack_fp8(weight, bias)
        if weight.dtype not in DTYPES:
            names = " and ".join(map(str, DTYPES))
            told = f"the flashinfer backend computes in {names}; the weight is {weight.dtype}"
            raise ConfigError(told.replace("torch.", ""))
        return _Linear(
            weight.to(self.device, copy=True).contiguous(),
            None if bias is None else bias.to(self.device, weight.dtype, copy=True),
        )

    def _pack_fp8(self, weight: Fp8Rows, bias: Tensor | None) -> Fp8Linear:
        if self._fp8 is None:
            needed = ".".join(map(str, LOWEST_CAPABILITY))
            raise ConfigError(f"{self.device} has no fp8 products; they need compute capability {needed}")
        self._fp8.check(weight)
        return pack_fp8(weight, bias, self.device)

    def linear(
        self, x: Tensor, packed: _Linear | Fp8Linear, out: Tensor, *, residual: Tensor | None = None
    ) -> Tensor:
        if isinstance(packed, Fp8Linear):
            assert self._fp8 is not None, "a quantised weight was packed by somebody else"
            return self._fp8.linear(x, packed, out, residual)
        weight, bias = packed.weight.t(), packed.bias
        if out.dtype is not x.dtype:
            into = out if residual is None else torch.empty_like(out)
            product = self._accelerator.wide_product(x, weight, into)
            if bias is not None:
                product += bias
            return product if residual is None else torch.add(product, residual, out=out)
        start = bias if residual is None else residual
        if start is None:
            return torch.mm(x, weight, out=out)
        torch.addmm(start, x, weight, out=out)
        if residual is not None and bias is not None:
            out += bias
        return out

    def embed(self, token_ids: Tensor, packed: _Linear, out: Tensor) -> Tensor:
        return torch.index_select(packed.weight, 0, token_ids.to(self.device, non_blocking=True), out=out)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        return self._library.rmsnorm(input=x, weight=weight, eps=eps, out=out)

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> Tensor:
        return self._library.silu_and_mul(input=gate_up, out=out)

    def allocate_kv(self, shape: KvShape) -> _Cache:
        """See Backend. Raises ConfigError for a dtype or head size without kernels."""
        check_cache_dtype(self.name, shape.dtype, KV_DTYPES)
        if shape.head_dim not in HEAD_DIMS:
            sizes = " and ".join(map(str, HEAD_DIMS))
            raise ConfigError(f"the flashinfer backend has kernels for heads of {sizes}, not {shape.head_dim}")
        size = (shape.num_layers, 2, shape.num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        zeros = torch.zeros(shape.total_bytes, dtype=torch.uint8, device=self.device)
        return _Cache(zeros.view(shape.dtype).view(size))

    def plan(self, layout: RowLayout, block_size: int) -> _EagerPlan:
        """See Backend. One transfer; attention is planned when the first layer of a kind comes."""
        host = paged_layout(layout, block_size, self._accelerator.host_numbers)
        return _EagerPlan(host, host.within(self._accelerator.upload(host.packed)), block_size, self._here)

    def rope_append(
        self,
        qkv: Tensor,
        angles: Tensor | None,
        cache: _Cache,
        layer: int,
        shape: AttentionShape,
        plan: _EagerPlan | FixedPlan,
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        """See Backend. Head norms come for queries and keys together."""
        norms = None
        if q_norm is not None or k_norm is not None:
            assert q_norm is not None, "a norm of keys without one of queries"
            assert k_norm is not None, "a norm of queries without one of keys"
            norms = HeadNorms(queries=q_norm, keys=k_norm, eps=eps)
        keys, values = cache.layer(layer)
        rows = plan.device
        return self._kernels.rope_append(qkv, angles, rows.positions, rows.slots, keys, values, shape, norms)

    def attend(
        self,
        q: Tensor,
        cache: _Cache,
        layer: int,
        shape: AttentionShape,
        plan: _EagerPlan | FixedPlan,
        out: Tensor,
    ) -> Tensor:
        assert plan.block_size == cache.block_size, (plan.block_size, cache.block_size)
        assert out.is_contiguous(), out.stride()
        wrapper = plan.attention(AttentionKind(shape, q.dtype, cache.data.dtype, plan.one_row_each))
        size = (len(q), shape.num_heads, shape.head_dim)
        wrapper.run(q=q.view(size), paged_kv_cache=cache.layer(layer), out=out.view(size))
        return out

    def copy_blocks(self, cache: _Cache, pairs: list[tuple[int, int]]) -> None:
        if not pairs:
            return
        numbers = self._accelerator.host_numbers(2 * len(pairs), torch.int64)
        numbers.view(-1, 2)[:] = torch.tensor(pairs)
        sources, targets = self._accelerator.upload(numbers).view(-1, 2).unbind(1)
        data = as_bytes(cache.data)
        data[:, :, targets] = data[:, :, sources]
