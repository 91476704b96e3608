"""Layers and their units on the native backend: one call of the C++ kernels each.

The same kernels as the backend's single operations, hence the same bits; native/blocks.cpp strings them together.
"""

import ctypes
import logging
from itertools import pairwise
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from faser.kernels.cpu.delta_net import StepStructs, delta_net_struct, short_conv_struct
from faser.kernels.cpu.library import (
    ACTIVATIONS,
    BFLOAT16,
    FLOAT32,
    AnyLinearStruct,
    BlockRowsStruct,
    ExpertsBesideStruct,
    ExpertsStruct,
    FeedForwardStruct,
    HeadsStruct,
    LanePools,
    LayerStruct,
    NormedLinearStruct,
    StatesOfStepStruct,
    TokenInputsStruct,
)
from faser.kernels.cpu.low_bit import LowBitLinear
from faser.kernels.interface.adapters import AdaptedLinear, base_of
from faser.kernels.interface.blocks import (
    BlockBuffers,
    Blocks,
    DecoderLayer,
    DecoderStack,
    Experts,
    ExpertsBeside,
    FeedForward,
    LayerBuffers,
    Layers,
    MixedFeedForward,
    NormedLinear,
    TokenInputs,
)
from faser.kernels.interface.delta_net import DeltaNet
from faser.kernels.interface.mixers import StateStep
from faser.kernels.interface.shapes import AttentionPlan, AttentionShape, KvCache, PackedLinear
from faser.kernels.interface.short_conv import ShortConv

_Structs = ctypes.Structure | ctypes.Array[LayerStruct]
_log = logging.getLogger("faser")
DTYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}  # of activations, as the kernels number them


