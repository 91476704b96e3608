"""The CUDA backend: FlashInfer's paged attention, torch's matrix products, own kernels. bfloat16 and float16.

Owns the cache's layout, a workspace, and attention wrappers for every lane. An eager step plans attention on the
host, once for each kind of attention layer of the model. Only planning waits for the device: until it has copied
the previous plan. The matrix products are torch's, so a row may get other bits in another batch.

A layer is eight launches and its attention, which is one or two: two norms, four products, one launch that rotates
and stores, the gate. A product adds the residual in place, so that nothing is copied; adding it in the following
norm instead would take as many launches and read as much.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from faser.errors import ConfigError
from faser.kernels.cuda.choices import Choices
from faser.kernels.cuda.device import Accelerator, DeviceEvent
from faser.kernels.cuda.flashinfer.build import HEAD_DIMS
from faser.kernels.cuda.flashinfer.device_kernels import CudaLinear, DeviceKernels, ExpertMatrices, RunExperts
from faser.kernels.cuda.flashinfer.few_row_blocks import FewRowBlocks
from faser.kernels.cuda.flashinfer.few_row_layers import FewRowLayers
from faser.kernels.cuda.flashinfer.few_row_mixtures import FewRowMixtures, Ways
from faser.kernels.cuda.flashinfer.graph_capture import FixedPlan, FlashInferGraphCapture
from faser.kernels.cuda.flashinfer.grouped_products import GroupedProducts
from faser.kernels.cuda.flashinfer.library import FlashInfer, PagedAttention
from faser.kernels.cuda.flashinfer.low_bit_mixtures import LowBitMixtures
from faser.kernels.cuda.flashinfer.low_bit_products import LowBitProducts
from faser.kernels.cuda.flashinfer.paged_attention import (
    AttentionKind,
    AttentionWorkspace,
    AttentionWrappers,
    plan_attention,
)
from faser.kernels.cuda.flashinfer.paged_layout import PagedLayout, paged_layout
from faser.kernels.cuda.flashinfer.products import Products, ProductWays, ways_in_16_bits
from faser.kernels.cuda.low_bit import CudaLowBit
from faser.kernels.cuda.triton.scaled_fp8 import LOWEST_CAPABILITY
from faser.kernels.interface.adapters import Adapters, TorchAdapters
from faser.kernels.interface.blocks import Blocks, Experts, Layers, Mixtures
from faser.kernels.interface.delta_net import DeltaNet, DeltaShape
from faser.kernels.interface.forward import AdaptedBlocks, SeparateBlocks, SeparateLayers, SeparateMixtures
from faser.kernels.interface.fp8 import FP8, Fp8Linear, Fp8Products, Fp8Rows, pack_fp8
from faser.kernels.interface.kv_cache import KvShape, check_cache_dtype
from faser.kernels.interface.low_bit.rows import LowBitRows
from faser.kernels.interface.mixers import Mixer, MixerShape, StateShape, StateStep, TorchStates
from faser.kernels.interface.sampling import DeviceSamplingKernels, SamplingKernels
from faser.kernels.interface.shapes import AttentionShape, DeviceLane, PackedLinear, Processors, RowLayout
from faser.types.activation import Activation

DTYPES = (torch.bfloat16, torch.float16)
_DELTA_HEAD_DIMS = range(16, 257, 16)
_TILED = "tiles"  # the first ones of grouped_fp8.py
_IN_8_BITS = 2.0**-4  # of the largest value: some kernels round rows to 8 bits
KV_DTYPES = (*DTYPES, FP8)  # of keys and values


@dataclass(frozen=True, slots=True)
class _CudaCache:
    """data: bytes. layers: keys and values of each in there, [blocks, block_size, Hkv, D], contiguous."""

    data: Tensor
    layers: tuple[tuple[Tensor, Tensor], ...]
    block_size: int


@dataclass(slots=True)
class _PlannedWrapper:
    """A wrapper and its current plan. copied: marked after the copy of the plan from the pinned buffer."""

    wrapper: PagedAttention
    copied: DeviceEvent
    plan: "_EagerPlan | None" = None


class _EagerPlan:
    """A digested layout. Planning reads `host`, kernels read `device`."""

    def __init__(self, host: PagedLayout, device: PagedLayout, block_size: int, state: "_LaneState") -> None:
        self.host = host
        self.device = device
        self.block_size = block_size
        self.one_row_each = host.one_row_each
        self.most_rows_each = int(host.query_indptr.diff().max())
        self._state = state

    def attention(self, kind: AttentionKind) -> PagedAttention:
        """The wrapper of a kind, planned for this layout."""
        return self._state.planned(kind, self)


class _LaneState:
    """Graph capture and the attention wrappers of eager steps, for one lane or (lane None) for the whole device.

    All eager steps share one wrapper per kind, one step after the other.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        library: FlashInfer,
        kernels: DeviceKernels,
        workspace: AttentionWorkspace,
        lane: DeviceLane | None,
    ) -> None:
        self.lane = lane
        self._kernels = kernels
        self._accelerator = accelerator
        num_processors = accelerator.num_processors if lane is None else lane.num_processors
        self._wrappers = AttentionWrappers(accelerator, library, workspace, num_processors)
        self._planned: dict[AttentionKind, _PlannedWrapper] = {}
        self._capture: FlashInferGraphCapture | None = None

    @property
    def capture(self) -> FlashInferGraphCapture:
        if self._capture is None:
            self._capture = FlashInferGraphCapture(self._accelerator, self._wrappers, self._kernels, self.lane)
        return self._capture

    def planned(self, kind: AttentionKind, plan: _EagerPlan) -> PagedAttention:
        planned = self._planned.get(kind)
        if planned is None:
            planned = _PlannedWrapper(self._wrappers.eager(kind), self._accelerator.event())
            self._planned[kind] = planned
        if planned.plan is not plan:
            planned.copied.synchronize()
            plan_attention(planned.wrapper, kind, plan.host, plan.block_size, plan.device.page_indices)
            planned.plan = plan
            planned.copied.record()
        return planned.wrapper


