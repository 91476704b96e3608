"""Qwen3.5, dense: of four layers three have a gated delta net, the fourth has gated attention.

Queries and keys are normalised, and a quarter of their channels rotates. Norms multiply by 1 + w, but for the one
behind a delta net. Checkpoints have a layer that drafts (mtp.*), which heads.py describes, and a vision half.
"""

from collections.abc import Mapping
from typing import Any

from faser.engine.checkpoints.families.architecture import DecoderSpec, DeltaNetSpec, LayerSpec, TensorNames
from faser.engine.checkpoints.families.fields import Fields, attention, decoder, dense, rope_spec
from faser.errors import ModelError

_LINEAR = "linear_attention"
_FULL = "full_attention"
_HEAD_DIM = 256
_DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "partial_rotary_factor": 0.25,
}
_NAMES = TensorNames(not_read=("mtp.",))


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    """attention_bias applies to queries, gates, keys, values and the output of attention.

    linear_value_heads_tiled: no field of the hub's; GGUF files have the value heads in that order.
    """
    fields = Fields(dict(_DEFAULTS) | {name: value for name, value in config.items() if value is not None})
    fields.expect("hidden_act", ("silu",), "the convolution of a delta net is followed by silu")
    head_dim, bias = fields.positive_int("head_dim", _HEAD_DIM), fields.flag("attention_bias", False)
    full = attention(
        fields,
        rope_spec(fields, head_dim=head_dim),
        head_dim=head_dim,
        qk_norm=True,
        gated=True,
        bias=bias,
        out_bias=bias,
    )
    linear = DeltaNetSpec(
        num_k_heads=fields.positive_int("linear_num_key_heads", 16),
        num_v_heads=fields.positive_int("linear_num_value_heads", 32),
        k_head_dim=fields.positive_int("linear_key_head_dim", 128),
        v_head_dim=fields.positive_int("linear_value_head_dim", 128),
        kernel=fields.positive_int("linear_conv_kernel_dim", 4),
        tiled=fields.flag("linear_value_heads_tiled", False),
    )
    network = dense(fields)
    kinds = {_LINEAR: LayerSpec(attention=linear, feed_forward=network)}
    kinds[_FULL] = LayerSpec(attention=full, feed_forward=network)
    layers = [kinds[kind] for kind in _layer_types(fields)]
    return decoder(fields, layers, plus_one=True, names=_NAMES)


def _layer_types(fields: Fields) -> list[str]:
    """Raises ModelError for a kind of layer that is neither, and where no layer has attention."""
    num_layers, period = fields.num_layers(), fields.positive_int("full_attention_interval", 4)
    listed = fields.optional_list("layer_types", num_layers)
    found = listed or [_LINEAR if (layer + 1) % period else _FULL for layer in range(num_layers)]
    for layer, kind in enumerate(found):
        if kind not in (_LINEAR, _FULL):
            raise ModelError(f"config.json: layer_types[{layer}] is {kind!r}; only {_FULL}, {_LINEAR}")
    if _FULL not in found:
        raise ModelError(f"config.json: layer_types has no {_FULL}; at least one layer must attend")
    return found