class NativeBlocks:
    """Native blocks and layers. pools: of the backend; the one in use computes.

    separate, separate_layers: for layers whose inputs have to be reordered, or whose experts differ in kind.
    """

    def __init__(self, library: ctypes.CDLL, pools: LanePools, separate: Blocks, separate_layers: Layers) -> None:
        self._pools = pools
        self._separate = separate
        self._separate_layers = separate_layers
        self._normed_linear_call = library.faser_normed_linear
        self._feed_forward_call = library.faser_feed_forward
        self._layers_call = library.faser_layers
        self._separate_of: WeakKeyDictionary[DecoderStack, frozenset[int]] = WeakKeyDictionary()
        self._structs: WeakKeyDictionary[object, _Structs] = WeakKeyDictionary()  # by what they describe
        self._buffers: BlockBuffers | None = None  # those that _rows describes
        self._rows = BlockRowsStruct()
        self._state_steps = StepStructs()
        self._states = StatesOfStepStruct()

    def normed_linear(self, hidden: Tensor, product: NormedLinear, out: Tensor, buffers: BlockBuffers) -> Tensor:
        if reorders(product.linear):
            return self._separate.normed_linear(hidden, product, out, buffers)
        assert hidden.stride(1) == 1
        assert out.is_contiguous()
        self._normed_linear_call(
            self._pools.address,
            self._normed(product),
            self._rows_of(hidden, buffers),
            hidden.data_ptr(),
            hidden.stride(0),
            out.data_ptr(),
            DTYPES[out.dtype],
        )
        return out

    def feed_forward(
        self,
        mixed: Tensor,
        hidden: Tensor,
        block: FeedForward | MixedFeedForward,
        following: NormedLinear | None,
        out: Tensor,
        buffers: BlockBuffers,
    ) -> None:
        if _why_separate_block(block) or (following is not None and reorders(following.linear)):
            self._separate.feed_forward(mixed, hidden, block, following, out, buffers)
            return
        assert mixed.is_contiguous()
        assert hidden.is_contiguous()
        assert out.is_contiguous()
        self._feed_forward_call(
            self._pools.address,
            self._layer(block),
            None if following is None else self._normed(following),
            self._rows_of(hidden, buffers),
            mixed.data_ptr(),
            hidden.data_ptr(),
            out.data_ptr(),
        )

    def run(
        self,
        stack: DecoderStack,
        first: int,
        last: int,
        hidden: Tensor,
        cache: KvCache,
        plan: AttentionPlan,
        buffers: LayerBuffers,
        *,
        captures: bool = False,
        state_step: StateStep | None = None,
    ) -> None:
        address, separate = self._address(stack), self.separate(stack)
        for begin, end in _runs(separate, first, last) if separate else ((first, last),):
            if begin in separate:
                self._separate_layers.run(
                    stack, begin, end, hidden, cache, plan, buffers, captures=captures, state_step=state_step
                )
            else:
                self._run(stack, address, begin, end, hidden, cache, plan, buffers, captures, state_step)

    def _run(
        self,
        stack: DecoderStack,
        address: int,
        first: int,
        last: int,
        hidden: Tensor,
        cache: KvCache,
        plan: AttentionPlan,
        buffers: LayerBuffers,
        captures: bool,
        state_step: StateStep | None,
    ) -> None:
        """Run layers of which none is separate. address: of the stack's FaserLayers."""
        layers = stack.layers
        following = layers[last].qkv if last < len(layers) else stack.head
        for each in (hidden, buffers.qkv, buffers.mixed):
            assert each.is_contiguous()
            assert each.shape[0] == plan.num_rows, (each.shape, plan.num_rows)
            assert each.dtype is hidden.dtype, (each.dtype, hidden.dtype)
        assert cache.shape.dtype in (hidden.dtype, torch.int8), (hidden.dtype, cache.shape.dtype)
        assert state_step is not None or buffers.rates is None, "a model with delta nets has states"
        self._layers_call(
            self._pools.address,
            address,
            first,
            last,
            None if following is None else self._normed(following),
            self._rows_of(hidden, buffers.block),
            cache.address,
            plan.address,
            hidden.data_ptr(),
            buffers.qkv.data_ptr(),
            buffers.mixed.data_ptr(),
            captures,
            None if state_step is None else self._states_of(state_step, buffers),
        )

    def _states_of(self, step: StateStep, buffers: LayerBuffers) -> int:
        """Address of the FaserStatesOfStep."""
        self._states = StatesOfStepStruct(
            step.states.address, self._state_steps.address(step), _address(buffers.rates)
        )
        return ctypes.addressof(self._states)

    def _rows_of(self, hidden: Tensor, buffers: BlockBuffers) -> int:
        """Address of the FaserBlockRows; a step's calls all bring the same buffers."""
        rows = hidden.shape[0]  # len() of a tensor takes four times as long
        if buffers is not self._buffers or rows != self._rows.rows:
            for each in (buffers.normed, buffers.gate_up, buffers.inner):
                assert each.is_contiguous()
                assert each.shape[0] == rows, (each.shape, rows)
                assert each.dtype is hidden.dtype, (each.dtype, hidden.dtype)
            self._buffers = buffers
            self._rows = BlockRowsStruct(
                rows,
                DTYPES[hidden.dtype],
                buffers.normed.data_ptr(),
                buffers.gate_up.data_ptr(),
                buffers.inner.data_ptr(),
                None if buffers.adapted is None else buffers.adapted.address,
            )
        return ctypes.addressof(self._rows)

    def _normed(self, product: NormedLinear) -> int:
        """Address of the FaserNormedLinear."""
        struct = self._structs.get(product)
        if struct is None:
            struct = self._structs[product] = normed_linear(product)
        return ctypes.addressof(struct)

    def _layer(self, block: FeedForward | MixedFeedForward) -> int:
        """Address of the FaserFeedForward."""
        struct = self._structs.get(block)
        if struct is None:
            struct = self._structs[block] = _feed_forward(block)
        return ctypes.addressof(struct)

    def stack_address(self, stack: DecoderStack) -> int | None:
        """Address of the FaserLayers; None where a layer needs single operations."""
        return None if self.separate(stack) else self._address(stack)

    def separate(self, stack: DecoderStack) -> frozenset[int]:
        found = self._separate_of.get(stack)
        if found is None:
            whys = {number: why for number, layer in enumerate(stack.layers) if (why := _why_separate(layer))}
            if whys:
                _log.warning(
                    "%d of %d layers run in single operations, which is slower than the native kernels: %s",
                    len(whys),
                    len(stack.layers),
                    "; ".join(sorted(set(whys.values()))),
                )
            found = self._separate_of[stack] = frozenset(whys)
        return found

    def _address(self, stack: DecoderStack) -> int:
        """Address of the FaserLayers; those of separate layers are empty."""
        structs = self._structs.get(stack)
        if structs is None:
            separate = self.separate(stack)
            structs = self._structs[stack] = (LayerStruct * len(stack.layers))(
                *(
                    LayerStruct() if number in separate else _decoder_layer(number, layer)
                    for number, layer in enumerate(stack.layers)
                )
            )
        return ctypes.addressof(structs)


