"""The seam between models and arithmetic: what every backend promises.

A backend chooses the layout of packed weights and of the KV cache; its callers must not assume either. All tensors
live on the backend's device. Activations are [R, ...], where R counts the rows of one step; `out` arguments are
written in place and returned. Rows are independent: a backend gives a row the same bits whatever other rows are in
the step. Backends on torch's matrix products cannot promise that; their docstrings say so.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from faser.kernels.interface.block_drafting import BlockDrafting
from faser.kernels.interface.blocks import (
    BlockBuffers,
    Blocks,
    DecoderLayer,
    DecoderStack,
    Experts,
    ExpertsBeside,
    FeedForward,
    HeadDrafting,
    LayerBuffers,
    Layers,
    MixedFeedForward,
    Mixtures,
    NormedLinear,
    TokenInputs,
    columns_of,
)
from faser.kernels.interface.collectives import Collectives
from faser.kernels.interface.delta_net import DeltaNet, DeltaShape, States, StateShape, StateStep
from faser.kernels.interface.fp8 import Fp8Rows
from faser.kernels.interface.graph_capture import GraphCapture
from faser.kernels.interface.kv_cache import KvShape
from faser.kernels.interface.low_bit.rows import LowBitRows
from faser.kernels.interface.sampling import DeviceSamplingKernels, MaskKernel, SamplingKernels
from faser.kernels.interface.shapes import (
    AttentionPlan,
    AttentionShape,
    DeviceLane,
    KvCache,
    PackedLinear,
    Processors,
    RowLayout,
)
from faser.kernels.interface.short_conv import ConvShape, ShortConv
from faser.types.activation import Activation


class Backend(Protocol):
    """Arithmetic of one device. An instance serves one thread at a time; several runners may share it in turn."""

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def sampling_kernels(self) -> SamplingKernels | None:
        """Kernels that sample tokens from logits; None: the engine uses tensor operations."""
        ...

    @property
    def mask_kernel(self) -> MaskKernel | None:
        """Masks logits on the host; None: the engine uses tensor operations."""
        ...

    def use(self, processors: Processors | None) -> None:
        """Run on these processors from the next call on; None: on all of them.

        The calling thread must be in place already: the overlap partition moves it there and back. On a CPU the
        backend runs one thread on each core; the caller counts as the first thread, and runs on the first core or
        anywhere among the cores. On a GPU the caller's current stream is the lane's stream.

        Raises ConfigError for processors that this backend cannot use.
        """
        ...

    @property
    def lane(self) -> DeviceLane | None:
        """The part of a GPU in use; None: all of it, or no GPU."""
        ...

    def concurrent_instance(self) -> "Backend":
        """A second instance on this device, for a runner that may run concurrently with those of this one.

        While both run, each uses processors of its own. Either instance accepts the handles of the other.
        """
        ...

    @property
    def has_fp8(self) -> bool:
        """Return whether pack takes weights in 8-bit floats."""
        ...

    @property
    def has_low_bit(self) -> bool:
        """Return whether pack takes low-bit weights."""
        ...

    @property
    def has_experts(self) -> bool:
        """Return whether mixtures of experts are supported."""
        ...

    @property
    def has_states(self) -> bool:
        """Return whether delta nets are supported."""
        ...

    @property
    def has_short_convs(self) -> bool:
        """Return whether short convolutions are supported, and mixtures that weigh experts by sigmoids."""
        ...

    @property
    def experts_read(self) -> int:
        """Count the experts' weights read so far; those of each layer and each call count by themselves.

        Shared ones do not count: every call reads them. Waits for the device; count_experts does not.
        """
        ...

    def count_experts(self) -> Callable[[], int]:
        """Return a call that gives experts_read as of now, and waits until all work launched so far is done."""
        ...

    def row_edges(self, most: int) -> tuple[int, ...]:
        """Row counts below `most` that fill the tiles of its products: one row more begins another tile.

        Or goes to another kernel. Of the packed weights, and in ascending order; empty: nothing is known of tiles.
        """
        ...

    @property
    def prefers_low_bit(self) -> bool:
        """Return whether low-bit weights are multiplied faster as they are than dequantised."""
        ...

    @property
    def graph_capture(self) -> GraphCapture | None:
        """Captures CUDA graphs of this instance's work on the whole device; None: the device has no graphs."""
        ...

    def graph_capture_on(self, lane: DeviceLane) -> GraphCapture | None:
        """Captures CUDA graphs of this instance's work on one lane; the same object for the same lane.

        Its graphs are replayed while that lane is in use. It shares plans, workspace and memory pool with no other
        lane and no other instance: two lanes may replay their graphs at the same time.
        """
        ...

    def device_sampling_kernels(self, max_rows: int, width: int) -> DeviceSamplingKernels | None:
        """New kernels that sample up to max_rows rows of `width` logits on the device; None: it has none."""
        ...

    @property
    def blocks(self) -> Blocks:
        """Units of layers, in the fewest launches that this backend has for them."""
        ...

    @property
    def mixtures(self) -> Mixtures:
        """Mixtures of experts, in the fewest launches."""
        ...

    @property
    def layers(self) -> Layers:
        """Whole layers, in the fewest calls."""
        ...

    @property
    def head_drafting(self) -> HeadDrafting | None:
        """Drafts of EAGLE-3 heads in one call; None: nothing is better than a pass after another."""
        ...

    @property
    def block_drafting(self) -> BlockDrafting | None:
        """Drafts of block drafters in one call; None: nothing is better than single operations."""
        ...

    def wait(self) -> None:
        """Return when the device has finished all its work. For profiles and tests: no step needs it."""
        ...

    def pack(self, weight: Tensor | Fp8Rows | LowBitRows, bias: Tensor | None = None) -> PackedLinear:
        """Prepare a product with weight [N, K] (and bias [N]) for `linear` and `embed`.

        Copies: the argument may be freed. The product's input has the dtype of the weight. A quantised weight
        takes any input of the backend's types and quantises it (interface/fp8.py, interface/low_bit/product.py);
        one in 8-bit floats is for `linear` only.

        Raises ConfigError for a quantised weight where has_fp8 or has_low_bit is False, or whose sizes have no
        kernel.
        """
        ...

    def linear(self, x: Tensor, packed: PackedLinear, out: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """out[r] = weight @ x[r] + bias (+ residual[r]), accumulated in float32.

        With a quantised weight x[r] is quantised too.

        x: [R, K], rows contiguous. out: [R, N], dtype of x or float32 (logits). residual: [R, N] in out's
        dtype; may be `out` itself. x and out do not overlap.
        """
        ...

    def embed(self, token_ids: Tensor, packed: PackedLinear, out: Tensor) -> Tensor:
        """out[r] = weight[token_ids[r]]. token_ids: [R] int64.

        out: [R, K] in the weight's dtype; of a low-bit weight in any. Raises IndexError on a CPU for an id that
        the weight has no row for.
        """
        ...

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, out: Tensor, *, residual: Tensor | None = None
    ) -> Tensor:
        """out[r] = x[r] / sqrt(mean(x[r]²) + eps) * weight (+ residual[r]), inner arithmetic in float32.

        x, out: [R, D], rows at any distance; out may be x. weight: [D] float32. residual: [R, D] in the type of
        both, as far apart as out; may be out.
        """
        ...

    def allocate_kv(self, shape: KvShape) -> KvCache:
        """A zeroed cache of shape.total_bytes bytes. Block 0 is an ordinary block.

        Raises ConfigError for a dtype or sizes without kernels.
        """
        ...

    def plan(self, layout: RowLayout, block_size: int) -> AttentionPlan:
        """Digest a layout once per step; every layer of the step uses the result. Copies what it keeps."""
        ...

    def row_slots(self, plan: AttentionPlan) -> Tensor | None:
        """Return where the cache stores each row, [R] int64 on the device: below 0 for padding.

        None: no row of any plan is padding.
        """
        ...

    def rope_append(
        self,
        qkv: Tensor,
        angles: Tensor | None,
        cache: KvCache,
        layer: int,
        shape: AttentionShape,
        plan: AttentionPlan,
        *,
        query_angles: Tensor | None = None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        v_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        """Normalise and rotate queries and keys; store keys and values in the cache, rounded to its dtype.

        qkv: [R, (Hq + 2 Hkv) * D], queries, then keys, then values; overwritten. Of a shape that reads another
        layer's keys: queries alone, and nothing is stored. angles: [P, D] float32, cosines of the D/2 pairs then
        their sines, indexed by position; channel i is paired with i + D/2. None rotates nothing. query_angles:
        those of queries, where they differ. q_norm, k_norm, v_norm: [D] float32, RMS-norm weights applied to each
        head before rotating; None: no norm.
        Returns queries [R, Hq * D], a view of qkv.
        """
        ...

    def attend(
        self,
        q: Tensor,
        cache: KvCache,
        layer: int,
        shape: AttentionShape,
        plan: AttentionPlan,
        out: Tensor,
        *,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of every row over its sequence's cached positions. q: view of qkv; out: [R, Hq * D].

        sinks: [Hq] float32, one more score of each head, whose weight counts in the sum and has no value.
        """
        ...

    def gate(self, gate_up: Tensor, out: Tensor, activation: Activation = Activation.SILU) -> Tensor:
        """out = activation(gate) * up, with gate_up [R, 2 F] = gate then up; out: [R, F]."""
        ...

    def experts(
        self,
        x: Tensor,
        block: Experts,
        hidden: Tensor,
        routed_by: Tensor | None = None,
        /,
        *,
        slots: Tensor | None = None,
    ) -> None:
        """hidden[r] += the sum of w * down(gate(gate_up(x[r]))) over the chosen experts of row r.

        Weights w are the router's softmax, in float32, over all experts, or over the chosen ones alone where they
        are renormalised, times the scales; or sigmoids, see Experts. routed_by: [R, H], what the router sees;
        None: x. Of equal logits the lower expert is chosen. The sum is in float32, in the order of the weights,
        the shared expert last, and is rounded once. x, hidden: [R, H]. slots: see row_slots; padding reads no
        experts, and what hidden becomes there is arbitrary. Raises ConfigError where has_experts is False.
        """
        ...

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> None:
        """x *= σ(gate). x, gate: [R, N], rows of the gate at any distance."""
        ...

    def allocate_states(self, shape: StateShape) -> States:
        """States of about shape.total_bytes bytes. Raises ConfigError for sizes without kernels."""
        ...

    def delta_net(
        self,
        qkv: Tensor,
        rates: Tensor,
        shape: DeltaShape,
        net: DeltaNet,
        layer: int,
        step: StateStep,
        out: Tensor,
    ) -> None:
        """out = norm(o) silu(z) of every row, by interface/delta_net.py; the step's rows are kept.

        qkv: [R, shape.columns]. rates: [R, 2 Hv] float32, b then a. layer: number in the states. out: [R, Hv Dv].
        A chunk that the step's rows complete, but for those that may be refused, enters the state.
        """
        ...

    def short_conv(
        self, bcx: Tensor, shape: ConvShape, net: ShortConv, layer: int, step: StateStep, out: Tensor
    ) -> None:
        """Write the short convolution of every row to out, by interface/short_conv.py; the step's rows are kept.

        bcx: [R, shape.columns]. layer: number in the states. out: [R, H]. Raises ConfigError where has_short_convs
        is False.
        """
        ...


class SeparateBlocks:
    """Blocks made of a backend's operations, one after the other.

    ranks: the products hold one rank's part of a layer, so what they add to the residual stream is a part of a sum
    over all ranks; None: they are whole.
    """

    def __init__(self, backend: Backend, ranks: Collectives | None = None) -> None:
        self._backend = backend
        self._ranks = ranks

    def normed_linear(self, hidden: Tensor, product: NormedLinear, out: Tensor, buffers: BlockBuffers) -> Tensor:
        normed = self._backend.rms_norm(hidden, product.norm, product.eps, buffers.normed)
        found: Tensor = self._backend.linear(normed, product.linear, out)
        return found

    def feed_forward(
        self,
        mixed: Tensor,
        hidden: Tensor,
        block: FeedForward | MixedFeedForward,
        following: NormedLinear | None,
        out: Tensor,
        buffers: BlockBuffers,
    ) -> None:
        if isinstance(block, MixedFeedForward):
            self._add(mixed, block.attention_out, block.eps, None, hidden, buffers)
            part = hidden if self._ranks is None else torch.zeros_like(hidden)
            self._backend.mixtures.add(hidden, block.norm, block.eps, block.experts, part, buffers)
            if self._ranks is not None:
                hidden.add_(self._ranks.all_reduce(part))
        else:
            self._feed_forward(mixed, hidden, block, buffers)
        if following is not None:
            self.normed_linear(hidden, following, out, buffers)

    def _feed_forward(self, mixed: Tensor, hidden: Tensor, block: FeedForward, buffers: BlockBuffers) -> None:
        eps = block.gate_up.eps if block.after_eps is None else block.after_eps
        inner = columns_of(buffers.inner, block.size or buffers.inner.shape[1])
        self._add(mixed, block.attention_out, eps, block.norm_after_attention, hidden, buffers)
        self._normed_gate(hidden, block.gate_up, block.activation, inner, buffers)
        if block.beside is None:
            self._add(inner, block.down, eps, block.norm_after, hidden, buffers)
        else:
            self._add_with_experts(inner, hidden, block, block.beside, buffers)
        if block.token_inputs is not None:
            self._add_token_inputs(hidden, block, block.token_inputs, buffers)
        if block.scale != 1.0:
            hidden.mul_(block.scale)

    def _normed_gate(
        self, hidden: Tensor, product: NormedLinear, activation: Activation, inner: Tensor, buffers: BlockBuffers
    ) -> None:
        """inner = activation(gate) * up, of the product of the normalised rows."""
        gate_up = columns_of(buffers.gate_up, 2 * inner.shape[1])
        self._backend.gate(self.normed_linear(hidden, product, gate_up, buffers), inner, activation)

    def _add_with_experts(
        self, inner: Tensor, hidden: Tensor, block: FeedForward, beside: ExpertsBeside, buffers: BlockBuffers
    ) -> None:
        """hidden += norm(norm(down(inner)) + norm(experts))."""
        backend, eps, after = self._backend, block.gate_up.eps, block.norm_after
        assert after is not None, "the sum of a network and experts is normalised"
        both = backend.linear(inner, block.down, torch.empty_like(hidden))
        backend.rms_norm(both, beside.norm_after_network, eps, both)
        given = torch.zeros_like(hidden)
        backend.mixtures.add(
            hidden, beside.norm, eps, beside.experts, given, buffers, router_norm=beside.router_norm
        )
        backend.rms_norm(given, beside.norm_after, eps, both, residual=both)
        backend.rms_norm(both, after, eps, hidden, residual=hidden)

    def _add_token_inputs(
        self, hidden: Tensor, block: FeedForward, given: TokenInputs, buffers: BlockBuffers
    ) -> None:
        room = given.room[: hidden.shape[0]]
        size = room.shape[1] // 2
        self._backend.linear(hidden, given.gate, room[:, :size])
        inner = self._backend.gate(room, room[:, :size], block.activation)
        self._add(inner, given.out, block.gate_up.eps, given.norm, hidden, buffers)

    def _add(
        self,
        x: Tensor,
        product: PackedLinear,
        eps: float,
        norm: Tensor | None,
        hidden: Tensor,
        buffers: BlockBuffers,
    ) -> None:
        """hidden += norm(product(x)); norm: None: none."""
        if norm is None and self._ranks is None:
            self._backend.linear(x, product, hidden, residual=hidden)
            return
        added = self._backend.linear(x, product, buffers.normed)
        if self._ranks is not None:
            self._ranks.all_reduce(added)
        if norm is None:
            hidden.add_(added)
        else:
            self._backend.rms_norm(added, norm, eps, hidden, residual=hidden)


class SeparateMixtures:
    """Mixtures made of a backend's operations, one after the other."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def add(
        self,
        hidden: Tensor,
        norm: Tensor,
        eps: float,
        block: Experts,
        into: Tensor,
        buffers: BlockBuffers,
        *,
        router_norm: Tensor | None = None,
    ) -> None:
        backend, routed_by = self._backend, None
        if router_norm is not None:
            routed_by = backend.rms_norm(hidden, router_norm, eps, torch.empty_like(hidden))
        normed = backend.rms_norm(hidden, norm, eps, buffers.normed)
        backend.experts(normed, block, into, routed_by, slots=buffers.slots)


class SeparateLayers:
    """Layers made of a backend's attention and units, one after the other."""

    def __init__(self, backend: Backend, blocks: Blocks) -> None:
        self._backend = backend
        self._blocks = blocks

    def separate(self, stack: DecoderStack) -> Collection[int]:
        """Return none: the backend has no call for whole layers, or those of ranks are in parts."""
        del stack
        return ()

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
        blocks, layers = self._blocks, stack.layers
        scratch = replace(buffers.block, slots=self._backend.row_slots(plan))
        if first < last and (product := layers[first].qkv) is not None:
            blocks.normed_linear(hidden, product, columns_of(buffers.qkv, layers[first].shape.columns), scratch)
        for number in range(first, last):
            layer = layers[number]
            mixed = columns_of(buffers.mixed, layer.shape.q_size)
            if captures and layer.states is not None:
                layer.states[: len(hidden)].copy_(hidden)
            qkv = columns_of(buffers.qkv, layer.shape.columns)
            if isinstance(layer.shape, DeltaShape):
                self._delta_net(layer, layer.shape, number, hidden, qkv, mixed, buffers, state_step)
            elif isinstance(layer.shape, ConvShape):
                assert layer.short_conv is not None, "a short convolution has weights"
                assert state_step is not None, "a model with short convolutions has states"
                self._backend.short_conv(qkv, layer.shape, layer.short_conv, number, state_step, mixed)
            else:
                self._attend(layer, layer.shape, number, qkv, cache, plan, mixed)
            following, out = None, buffers.qkv
            if number + 1 < last:
                following, out = layers[number + 1].qkv, columns_of(out, layers[number + 1].shape.columns)
            blocks.feed_forward(mixed, hidden, layer.feed_forward, following, out, scratch)

    def _attend(
        self,
        layer: DecoderLayer,
        shape: AttentionShape,
        number: int,
        qkv: Tensor,
        cache: KvCache,
        plan: AttentionPlan,
        mixed: Tensor,
    ) -> None:
        backend, keys_from = self._backend, shape.q_size
        qkv, gates = qkv[:, : shape.qkv_size], qkv[:, shape.qkv_size :]
        if layer.wide_norms is not None:
            q_norm, k_norm = layer.wide_norms
            for part, norm in ((qkv[:, :keys_from], q_norm), (qkv[:, keys_from:][:, : len(k_norm)], k_norm)):
                backend.rms_norm(part, norm, layer.eps, part)
        self._append_and_attend(layer, shape, number, qkv, cache, plan, mixed)
        if shape.gated:
            backend.sigmoid_gate(mixed, gates)

    def _append_and_attend(
        self,
        layer: DecoderLayer,
        shape: AttentionShape,
        number: int,
        qkv: Tensor,
        cache: KvCache,
        plan: AttentionPlan,
        mixed: Tensor,
    ) -> None:
        backend = self._backend
        queries = backend.rope_append(
            qkv,
            layer.angles,
            cache,
            number,
            shape,
            plan,
            query_angles=layer.query_angles,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            v_norm=layer.v_norm,
            eps=layer.eps,
        )
        source = number if layer.kv_layer is None else layer.kv_layer
        read = cache if layer.lent is None else layer.lent
        backend.attend(queries, read, source, shape, plan, mixed, sinks=layer.sinks)

    def _delta_net(
        self,
        layer: DecoderLayer,
        shape: DeltaShape,
        number: int,
        hidden: Tensor,
        qkv: Tensor,
        mixed: Tensor,
        buffers: LayerBuffers,
        state_step: StateStep | None,
    ) -> None:
        assert layer.rates is not None, "a delta net has rates"
        assert layer.delta_net is not None, "a delta net has weights"
        assert buffers.rates is not None, "a model with delta nets has room for rates"
        assert state_step is not None, "a model with delta nets has states"
        rates = columns_of(buffers.rates, 2 * shape.num_v_heads)
        self._blocks.normed_linear(hidden, layer.rates, rates, buffers.block)
        self._backend.delta_net(qkv, rates, shape, layer.delta_net, number, state_step, mixed)
