"""Nomic BERT (arXiv:2402.01613): BERT with rotary positions, a network gated by SiLU, and no biases in products.

Its config.json has GPT-2's names for the fields on the hub, and BERT's where transformers has written it.
"""

from collections.abc import Mapping
from typing import Any

from faser.engine.checkpoints.encoders.spec import (
    EncoderFamily,
    EncoderLayer,
    EncoderNames,
    EncoderSpec,
    check_heads,
    encoder_fields,
)
from faser.engine.checkpoints.families.fields import rope_spec
from faser.types.activation import Activation

_THETA = 1000.0
# BERT's names for GPT-2's.
_RENAMED = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}
# What checkpoints on the hub may ask for, and what is computed.
_COMPUTED: Mapping[str, tuple[Any, ...]] = {
    "activation_function": ("swiglu",),
    "hidden_act": ("silu", "swish"),
    "prenorm": (False,),
    "parallel_block": (False,),
    "use_rms_norm": (False,),
    "qkv_proj_bias": (False,),
    "mlp_fc1_bias": (False,),
    "mlp_fc2_bias": (False,),
    "rotary_emb_fraction": (1, 1.0),
    "rotary_emb_interleaved": (False,),
    "rotary_emb_scale_base": (),
    "num_experts": (0,),
}
_NAMES = EncoderNames(
    word="embeddings.word_embeddings",
    types="embeddings.token_type_embeddings",
    embedding_norm="emb_ln",
    layer="encoder.layers.{}.",
    qkv=("attn.Wqkv",),
    attention_out="attn.out_proj",
    attention_norm="norm1",
    up=("mlp.fc12", "mlp.fc11"),
    down="mlp.fc2",
    network_norm="norm2",
)


def spec(config: Mapping[str, Any]) -> EncoderSpec:
    config = {_RENAMED.get(name, name): value for name, value in config.items()}
    fields = encoder_fields(config)
    for name, computed in _COMPUTED.items():
        fields.expect(name, computed, "not supported in Nomic BERT")
    hidden_size, num_heads = fields.positive_int("hidden_size"), fields.positive_int("num_attention_heads")
    check_heads(hidden_size, num_heads)
    positions = fields.positive_int("max_position_embeddings")
    return EncoderSpec(
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        intermediate_size=fields.positive_int("intermediate_size"),
        # Beyond the trained ones angles would have to be stretched, by the length of each text.
        max_position_embeddings=min(positions, fields.positive_int("max_trained_positions", positions)),
        layers=(EncoderLayer(rope=rope_spec(fields, default_theta=_THETA)),) * fields.num_layers(),
        activation=Activation.SILU,
        norm_eps=fields.positive_float("layer_norm_eps", 1e-12),
        names=_NAMES,
        num_types=fields.positive_int("type_vocab_size", 2),
        gated=True,
        qkv_bias=False,
        out_bias=False,
        up_bias=False,
        down_bias=False,
        ignored=("pooler.", "cls.", "lm_head."),
    )


FAMILIES = (
    EncoderFamily(
        name="Nomic BERT",
        model_type="nomic_bert",
        architecture="NomicBertModel",
        to_spec=spec,
        prefix="bert.",
        examples=("nomic-ai/nomic-embed-text-v1", "nomic-ai/nomic-embed-text-v1.5"),
        note="Texts have up to max_trained_positions tokens (2048). Mixtures of experts (v2) are not served",
    ),
)