def _runs(separate: frozenset[int], first: int, last: int) -> list[tuple[int, int]]:
    """Divide layers first … last - 1 into runs that are separate throughout, or not at all."""
    edges = [each for each in range(first + 1, last) if (each in separate) != (each - 1 in separate)]
    return list(pairwise((first, *edges, last))) if first < last else []


def heads_struct(shape: AttentionShape, sinks: Tensor | None = None) -> HeadsStruct:
    assert shape.scale > 0, shape.scale
    return HeadsStruct(shape.num_heads, shape.scale, shape.window or 0, shape.score_cap or 0.0, _address(sinks))


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _why_separate(layer: DecoderLayer) -> str | None:
    """Say why no call takes the layer as a whole; None: one does."""
    if layer.mixer is not None and not isinstance(layer.mixer, DeltaNet | ShortConv):
        return f"there are no kernels for {layer.mixer.shape.kind}"
    products = (layer.qkv, layer.rates)
    if any(each is not None and reorders(each.linear) for each in products):
        return _REORDERED
    return _why_separate_block(layer.feed_forward)


_REORDERED = "products take their inputs in another order (act-order)"


def _why_separate_block(block: FeedForward | MixedFeedForward) -> str | None:
    """Say why no call takes the block as a whole; None: one does."""
    inputs = None
    if isinstance(block, MixedFeedForward):
        experts: Experts | None = block.experts
    else:
        experts, inputs = None if block.beside is None else block.beside.experts, block.token_inputs
    if experts is not None and not is_grouped(experts):
        return "experts have weights of several kinds"
    more = () if inputs is None else (inputs.gate, inputs.out)
    return _REORDERED if any(map(reorders, (*block.products, *more))) else None


def is_grouped(block: Experts) -> bool:
    """Return whether one call multiplies with all experts: weights of one kind, none reorders its inputs.

    A shared one may be of another kind.
    """
    return not any(map(reorders, block.shared or ())) and all(
        len({isinstance(each, LowBitLinear) for each in products}) == 1 and not any(map(reorders, products))
        for products in (block.gate_up, block.down)
    )


def reorders(packed: PackedLinear | None) -> bool:
    base = base_of(packed)
    return isinstance(base, LowBitLinear) and base.order is not None


def _decoder_layer(number: int, layer: DecoderLayer) -> LayerStruct:
    norms = (layer.q_norm, layer.k_norm, layer.v_norm, *(layer.wide_norms or (None, None)))
    addresses = map(_address, (layer.angles, layer.query_angles, *norms))
    states, shape = layer.states, layer.shape
    net = ctypes.addressof(delta_net_struct(layer.mixer)) if isinstance(layer.mixer, DeltaNet) else None
    conv = ctypes.addressof(short_conv_struct(layer.mixer)) if isinstance(layer.mixer, ShortConv) else None
    width = base_of(layer.feed_forward.attention_out).columns
    given = NormedLinearStruct(AnyLinearStruct(None, None, shape.columns, width), None, 0.0)
    assert states is None or states.stride(1) == 1, states.stride()
    return LayerStruct(
        given if layer.qkv is None else normed_linear(layer.qkv),
        _feed_forward(layer.feed_forward),
        heads_struct(shape, layer.sinks) if isinstance(shape, AttentionShape) else HeadsStruct(),
        *addresses,
        layer.eps,
        None if states is None else states.data_ptr(),
        0 if states is None else states.stride(0),
        isinstance(shape, AttentionShape) and shape.gated,
        NormedLinearStruct() if layer.rates is None else normed_linear(layer.rates),
        net,
        conv,
        number if layer.kv_layer is None else layer.kv_layer,
        None if layer.lent is None else layer.lent.address,
    )


