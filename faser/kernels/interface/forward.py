"""The forward pass of a decoder, in a backend's single operations: what the layers compute, top to bottom.

    x = x + attention(norm(x))        attention, or what a layer has in its place: a delta net, a short convolution
    x = x + feed_forward(norm(x))     a gated network, a mixture of experts, or both

It is the path of the torch backend, of ranks, and of the layers that other backends have no faster kernels for,
and the oracle of these. A layer ends with the product before the next attention, so that the end of one product
and the norm before the next one can be a single launch; backends override what they compute in fewer launches.
"""

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from faser.kernels.interface.adapters import AdaptedLinear
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.blocks import (
    BlockBuffers,
    Blocks,
    DecoderLayer,
    DecoderStack,
    Experts,
    ExpertsBeside,
    FeedForward,
    LayerBuffers,
    MixedFeedForward,
    NormedLinear,
    TokenInputs,
    columns_of,
)
from faser.kernels.interface.collectives import Collectives
from faser.kernels.interface.mixers import StateStep
from faser.kernels.interface.shapes import AttentionPlan, AttentionShape, KvCache, PackedLinear
from faser.types.activation import Activation


class SeparateLayers:
    """Layers made of a backend's operations and of units of layers, one after the other."""

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
        layers, scratch = stack.layers, replace(buffers.block, slots=self._backend.row_slots(plan))
        if first < last and (product := layers[first].qkv) is not None:
            qkv = columns_of(buffers.qkv, layers[first].shape.columns)
            self._blocks.normed_linear(hidden, product, qkv, scratch)
        for number, layer in enumerate(layers[first:last], first):
            if captures and layer.states is not None:
                layer.states[: len(hidden)].copy_(hidden)
            qkv = columns_of(buffers.qkv, layer.shape.columns)
            mixed = columns_of(buffers.mixed, layer.shape.q_size)
            if isinstance(layer.shape, AttentionShape):
                self._attend(layer, layer.shape, number, qkv, cache, plan, mixed)
            else:
                self._mix(layer, number, hidden, qkv, buffers, state_step, mixed)
            following = layers[number + 1] if number + 1 < last else None
            if following is not None:
                qkv = columns_of(buffers.qkv, following.shape.columns)
            product = None if following is None else following.qkv
            self._blocks.feed_forward(mixed, hidden, layer.feed_forward, product, qkv, scratch)

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
        """mixed = attention(rotated(norm(q)), rotated(norm(k)), v), times σ(gates) where the layer has gates."""
        qkv, gates = qkv[:, : shape.qkv_size], qkv[:, shape.qkv_size :]
        if layer.wide_norms is not None:
            q_norm, k_norm = layer.wide_norms
            queries, keys = qkv[:, : shape.q_size], qkv[:, shape.q_size :][:, : len(k_norm)]
            for part, norm in ((queries, q_norm), (keys, k_norm)):
                self._backend.rms_norm(part, norm, layer.eps, part)
        self._append_and_attend(layer, shape, number, qkv, cache, plan, mixed)
        if shape.gated:
            self._backend.sigmoid_gate(mixed, gates)

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
        queries = self._backend.rope_append(
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
        read = cache if layer.lent is None else layer.lent
        source = number if layer.kv_layer is None else layer.kv_layer
        self._backend.attend(queries, read, source, shape, plan, mixed, sinks=layer.sinks)

    def _mix(
        self,
        layer: DecoderLayer,
        number: int,
        hidden: Tensor,
        x: Tensor,
        buffers: LayerBuffers,
        state_step: StateStep | None,
        mixed: Tensor,
    ) -> None:
        """Run the mixer that the layer has in place of attention, from the states of the sequences on."""
        assert layer.mixer is not None, "a layer without attention has a mixer"
        assert state_step is not None, "a model with mixers has states"
        rates = None
        if layer.rates is not None:
            assert buffers.rates is not None, "a model whose mixers have rates has room for them"
            rates = columns_of(buffers.rates, layer.mixer.shape.rate_columns)
            self._blocks.normed_linear(hidden, layer.rates, rates, buffers.block)
        self._backend.mix(x, rates, layer.mixer, number, state_step, mixed)


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
        return self._linear(normed, product.linear, out, buffers)

    def _linear(
        self, x: Tensor, product: PackedLinear, out: Tensor, buffers: BlockBuffers, residual: Tensor | None = None
    ) -> Tensor:
        """out = product(x) (+ residual), with what the adapters of its rows add."""
        if not isinstance(product, AdaptedLinear):
            found: Tensor = self._backend.linear(x, product, out, residual=residual)
            return found
        self._backend.linear(x, product.base, out, residual=residual)
        if buffers.adapted is not None:
            self._backend.adapters.add(x, product.room, out, buffers.adapted)
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
        if isinstance(block, MixedFeedForward):
            self._add(mixed, block.attention_out, block.eps, None, hidden, buffers)
            self._add_experts(hidden, block, buffers)
        else:
            self._add_network(mixed, hidden, block, buffers)
        if following is not None:
            self.normed_linear(hidden, following, out, buffers)

    def _add_network(self, mixed: Tensor, hidden: Tensor, block: FeedForward, buffers: BlockBuffers) -> None:
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
            self._linear(x, product, hidden, buffers, residual=hidden)
            return
        added = self._linear(x, product, buffers.normed, buffers)
        if self._ranks is not None:
            self._ranks.all_reduce(added)
        if norm is None:
            hidden.add_(added)
        else:
            self._backend.rms_norm(added, norm, eps, hidden, residual=hidden)

    def _normed_gate(
        self, hidden: Tensor, product: NormedLinear, activation: Activation, inner: Tensor, buffers: BlockBuffers
    ) -> None:
        """inner = activation(gate) * up, of the product of the normalised rows."""
        gate_up = columns_of(buffers.gate_up, 2 * inner.shape[1])
        self._backend.gate(self.normed_linear(hidden, product, gate_up, buffers), inner, activation)

    def _add_experts(self, hidden: Tensor, block: MixedFeedForward, buffers: BlockBuffers) -> None:
        """hidden += experts(norm(hidden)), summed over ranks."""
        part = hidden if self._ranks is None else torch.zeros_like(hidden)
        self._backend.mixtures.add(hidden, block.norm, block.eps, block.experts, part, buffers)
        if self._ranks is not None:
            hidden.add_(self._ranks.all_reduce(part))

    def _add_with_experts(
        self, inner: Tensor, hidden: Tensor, block: FeedForward, beside: ExpertsBeside, buffers: BlockBuffers
    ) -> None:
        """hidden += norm(norm(down(inner)) + norm(experts(norm(hidden)))), as in Gemma 4."""
        backend, eps, after = self._backend, block.gate_up.eps, block.norm_after
        assert after is not None, "the sum of a network and experts is normalised"
        both = self._linear(inner, block.down, torch.empty_like(hidden), buffers)
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
        """hidden += norm(out(activation(gate(hidden)) * p)), with the inputs p that a row's token gives."""
        room = given.room[: hidden.shape[0]]
        size = room.shape[1] // 2
        self._backend.linear(hidden, given.gate, room[:, :size])
        inner = self._backend.gate(room, room[:, :size], block.activation)
        self._add(inner, given.out, block.gate_up.eps, given.norm, hidden, buffers)


class AdaptedBlocks:
    """Blocks of a backend, and those with adapted products in single operations."""

    def __init__(self, blocks: Blocks, separate: Blocks) -> None:
        self._blocks, self._separate = blocks, separate

    def _of(self, product: PackedLinear) -> Blocks:
        return self._separate if isinstance(product, AdaptedLinear) else self._blocks

    def normed_linear(self, hidden: Tensor, product: NormedLinear, out: Tensor, buffers: BlockBuffers) -> Tensor:
        return self._of(product.linear).normed_linear(hidden, product, out, buffers)

    def feed_forward(
        self,
        mixed: Tensor,
        hidden: Tensor,
        block: FeedForward | MixedFeedForward,
        following: NormedLinear | None,
        out: Tensor,
        buffers: BlockBuffers,
    ) -> None:
        self._of(block.attention_out).feed_forward(mixed, hidden, block, following, out, buffers)


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
