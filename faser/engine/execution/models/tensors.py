"""The tensors of a decoder's checkpoint: names as on the Hugging Face hub, shapes from the spec.

The one module that spells these names. Opens no file and holds no tensor.
"""

import math
from collections.abc import Iterator

import numpy as np

from faser.engine.checkpoints.families.architecture import (
    AttentionSpec,
    DecoderSpec,
    DeltaNetSpec,
    ExpertsSpec,
    LayerSpec,
    ShortConvSpec,
)
from faser.types.arrays import Ints

Shape = tuple[int, ...]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"  # unless the names of a spec say otherwise
HEAD = "lm_head.weight"
SINKS = "self_attn.sinks"
LINEAR = "linear_attn."
SCALE = "layer_scalar"
ROUTER_SCALE = "router.scale"
EXPERT_SCALES = "router.per_expert_scale"
NORM_BEFORE_EXPERTS = "pre_feedforward_layernorm_2"
NORM_AFTER_NETWORK = "post_feedforward_layernorm_1"
NORM_AFTER_EXPERTS = "post_feedforward_layernorm_2"
# What tokens add to layers; the first three are of the model, the others of a layer.
TOKEN_EMBEDDING = "model.embed_tokens_per_layer.weight"
TOKEN_PRODUCT = "model.per_layer_model_projection.weight"
TOKEN_NORM = "model.per_layer_projection_norm.weight"
TOKEN_GATE = "per_layer_input_gate.weight"
TOKEN_OUT = "per_layer_projection.weight"
NORM_AFTER_TOKEN = "post_per_layer_input_norm"


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def tensor_shapes(spec: DecoderSpec) -> dict[str, Shape]:
    """Every tensor that the decoder needs, in loading order; products are [out, in]."""
    return dict(iter_shapes(spec))


def iter_shapes(spec: DecoderSpec) -> Iterator[tuple[str, Shape]]:
    """Yield what tensor_shapes has, layer by layer: its size follows from a config that may be wrong."""
    yield EMBEDDING, (spec.vocab_size, spec.hidden_size)
    if (inputs := spec.token_inputs) is not None:
        width = spec.num_layers * inputs.size
        yield TOKEN_EMBEDDING, (inputs.vocab_size, width)
        yield TOKEN_PRODUCT, (width, spec.hidden_size)
        yield TOKEN_NORM, (inputs.size,)
    for number, layer in enumerate(spec.layers):
        for name, shape in layer_shapes(spec, layer).items():
            yield layer_prefix(number) + name, shape
    yield spec.names.final_norm, (spec.hidden_size,)
    if not spec.tie_word_embeddings:
        yield HEAD, (spec.vocab_size, spec.hidden_size)


def is_of_values(name: str) -> bool:
    """Return whether a weight makes the values of attention."""
    return name.endswith(".self_attn.v_proj.weight")


def ignorable(name: str, spec: DecoderSpec) -> bool:
    """Return whether a checkpoint may hold this tensor beyond those of tensor_shapes, because it is redundant.

    Old checkpoints store the rotary frequencies; some tied ones store the embedding again as the head; others have
    what their family does not read.
    """
    return (
        name.startswith(spec.names.not_read)
        or name.endswith(".rotary_emb.inv_freq")
        or (name == HEAD and spec.tie_word_embeddings)
    )


def num_parameters(spec: DecoderSpec) -> int:
    """Parameters of the checkpoint; a tied embedding counts once."""
    return sum(math.prod(shape) for _, shape in iter_shapes(spec))