_EXPERTS: WeakKeyDictionary[Experts, ExpertsStruct] = WeakKeyDictionary()  # as long as the weights live


def experts_struct(block: Experts) -> ExpertsStruct:
    """Points to arrays that it keeps, and lives as long as the block."""
    if block in _EXPERTS:
        return _EXPERTS[block]
    count = len(block.gate_up)
    gate_up, down = ((AnyLinearStruct * count)(*map(any_linear, each)) for each in (block.gate_up, block.down))
    shared = None if block.shared is None else (AnyLinearStruct * 2)(*map(any_linear, block.shared))
    struct = ExpertsStruct(
        any_linear(block.router),
        ctypes.addressof(gate_up),
        ctypes.addressof(down),
        count,
        block.top_k,
        block.renormalise,
        ACTIVATIONS[block.activation],
        _address(block.scales),
        None if shared is None else ctypes.addressof(shared),
        block.sigmoid,
        _address(block.choice_bias),
    )
    struct.kept = (gate_up, down, shared)
    _EXPERTS[block] = struct
    return struct


_PARTS: WeakKeyDictionary[FeedForward, tuple[ctypes.Structure | None, ...]] = WeakKeyDictionary()


def _feed_forward(block: FeedForward | MixedFeedForward) -> FeedForwardStruct:
    if isinstance(block, MixedFeedForward):
        out, experts = any_linear(block.attention_out), experts_struct(block.experts)
        before = NormedLinearStruct(AnyLinearStruct(None, None, 0, out.columns), _address(block.norm), block.eps)
        network = (before, AnyLinearStruct(None, None, out.columns, 0), 0, None, None, 0.0)
        return FeedForwardStruct(out, *network, ctypes.addressof(experts), None, None, 1.0)
    beside = None if block.beside is None else _beside(block.beside)
    inputs = None if block.token_inputs is None else _token_inputs(block.token_inputs)
    _PARTS[block] = (beside, inputs)
    return FeedForwardStruct(
        any_linear(block.attention_out),
        normed_linear(block.gate_up),
        any_linear(block.down),
        ACTIVATIONS[block.activation],
        _address(block.norm_after_attention),
        _address(block.norm_after),
        block.gate_up.eps if block.after_eps is None else block.after_eps,
        None,
        None if beside is None else ctypes.addressof(beside),
        None if inputs is None else ctypes.addressof(inputs),
        block.scale,
    )


def _beside(beside: ExpertsBeside) -> ExpertsBesideStruct:
    norms = (beside.norm, beside.router_norm, beside.norm_after, beside.norm_after_network)
    return ExpertsBesideStruct(ctypes.addressof(experts_struct(beside.experts)), *map(_address, norms))


def _token_inputs(given: TokenInputs) -> TokenInputsStruct:
    assert given.room.stride(1) == 1, given.room.stride()
    assert given.room.shape[1] == 2 * given.gate.columns, (given.room.shape, given.gate.columns)
    return TokenInputsStruct(
        any_linear(given.gate),
        any_linear(given.out),
        given.norm.data_ptr(),
        given.room.data_ptr(),
        given.room.stride(0),
    )


def any_linear(packed: PackedLinear) -> AnyLinearStruct:
    base = base_of(packed)
    adapters = packed.room.address if isinstance(packed, AdaptedLinear) else None
    is_low_bit = isinstance(base, LowBitLinear)
    addresses = (None, base.address) if is_low_bit else (base.address, None)
    return AnyLinearStruct(*addresses, base.columns, base.depth, adapters)


def normed_linear(product: NormedLinear) -> NormedLinearStruct:
    norm, depth = product.norm, base_of(product.linear).depth
    assert norm.shape == (depth,), (norm.shape, depth)
    assert norm.dtype is torch.float32, norm.dtype
    return NormedLinearStruct(any_linear(product.linear), norm.data_ptr(), product.eps)
