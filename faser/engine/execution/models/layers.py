"""The layers of a decoder, and of heads: a spec and packed weights, as kernels take them.

A DecoderLayer holds tensors and shapes alone; what computes it knows no spec and no checkpoint.
"""

import torch
from torch import Tensor

from faser.engine.checkpoints.families.architecture import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MixerSpec,
)
from faser.engine.execution.models.mixers import mixer_kind
from faser.engine.execution.models.rope import RotaryTables
from faser.engine.execution.models.weights import (
    ExpertsBesideWeights,
    ExpertsWeights,
    LayerWeights,
    NetworkWeights,
    TokenLayerWeights,
)
from faser.kernels.interface.blocks import (
    DecoderLayer,
    Experts,
    ExpertsBeside,
    FeedForward,
    MixedFeedForward,
    NormedLinear,
    TokenInputs,
)
from faser.kernels.interface.mixers import MixerShape
from faser.kernels.interface.shapes import AttentionShape, PackedLinear


def attention_shape(spec: AttentionSpec) -> AttentionShape:
    return AttentionShape(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        scale=spec.score_scale,
        window=spec.window,
        score_cap=spec.score_cap,
        gated=spec.gated,
        reads_other=spec.kv_layer is not None,
    )


def layer_shape(layer: AttentionSpec | MixerSpec, spec: DecoderSpec) -> AttentionShape | MixerShape:
    if isinstance(layer, AttentionSpec):
        return attention_shape(layer)
    return mixer_kind(layer).shape(layer, spec)


def mixer_shapes(spec: DecoderSpec) -> tuple[MixerShape | None, ...]:
    """Return what keeps a state in each layer; None: it has keys and values."""
    shapes = (layer_shape(each.attention, spec) for each in spec.layers)
    return tuple(None if isinstance(each, AttentionShape) else each for each in shapes)


def decoder_layer(
    spec: DecoderSpec,
    number: int,
    weights: LayerWeights,
    rotary: RotaryTables,
    *,
    states: Tensor | None = None,
    projects: bool = True,
    inputs: Tensor | None = None,
) -> DecoderLayer:
    """A layer with its weights. states: see DecoderLayer. projects: it computes its own qkv.

    inputs: its part of Buffers.token_inputs, [max_rows, 2 P]; None: tokens give nothing.
    """
    layer: LayerSpec = spec.layers[number]
    attention = layer.attention
    head_norms, wide_norms = (weights.q_norm, weights.k_norm), None
    if isinstance(attention, AttentionSpec) and attention.bare_qk_norm:
        ones = torch.ones(attention.head_dim, device=weights.post_norm.device)
        head_norms = (ones, ones)
    if isinstance(attention, AttentionSpec) and attention.wide_qk_norm:
        assert weights.q_norm is not None
        assert weights.k_norm is not None
        head_norms, wide_norms = (None, None), (weights.q_norm, weights.k_norm)

    def normed(norm: Tensor | None, linear: PackedLinear) -> NormedLinear:
        assert norm is not None, "a layer of a decoder has an input norm"
        return NormedLinear(norm=norm, eps=spec.rms_norm_eps, linear=linear)

    rates = None if weights.mixer is None else weights.mixer.rates
    return DecoderLayer(
        qkv=normed(weights.input_norm, weights.qkv) if projects else None,
        shape=layer_shape(attention, spec),
        angles=rotary.keys(attention) if isinstance(attention, AttentionSpec) else None,
        query_angles=rotary.queries(attention) if isinstance(attention, AttentionSpec) else None,
        q_norm=head_norms[0],
        k_norm=head_norms[1],
        wide_norms=wide_norms,
        eps=spec.rms_norm_eps,
        feed_forward=_feed_forward(spec, layer, weights, inputs),
        sinks=weights.sinks,
        states=states,
        rates=None if rates is None else normed(weights.input_norm, rates),
        mixer=None if weights.mixer is None else weights.mixer.mixer,
        v_norm=_value_norm(attention, weights.post_norm.device),
        kv_layer=attention.kv_layer if isinstance(attention, AttentionSpec) else None,
    )


def _value_norm(attention: AttentionSpec | MixerSpec, device: torch.device) -> Tensor | None:
    """Without weights: ones. None: values are not normalised, or are another layer's."""
    if not isinstance(attention, AttentionSpec) or not attention.v_norm or attention.kv_layer is not None:
        return None
    return torch.ones(attention.head_dim, device=device)


def _feed_forward(
    spec: DecoderSpec, layer: LayerSpec, weights: LayerWeights, inputs: Tensor | None
) -> FeedForward | MixedFeedForward:
    network, eps = weights.network, spec.rms_norm_eps
    if isinstance(network, NetworkWeights):
        return FeedForward(
            attention_out=weights.attention_out,
            gate_up=NormedLinear(norm=weights.post_norm, eps=eps, linear=network.gate_up),
            down=network.down,
            activation=layer.feed_forward.activation,
            norm_after_attention=weights.norm_after_attention,
            norm_after=weights.norm_after,
            after_eps=spec.norm_after_eps,
            size=layer.feed_forward.size,
            beside=_beside(layer, weights.beside),
            token_inputs=_token_inputs(weights.token_inputs, inputs),
            scale=weights.scale,
        )
    experts = _experts(layer, network, weights.post_norm.device)
    return MixedFeedForward(attention_out=weights.attention_out, norm=weights.post_norm, eps=eps, experts=experts)


def _experts(
    layer: LayerSpec, weights: ExpertsWeights, device: torch.device, scales: Tensor | None = None
) -> Experts:
    assert layer.mixture is not None, "weights of experts belong to a mixture"
    if layer.mixture.scale != 1.0:
        assert scales is None, "weights of experts are multiplied by one number, or by one of each"
        scales = torch.full((layer.mixture.num_experts,), layer.mixture.scale, device=device)
    shared = weights.shared
    return Experts(
        router=weights.router,
        gate_up=tuple(each.gate_up for each in weights.experts),
        down=tuple(each.down for each in weights.experts),
        top_k=layer.mixture.top_k,
        renormalise=layer.mixture.renormalise,
        activation=layer.mixture.activation,
        scales=scales,
        sigmoid=layer.mixture.sigmoid,
        choice_bias=weights.choice_bias,
        shared=None if shared is None else (shared.gate_up, shared.down),
    )


def _beside(layer: LayerSpec, weights: ExpertsBesideWeights | None) -> ExpertsBeside | None:
    if weights is None:
        return None
    return ExpertsBeside(
        experts=_experts(layer, weights.experts, weights.norm.device, weights.scales),
        norm=weights.norm,
        router_norm=weights.router_scale * len(weights.norm) ** -0.5,
        norm_after=weights.norm_after,
        norm_after_network=weights.norm_after_network,
    )


def _token_inputs(weights: TokenLayerWeights | None, room: Tensor | None) -> TokenInputs | None:
    if weights is None:
        return None
    assert room is not None, "a model whose tokens give inputs has room for them"
    return TokenInputs(gate=weights.gate, out=weights.out, norm=weights.norm, room=room)