def layer_shapes(spec: DecoderSpec, layer: LayerSpec) -> dict[str, Shape]:
    """Return the shapes of one layer's tensors, without the layer's prefix."""
    hidden, attention, names = spec.hidden_size, layer.attention, spec.names
    shapes: dict[str, Shape] = {f"{names.norm_before_attention}.weight": (hidden,)}
    if isinstance(attention, DeltaNetSpec):
        shapes |= _delta_net_shapes(spec, attention)
    elif isinstance(attention, ShortConvSpec):
        widths = {"in_proj": 3 * hidden, "out_proj": hidden}
        shapes |= {f"{names.convolution}{name}.weight": (width, hidden) for name, width in widths.items()}
        shapes[f"{names.convolution}conv.weight"] = (hidden, 1, attention.kernel)
    else:
        shapes |= _attention_shapes(spec, attention)
    if layer.norms_after:
        shapes[f"{names.norm_after_attention}.weight"] = (hidden,)
    shapes[f"{names.norm_before_feed_forward}.weight"] = (hidden,)
    network = layer.feed_forward
    if isinstance(network, ExpertsSpec):
        return shapes | _experts_shapes(spec, network)
    for name in names.gate_up:
        shapes |= _product(name, 2 * network.size // len(names.gate_up), hidden, network.bias)
    shapes |= _product(names.down, hidden, network.size, network.bias)
    if layer.norms_after:
        shapes[f"{names.norm_after_feed_forward}.weight"] = (hidden,)
    if layer.experts is not None:
        shapes |= _experts_shapes(spec, layer.experts)
        norms = (NORM_BEFORE_EXPERTS, NORM_AFTER_NETWORK, NORM_AFTER_EXPERTS)
        shapes |= {f"{name}.weight": (hidden,) for name in norms}
        shapes |= {ROUTER_SCALE: (hidden,), EXPERT_SCALES: (layer.experts.num_experts,)}
    if (inputs := spec.token_inputs) is not None:
        shapes |= {TOKEN_GATE: (inputs.size, hidden), TOKEN_OUT: (hidden, inputs.size)}
        shapes[f"{NORM_AFTER_TOKEN}.weight"] = (hidden,)
    return shapes | {SCALE: (1,)} if layer.scaled else shapes


def _experts_shapes(spec: DecoderSpec, mixture: ExpertsSpec) -> dict[str, Shape]:
    names, hidden, size, bias = spec.names, spec.hidden_size, mixture.size, mixture.bias
    gate, up, down = names.expert_parts
    shapes = _product(names.router, mixture.num_experts, hidden, bias)
    if mixture.choice_bias:
        shapes[names.choice_bias] = (mixture.num_experts,)
    for number in range(mixture.num_experts):
        prefix = names.expert.format(number)
        shapes |= _product(prefix + gate, size, hidden, bias)
        shapes |= _product(prefix + up, size, hidden, bias)
        shapes |= _product(prefix + down, hidden, size, bias)
    if mixture.shared_size:
        shapes |= _product(names.shared_gate, 1, hidden, False)
        shapes |= _product(names.shared_expert + gate, mixture.shared_size, hidden, False)
        shapes |= _product(names.shared_expert + up, mixture.shared_size, hidden, False)
        shapes |= _product(names.shared_expert + down, hidden, mixture.shared_size, False)
    return shapes


def _attention_shapes(spec: DecoderSpec, attention: AttentionSpec) -> dict[str, Shape]:
    """Return the shapes of attention: of a gated head the queries first. Keys may be those of another layer."""
    hidden, q_size, kv_size, names = spec.hidden_size, attention.q_size, attention.kv_size, spec.names
    if names.fused_qkv:
        widths = {"qkv_proj": q_size + 2 * kv_size}
    else:
        widths = {f"{name}_proj": kv_size for name in kv_products(attention)}
        apart = bool(names.attention_gate)
        widths = {"q_proj": q_size * (1 + (attention.gated and not apart))} | widths
    shapes: dict[str, Shape] = {}
    for name, width in widths.items():
        shapes |= _product(f"self_attn.{name}", width, hidden, attention.bias)
    if attention.gated and names.attention_gate:
        shapes[f"{names.attention_gate}.weight"] = (q_size, hidden)
    if attention.qk_norm:
        shapes[f"{names.q_norm}.weight"] = (attention.head_dim,)
        if attention.kv_layer is None:
            shapes[f"{names.k_norm}.weight"] = (attention.head_dim,)
    if attention.wide_qk_norm:
        shapes[f"{names.q_norm}.weight"] = (q_size,)
        shapes[f"{names.k_norm}.weight"] = (kv_size,)
    shapes |= _product(names.attention_out, hidden, q_size, attention.out_bias)
    return shapes | {SINKS: (attention.num_heads,)} if attention.sinks else shapes


def kv_products(attention: AttentionSpec) -> str:
    """The products that keys are made by, then values; none in a layer that reads those of another one."""
    if attention.kv_layer is not None:
        return ""
    return "kk" if attention.k_eq_v else "kv"


def _delta_net_shapes(spec: DecoderSpec, net: DeltaNetSpec) -> dict[str, Shape]:
    hidden, channels, heads = spec.hidden_size, 2 * net.k_size + net.v_size, net.num_v_heads
    if spec.names.fused_qkvz:
        products = {"in_proj_qkvz": channels + net.v_size}
    else:
        products = {"in_proj_qkv": channels, "in_proj_z": net.v_size}
    products |= {"in_proj_ba": 2 * heads} if spec.names.fused_rates else {"in_proj_b": heads, "in_proj_a": heads}
    shapes: dict[str, Shape] = {f"{LINEAR}{name}.weight": (width, hidden) for name, width in products.items()}
    shapes[f"{LINEAR}conv1d.weight"] = (channels, 1, net.kernel)
    shapes |= dict.fromkeys((f"{LINEAR}A_log", f"{LINEAR}dt_bias"), (net.num_v_heads,))
    return shapes | {f"{LINEAR}norm.weight": (net.v_head_dim,), f"{LINEAR}out_proj.weight": (hidden, net.v_size)}


def head_order(attention: AttentionSpec) -> Ints | None:
    """Return the checkpoint's channel at each place of a query or key head: [D]; None: each is at its place.

    Here the channels i and i + D / 2 rotate as a pair, or stay as they are. Of R rotated channels of D = 2 R:

        here         R / 2 firsts, half of those that stay  |  R / 2 seconds, the other half
        checkpoint   firsts, seconds, those that stay; or pairs of a first and a second, those that stay

    The scores of attention are the same sums in another order.
    """
    rope, width = attention.rope, attention.head_dim
    if rope is None or (rope.rotated is None and not rope.interleaved):
        return None
    channels = np.arange(width)
    rotated = width if rope.rotated is None else rope.rotated
    turning, rest = channels[:rotated], channels[rotated:].reshape(2, -1)
    first, second = turning.reshape(-1, 2).T if rope.interleaved else turning.reshape(2, -1)
    return np.concatenate((first, rest[0], second, rest[1]))


def parts_in_order(net: DeltaNetSpec, *widths: int) -> Ints:
    """The rows of a tensor that has several parts key head by key head, part by part.

    widths: rows of a key head in each part. Two heads, two parts, as stored → as returned:

        stored     head 0: part 0, part 1; head 1: part 0, part 1
        returned   part 0: head 0, head 1; part 1: head 0, head 1
    """
    rows = np.arange(net.num_k_heads * sum(widths)).reshape(net.num_k_heads, -1)
    parts = np.split(rows, np.cumsum(widths)[:-1], axis=1)
    return np.concatenate([each.reshape(-1) for each in parts])


def _product(name: str, rows: int, columns: int, bias: bool) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (rows, columns)}
    return weight | {f"{name}.bias": (rows,)} if bias else weight
