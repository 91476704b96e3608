"""The tensors of a decoder's checkpoint: names as on the Hugging Face hub, shapes from the spec.

The one module that spells these names. Opens no file and holds no tensor.
"""

import math

from faser.engine.checkpoints.families.architecture import DecoderSpec

Shape = tuple[int, ...]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def tensor_shapes(spec: DecoderSpec) -> dict[str, Shape]:
    """Every tensor that the decoder needs, in loading order; products are [out, in]."""
    shapes: dict[str, Shape] = {EMBEDDING: (spec.vocab_size, spec.hidden_size)}
    for layer in range(spec.num_layers):
        shapes |= {layer_prefix(layer) + name: shape for name, shape in layer_shapes(spec).items()}
    shapes[FINAL_NORM] = (spec.hidden_size,)
    if not spec.tie_word_embeddings:
        shapes[HEAD] = (spec.vocab_size, spec.hidden_size)
    return shapes


def is_of_values(name: str) -> bool:
    """Whether a weight makes the values of attention."""
    return name.endswith(".self_attn.v_proj.weight")


def ignorable(name: str, spec: DecoderSpec) -> bool:
    """Whether a checkpoint may hold this tensor in addition to those of tensor_shapes, because it is redundant.

    Old checkpoints store the rotary frequencies; some tied ones store the embedding again as the head.
    """
    return name.endswith(".rotary_emb.inv_freq") or (name == HEAD and spec.tie_word_embeddings)


def num_parameters(spec: DecoderSpec) -> int:
    """Parameters of the checkpoint; a tied embedding counts once."""
    return sum(math.prod(shape) for shape in tensor_shapes(spec).values())


def layer_shapes(spec: DecoderSpec) -> dict[str, Shape]:
    """Of one layer, without its prefix."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden,)}
    for name, width in (("q_proj", spec.q_size), ("k_proj", spec.kv_size), ("v_proj", spec.kv_size)):
        shapes |= _product(f"self_attn.{name}", width, hidden, spec.attention_bias)
    if spec.qk_norm:
        shapes["self_attn.q_norm.weight"] = (spec.head_dim,)
        shapes["self_attn.k_norm.weight"] = (spec.head_dim,)
    shapes |= _product("self_attn.o_proj", hidden, spec.q_size, spec.attention_out_bias)
    shapes["post_attention_layernorm.weight"] = (hidden,)
    shapes |= _product("mlp.gate_proj", inner, hidden, spec.mlp_bias)
    shapes |= _product("mlp.up_proj", inner, hidden, spec.mlp_bias)
    shapes |= _product("mlp.down_proj", hidden, inner, spec.mlp_bias)
    return shapes


def _product(name: str, rows: int, columns: int, bias: bool) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (rows, columns)}
    return weight | {f"{name}.bias": (rows,)} if bias else weight