class FlashInferBackend:
    """Backend of FlashInfer and Triton. Allocates memory when first needed.

    fp8: None: no fp8 products. choices: between kernels that compute the same; None: those of always.
    products: makes FlashInfer's products, for one backend; None: all are torch's. blockscale: see GroupedProducts.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        library: FlashInfer,
        kernels: DeviceKernels,
        fp8: Fp8Products | None = None,
        choices: Choices | None = None,
        products: Callable[[], ProductWays] | None = None,
        blockscale: Callable[[], Any] | None = None,
    ) -> None:
        self.device = accelerator.device
        self.choices = choices or Choices()
        self.name = "flashinfer"
        self.sampling_kernels: SamplingKernels | None = kernels.sampling_kernels(accelerator)
        self.mask_kernel = None
        self.has_fp8 = fp8 is not None
        self.has_low_bit = kernels.low_bit is not None
        self.has_experts = kernels.experts is not None
        self.has_low_bit_experts = self.has_low_bit and self.has_experts
        self._experts: WeakKeyDictionary[Experts, RunExperts] = WeakKeyDictionary()
        self._experts_read: Tensor | None = None  # [1] int64; None: there are no mixtures
        # The last step's numbers, by its counts: the step itself would keep all states.
        self._sent_numbers: tuple[object, Tensor] = (None, torch.empty(0))
        self.prefers_low_bit = kernels.low_bit is not None
        separate = SeparateBlocks(self)
        self.blocks: Blocks = separate if fp8 is None else fp8.blocks(separate)
        if kernels.few_rows is not None and self.choices.can_measure:
            of_codes = None if kernels.low_bit is None else kernels.low_bit.few_rows
            self.blocks = FewRowBlocks(self, self.blocks, kernels.few_rows, self.choices, of_codes)
        self.blocks = AdaptedBlocks(self.blocks, separate)
        self.layers: Layers = SeparateLayers(self, self.blocks)
        if kernels.few_row_attention is not None and self.choices.can_measure:
            self.layers = FewRowLayers(self, self.blocks, kernels.few_row_attention(), self.choices)
        self.adapters: Adapters = TorchAdapters(self.device)
        if kernels.adapters is not None:
            self.adapters = kernels.adapters(accelerator)
        self.mixtures: Mixtures = SeparateMixtures(self)
        if kernels.few_row_experts is not None and self.choices.can_measure:
            self.mixtures = FewRowMixtures(self, self._few_row_ways, self.expert_counter, self.choices)
        self.head_drafting = None
        self.block_drafting = None
        self.encoder_kernels = None
        self._accelerator = accelerator
        self._library = library
        self._kernels = kernels
        self._fp8 = fp8
        self._low_bit: LowBitProducts | None = None
        if kernels.low_bit is not None:
            self._low_bit = LowBitProducts(kernels.low_bit, self._by_torch, self.choices)
        self._low_bit_mixtures = LowBitMixtures(self.choices)
        self._load_products = products
        self._products: Products | None = None
        if products is not None and self.choices.can_measure:
            self._products = Products(ways_in_16_bits(products), self._by_torch, self.choices)
        self._load_blockscale = blockscale
        self._grouped: Products | None = None
        if fp8 is not None and self.choices.can_measure:
            self._grouped = Products(
                GroupedProducts(blockscale).ways, fp8.linear, self.choices, first=_TILED, tolerance=_IN_8_BITS
            )
        self._workspace = AttentionWorkspace(accelerator)
        self._lane_states: dict[DeviceLane | None, _LaneState] = {}
        self._current = self._lane_state(None)

    def _lane_state(self, lane: DeviceLane | None) -> _LaneState:
        if lane not in self._lane_states:
            self._lane_states[lane] = _LaneState(
                self._accelerator, self._library, self._kernels, self._workspace, lane
            )
        return self._lane_states[lane]

    def use(self, processors: Processors | None) -> None:
        """See Backend. Takes lanes of the GPU, not cores.

        Kernels go to the caller's current stream. Attention is planned for the lane's processors, with one
        exception: the decode kernel without tensor cores is always planned for the whole device.
        """
        if isinstance(processors, tuple):
            raise ConfigError(
                f"the flashinfer backend computes on {self.device}; it cannot use cores {processors}"
            )
        self._current = self._lane_state(processors)

    @property
    def lane(self) -> DeviceLane | None:
        return self._current.lane

    def concurrent_instance(self) -> "FlashInferBackend":
        """See Backend. The new instance has wrappers, a workspace and a graph memory pool of its own."""
        return FlashInferBackend(
            self._accelerator,
            self._library,
            self._kernels,
            self._fp8,
            self.choices,
            self._load_products,
            self._load_blockscale,
        )

    @property
    def graph_capture(self) -> FlashInferGraphCapture:
        return self._lane_state(None).capture

    def graph_capture_on(self, lane: DeviceLane) -> FlashInferGraphCapture:
        return self._lane_state(lane).capture

    def device_sampling_kernels(self, max_rows: int, width: int) -> DeviceSamplingKernels:
        return self._kernels.device_sampling_kernels(max_rows, width)

    def wait(self) -> None:
        self._accelerator.wait()

    def pack(
        self, weight: Tensor | Fp8Rows | LowBitRows, bias: Tensor | None = None
    ) -> CudaLinear | Fp8Linear | CudaLowBit:
        """See Backend. Raises ConfigError for a dtype other than bfloat16 and float16, too."""
        if isinstance(weight, LowBitRows):
            if self._low_bit is None:
                raise ConfigError("this flashinfer backend has no kernels for low-bit products")
            return self._low_bit.pack(weight, bias, self.device)
        if isinstance(weight, Fp8Rows):
            return self._pack_fp8(weight, bias)
        if weight.dtype not in DTYPES:
            names = " and ".join(map(str, DTYPES))
            message = f"the flashinfer backend computes in {names}; the weight is {weight.dtype}"
            raise ConfigError(message.replace("torch.", ""))
        return CudaLinear(
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
        self,
        x: Tensor,
        packed: CudaLinear | Fp8Linear | CudaLowBit,
        out: Tensor,
        *,
        residual: Tensor | None = None,
    ) -> Tensor:
        if isinstance(packed, CudaLowBit):
            assert self._low_bit is not None, "this backend did not pack that low-bit weight"
            return self._low_bit.linear(x, packed, out, residual)
        if isinstance(packed, Fp8Linear):
            assert self._fp8 is not None, "this backend did not pack that quantised weight"
            if self._grouped is not None and not packed.by_row:
                return self._grouped.linear(x, packed, out, residual)
            return self._fp8.linear(x, packed, out, residual)
        if self._products is not None:
            return self._products.linear(x, packed, out, residual)
        return self._by_torch(x, packed, out, residual)

    def _by_torch(self, x: Tensor, packed: CudaLinear, out: Tensor, residual: Tensor | None) -> Tensor:
        """out may be the residual."""
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

    def embed(self, token_ids: Tensor, packed: CudaLinear | CudaLowBit, out: Tensor) -> Tensor:
        if isinstance(packed, CudaLowBit):
            assert self._low_bit is not None, "this backend did not pack that low-bit weight"
            return self._low_bit.embed(token_ids.to(self.device, non_blocking=True), packed, out)
        return torch.index_select(packed.weight, 0, token_ids.to(self.device, non_blocking=True), out=out)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, out: Tensor, *, residual: Tensor | None = None
    ) -> Tensor:
        return self._kernels.rms_norm(x, weight, eps, out, residual)

    def gate(self, gate_up: Tensor, out: Tensor, activation: Activation = Activation.SILU) -> Tensor:
        return self._kernels.gate(gate_up, out, activation)

    def row_edges(self, _most: int) -> tuple[int, ...]:
        """See Backend."""
        return ()

    @property
    def experts_read(self) -> int:
        """See Backend. 0 where the model is no mixture."""
        return self.count_experts()()

    def expert_counter(self) -> Tensor:
        """Return the number of experts read, [1] int64 on the device."""
        if self._experts_read is None:
            self._experts_read = torch.zeros(1, dtype=torch.int64, device=self.device)
        return self._experts_read

    def count_experts(self) -> Callable[[], int]:
        """See Backend. Nothing is launched where the model is no mixture."""
        if self._experts_read is None:
            return lambda: 0
        readback = self.graph_capture.readback((self._experts_read,))
        return lambda: int(readback.wait()[0][0])

    def row_slots(self, plan: _EagerPlan | FixedPlan) -> Tensor:
        return plan.device.slots

    def experts(
        self,
        x: Tensor,
        block: Experts,
        hidden: Tensor,
        routed_by: Tensor | None = None,
        *,
        slots: Tensor | None = None,
    ) -> None:
        """See Backend. Raises ConfigError for weights that are not all stored alike."""
        run = self._experts.get(block)
        if run is None:
            run = self._experts[block] = self._experts_of(block)
        logits = torch.empty((len(x), block.num_logits), dtype=torch.float32, device=self.device)
        self.linear(x if routed_by is None else routed_by, block.router, logits)
        shared = None
        if block.shared is not None:
            shared = self._shared_expert(x, block, block.shared), logits[:, -1].contiguous()
            logits = logits[:, :-1].contiguous()
        run(x, logits, hidden, self.expert_counter(), shared, slots)

    def _shared_expert(self, x: Tensor, block: Experts, products: tuple[PackedLinear, PackedLinear]) -> Tensor:
        """Return [R, H] float32 of the expert that every row passes."""
        (both, _), (outputs, _) = (each.shape for each in products)
        inner = self.gate(
            self.linear(x, products[0], x.new_empty((len(x), both))),
            x.new_empty((len(x), both // 2)),
            block.activation,
        )
        return self.linear(inner, products[1], x.new_empty((len(x), outputs), dtype=torch.float32))

    def _experts_of(self, block: Experts) -> RunExperts:
        if self._kernels.experts is None:
            raise ConfigError("this flashinfer backend has no kernels for mixtures of experts")

        matrices = expert_matrices(block.gate_up), expert_matrices(block.down)
        run = self._kernels.experts(block, *matrices)
        if self.choices.can_measure and all(each.low_bit is not None for each in matrices):
            return self._low_bit_mixtures.measured(run, block)
        return run

    def _few_row_ways(self, block: Experts) -> Ways:
        """Return ways to compute a mixture in fewer launches; none where a shared expert has another form."""
        shared = block.shared or ()
        products = [(*each, *shared[at : at + 1]) for at, each in enumerate((block.gate_up, block.down))]
        forms = {tuple(map(_form, pair)) for pair in zip(*products, strict=True)}
        if len(forms) > 1:
            return {}
        assert self._kernels.few_row_experts is not None
        gate_up, down = map(expert_matrices, products)
        return self._kernels.few_row_experts(block, expert_matrices((block.router,)), gate_up, down)

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> None:
        x.mul_(gate.sigmoid())

    def allocate_states(self, shape: StateShape) -> TorchStates:
        """See Backend."""
        nets = [each for each in shape.layers if isinstance(each, DeltaShape)]
        dims = {dim for each in nets for dim in (each.k_head_dim, each.v_head_dim)}
        for dim in dims.difference(_DELTA_HEAD_DIMS):
            raise ConfigError(
                f"heads of delta nets have {dim} channels; the flashinfer backend has kernels for multiples of "
                f"{_DELTA_HEAD_DIMS.step} up to {_DELTA_HEAD_DIMS[-1]}"
            )
        return TorchStates(shape, self.device)

    def mixes(self, shape: MixerShape) -> bool:
        """Return whether it is a delta net, on a device that has kernels for them."""
        return isinstance(shape, DeltaShape) and self._kernels.delta_net is not None

    def mix(self, x: Tensor, rates: Tensor | None, mixer: Mixer, layer: int, step: StateStep, out: Tensor) -> None:
        """See Backend. The numbers of an eager step are sent once, by its first layer."""
        if step.sent is not None:
            numbers = step.sent
        else:
            if self._sent_numbers[0] is not step.counts:
                found = step.numbers
                host = self._accelerator.host_numbers(found.size, torch.int64)
                host.numpy()[:] = found.ravel()
                self._sent_numbers = step.counts, self._accelerator.upload(host).view(found.shape)
            numbers = self._sent_numbers[1]
        assert self._kernels.delta_net is not None, "the loader refuses models with states then"
        assert isinstance(mixer, DeltaNet), mixer
        assert rates is not None, "a delta net has rates"
        self._kernels.delta_net(x, rates, mixer, step.states.layers[layer], numbers, out)

    def allocate_kv(self, shape: KvShape) -> _CudaCache:
        """See Backend. Raises ConfigError for a dtype or a head size without kernels."""
        check_cache_dtype(self.name, shape.dtype, KV_DTYPES)
        for _, head_dim in shape.heads:
            if head_dim not in HEAD_DIMS:
                sizes = ", ".join(map(str, HEAD_DIMS))
                raise ConfigError(f"the flashinfer backend has kernels for heads of {sizes}, not {head_dim}")
        data = torch.zeros(shape.total_bytes, dtype=torch.uint8, device=self.device)
        layers, rest = [], data
        for size, heads in zip(shape.layer_block_bytes, shape.heads, strict=True):
            part, rest = rest[: shape.num_blocks * size], rest[shape.num_blocks * size :]
            keys, values = part.view(shape.dtype).view(2, shape.num_blocks, shape.block_size, *heads).unbind()
            layers.append((keys, values))
        return _CudaCache(data, tuple(layers), shape.block_size)

    def plan(self, layout: RowLayout, block_size: int) -> _EagerPlan:
        """See Backend. One transfer; the first layer of each kind plans its attention."""
        host = paged_layout(layout, block_size, self._accelerator.host_numbers)
        return _EagerPlan(host, host.within(self._accelerator.upload(host.packed)), block_size, self._current)

    def rope_append(
        self,
        qkv: Tensor,
        angles: Tensor | None,
        cache: _CudaCache,
        layer: int,
        shape: AttentionShape,
        plan: _EagerPlan | FixedPlan,
        *,
        query_angles: Tensor | None = None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        v_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        """See Backend. Takes k_norm with q_norm only, and v_norm with both."""
        keys, values = cache.layers[layer]
        rows = plan.device
        return self._kernels.rope_append(
            qkv, angles, rows.positions, rows.slots, keys, values, shape, q_norm, k_norm, eps, query_angles, v_norm
        )

    def attend(
        self,
        q: Tensor,
        cache: _CudaCache,
        layer: int,
        shape: AttentionShape,
        plan: _EagerPlan | FixedPlan,
        out: Tensor,
        *,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See Backend. FlashInfer computes without sinks, which then scale what it mixed."""
        assert plan.block_size == cache.block_size, (plan.block_size, cache.block_size)
        assert out.is_contiguous(), out.stride()
        pages = cache.layers[layer]
        if shape.reads_other:
            shape = replace(shape, reads_other=False)  # its plan is that of the layers with keys of their own
        wrapper = plan.attention(AttentionKind(shape, q.dtype, pages[0].dtype, plan.one_row_each))
        size = (len(q), shape.num_heads, shape.head_dim)
        mixed = out.view(size)
        if sinks is None:
            wrapper.run(q=q.view(size), paged_kv_cache=pages, out=mixed)
            return out
        log2_sums = torch.empty(size[:2], dtype=torch.float32, device=self.device)
        wrapper.run(q=q.view(size), paged_kv_cache=pages, out=mixed, lse=log2_sums, return_lse=True)
        self._kernels.scale_by_sinks(mixed, log2_sums, sinks)
        return out


def _form(product: PackedLinear) -> tuple[object, ...]:
    kinds = (each.kind for each in product.parts) if isinstance(product, CudaLowBit) else ()
    return (type(product), product.shape, *kinds)


def expert_matrices(products: tuple[PackedLinear, ...]) -> ExpertMatrices:
    """Raises ConfigError for weights of which some alone are in 8 bits, or in low-bit codes."""
    quantised = tuple(each.weight for each in products if isinstance(each, Fp8Linear))
    low_bit = tuple(each for each in products if isinstance(each, CudaLowBit))
    for name, some in (("fp8", quantised), ("low-bit codes", low_bit)):
        if len(some) not in (0, len(products)):
            raise ConfigError(
                f"some experts of a layer are in {name} and others are not; "
                "--quantization none dequantises them all"
            )
    biases = tuple(each.bias for each in products if each.bias is not None)
    assert len(biases) in (0, len(products)), "some experts have biases and others have none"
    weights: tuple[Tensor, ...] = tuple(each.values for each in quantised)
    if not quantised and not low_bit:
        weights = tuple(each.weight for each in products)
    return ExpertMatrices(
        weights=weights, biases=biases or None, quantised=quantised or None, low_bit=low_bit or None
    )
