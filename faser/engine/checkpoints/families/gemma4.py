"""Gemma 4: local layers, which have a window, and global ones have heads of their own shapes, and a rope each.

Values are normalised, and scores have no scale. Global layers may take the product of keys for values; the last
layers may read the keys and values of earlier ones. In E2B and E4B tokens add to every layer; 26B-A4B has a
mixture of experts beside each dense network. An assistant, which drafts, has layers of the same arithmetic, which
read the keys and values of its target.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from faser.engine.checkpoints.families import gemma
from faser.engine.checkpoints.families.architecture import (
    AttentionSpec,
    DecoderSpec,
    DenseSpec,
    ExpertsSpec,
    LayerSpec,
    StackedExperts,
    TensorNames,
    TokenInputsSpec,
)
from faser.engine.checkpoints.families.family import EXPERT, GATE_UP, Config, Family, GgufArchitecture
from faser.engine.checkpoints.families.fields import Fields, attention, decoder, rope_spec
from faser.errors import ModelError

if TYPE_CHECKING:
    from faser.engine.checkpoints.gguf.file import GgufFile

_LOCAL = "sliding_attention"
_GLOBAL = "full_attention"
_PERIOD = 6
_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
}
_UNIFIED: Mapping[str, Any] = {
    "max_position_embeddings": 262_144,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
}
_ROPES: Mapping[str, Any] = {
    _LOCAL: {"rope_type": "default", "rope_theta": 10_000.0},
    _GLOBAL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
_OWN = ("head_dim", "num_key_value_heads")  # what a layer may have in place of the model's
_NOT_SHARED = ("k_proj", "v_proj", "k_norm")


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    return _spec(_DEFAULTS, config)


def unified_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The text half of 12B, which has no encoders."""
    return _spec({**_DEFAULTS, **_UNIFIED}, config)


def assistant_spec(config: Mapping[str, Any], target: DecoderSpec) -> DecoderSpec:
    """Read the layers of an assistant; each reads the last layer of its kind that the target stores keys of.

    config: the `text_config`. The numbers of kv_layer are those of the target's layers. Raises ModelError where
    the target has no such layer, or heads of another shape.
    """
    given = dict(config) | {"hidden_size_per_layer_input": config.get("hidden_size_per_layer_input") or 0}
    if given["hidden_size_per_layer_input"] or given.get("enable_moe_block") or given.get("use_double_wide_mlp"):
        raise ModelError(
            "config.json: the assistant has hidden_size_per_layer_input, enable_moe_block or use_double_wide_mlp; "
            "only dense layers without them are computed"
        )
    return _spec(_DEFAULTS, given, target)


def _spec(
    defaults: Mapping[str, Any], config: Mapping[str, Any], lender: DecoderSpec | None = None
) -> DecoderSpec:
    """lender: whose keys and values all layers read; None: the model's own."""
    given = dict(defaults) | {name: value for name, value in config.items() if value is not None}
    if given.get("use_bidirectional_attention") == "vision":  # of the tokens of an image, which are not served
        del given["use_bidirectional_attention"]
    given["rope_parameters"] = dict(_ROPES) | (Fields(given).optional_dict("rope_parameters") or {})
    fields = Fields(given)
    kinds, experts = _kinds(fields), _experts(fields)
    sources = _sources(fields, kinds) if lender is None else _lent(kinds, lender)
    wide = 2 if fields.flag("use_double_wide_mlp", False) else 1
    size, of_layers = fields.positive_int("intermediate_size"), _shapes(given, kinds)

    def own(number: int, source: int | None) -> dict[str, Any]:
        return of_layers.get(number if source is None or lender is not None else source, {})

    layers = [
        LayerSpec(
            attention=_attention(given | own(number, source), kind, source),
            feed_forward=DenseSpec(size=size if source is None else wide * size, activation=fields.activation()),
            norms_after=True,
            experts=experts,
            scaled=True,
        )
        for number, (kind, source) in enumerate(zip(kinds, sources, strict=True))
    ]
    if lender is not None:
        _check_heads(layers, lender)
    reading = [number for number, source in enumerate(sources) if source is not None]
    return decoder(
        fields,
        layers,
        tied=True,
        embedding_scale=fields.positive_int("hidden_size") ** 0.5,
        logit_cap=fields.optional_float("final_logit_softcapping"),
        token_inputs=_token_inputs(fields),
        names=TensorNames(
            norm_before_feed_forward="pre_feedforward_layernorm",
            norm_after_attention="post_attention_layernorm",
            norm_after_feed_forward="post_feedforward_layernorm",
            router="router.proj",
            expert="experts.{}.",
            stacked_experts=None if experts is None else StackedExperts.HALVES,
            not_read=tuple(f"model.layers.{layer}.self_attn.{name}." for layer in reading for name in _NOT_SHARED),
        ),
    )


def _token_inputs(fields: Fields) -> TokenInputsSpec | None:
    size = fields.non_negative_int("hidden_size_per_layer_input", 0)
    if not size:
        return None
    return TokenInputsSpec(size=size, vocab_size=fields.positive_int("vocab_size_per_layer_input"))


def _kinds(fields: Fields) -> list[str]:
    """Return the kind of each layer. The last one is always global."""
    num_layers = fields.num_layers()
    usual = [_GLOBAL if (layer + 1) % _PERIOD == 0 else _LOCAL for layer in range(num_layers)]
    return [*(fields.layer_types(num_layers) or usual)[:-1], _GLOBAL]


def _sources(fields: Fields, kinds: list[str]) -> list[int | None]:
    """Return whose keys and values each layer reads, the last of its kind that has some; None: its own.

    Raises ModelError where there is none.
    """
    shared = fields.non_negative_int("num_kv_shared_layers", 0)
    own = kinds[: max(len(kinds) - shared, 0)]
    found: list[int | None] = [None] * len(own)
    for kind in kinds[len(own) :]:
        if kind not in own:
            raise ModelError(
                f"config.json: num_kv_shared_layers is {shared}; of {len(kinds)} layers no {kind} is left that "
                "has keys and values"
            )
        found.append(max(layer for layer, each in enumerate(own) if each == kind))
    return found


def _lent(kinds: list[str], lender: DecoderSpec) -> list[int | None]:
    """Return for each layer of an assistant the target's last layer of its kind that stores keys and values."""
    stored: dict[str, int] = {}
    for number, layer in enumerate(lender.layers):
        if isinstance(layer.attention, AttentionSpec) and layer.attention.kv_layer is None:
            stored[_GLOBAL if layer.attention.window is None else _LOCAL] = number
    if missing := [kind for kind in kinds if kind not in stored]:
        raise ModelError(f"the assistant has layers of kind {missing[0]}; the model stores no keys of such layers")
    return [stored[kind] for kind in kinds]


def _check_heads(layers: list[LayerSpec], lender: DecoderSpec) -> None:
    for number, layer in enumerate(layers):
        attention = layer.attention
        assert isinstance(attention, AttentionSpec)
        assert attention.kv_layer is not None
        theirs = lender.layers[attention.kv_layer].attention
        assert isinstance(theirs, AttentionSpec)
        mine, other = ((each.num_kv_heads, each.head_dim, each.window) for each in (attention, theirs))
        if mine != other:
            raise ModelError(
                f"layer {number} of the assistant reads {mine[0]} key-value heads of {mine[1]} channels, window "
                f"{mine[2]}; layer {attention.kv_layer} of the model stores {other[0]} of {other[1]}, window "
                f"{other[2]}: it was made for another model"
            )


def _shapes(given: Mapping[str, Any], kinds: list[str]) -> dict[int, dict[str, Any]]:
    """Return what layers have in place of the model's head_dim and num_key_value_heads.

    Listed by layer, as transformers writes it since it has per_layer_config, or the same for all global layers.
    """
    fields = Fields(given)
    if "per_layer_config" not in given:
        of_global: dict[str, Any] = {"head_dim": fields.positive_int("global_head_dim", 512)}
        heads = fields.optional_int("num_global_key_value_heads")
        if heads is not None and fields.flag("attention_k_eq_v", False):
            of_global["num_key_value_heads"] = heads
        return {layer: of_global for layer, kind in enumerate(kinds) if kind == _GLOBAL}
    listed = fields.optional_dict("per_layer_config") or {}
    for layer, own in listed.items():
        if not layer.isdigit() or not isinstance(own, dict) or not set(own) <= set(_OWN):
            raise ModelError(
                f"config.json: per_layer_config has {layer!r}: {own!r}; a layer may have {', '.join(_OWN)} of its "
                "own"
            )
    return {int(layer): own for layer, own in listed.items()}


def _attention(given: Mapping[str, Any], kind: str, source: int | None) -> AttentionSpec:
    """source: whose keys and values are read; None: the layer has its own."""
    fields = Fields(given)
    head_dim, bias = fields.positive_int("head_dim"), fields.flag("attention_bias", False)
    return attention(
        fields,
        rope_spec(fields, layer_type=kind, head_dim=head_dim),
        head_dim=head_dim,
        scale=1.0,
        window=fields.positive_int("sliding_window") if kind == _LOCAL else None,
        qk_norm=True,
        v_norm=True,
        k_eq_v=kind == _GLOBAL and fields.flag("attention_k_eq_v", False),
        kv_layer=source,
        bias=bias,
        out_bias=bias,
    )


def _experts(fields: Fields) -> ExpertsSpec | None:
    if not fields.flag("enable_moe_block", False):
        return None
    return ExpertsSpec(
        num_experts=fields.positive_int("num_experts"),
        top_k=fields.positive_int("top_k_experts"),
        size=fields.positive_int("moe_intermediate_size"),
        renormalise=True,
        activation=fields.activation(),
    )


_GEMMA4 = gemma.TENSORS | {
    "layer_output_scale": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps": f"experts.{EXPERT}.{GATE_UP}",
    "ffn_gate_exps": f"experts.{EXPERT}.gate_proj",
    "ffn_up_exps": f"experts.{EXPERT}.up_proj",
    "ffn_down_exps": f"experts.{EXPERT}.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}


def _gemma4_fields(file: "GgufFile", config: Config) -> Config:
    """A layer that stores keys without values takes them for values."""
    num_layers, shared = config["num_hidden_layers"], file.get("gemma4.attention.shared_kv_layers", int, 0)
    own = range(num_layers - shared)
    local = file.require_list("gemma4.attention.sliding_window_pattern", bool)
    kv_heads = file.by_layer("gemma4.attention.head_count_kv", num_layers)
    sizes = file.by_layer("gemma4.feed_forward_length", num_layers)
    size, wide = sizes[0], sizes[-1] != sizes[0]
    if len(local) != num_layers:
        raise ModelError(
            f"{file.path}: gemma4.attention.sliding_window_pattern has {len(local)} entries for {num_layers} "
            "layers"
        )
    if sizes != [size * (1 + (wide and layer not in own)) for layer in range(num_layers)]:
        raise ModelError(
            f"{file.path}: gemma4.feed_forward_length is {sizes}; only the last {shared} layers, which share "
            "keys, may be wider than the others, by a factor of 2"
        )
    widths = [file.size(f"gemma4.attention.key_length{'_swa' if each else ''}") for each in local]
    rope = {"rope_type": "default"} | (config["rope_scaling"] or {}) | {"rope_theta": config["rope_theta"]}
    experts, inputs = file.get("gemma4.expert_count", int, 0), "per_layer_token_embd.weight"
    found: Config = {
        "hidden_act": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention" if each else "full_attention" for each in local],
        "sliding_window": file.size("gemma4.attention.sliding_window"),
        "per_layer_config": {
            str(layer): {"head_dim": widths[layer], "num_key_value_heads": kv_heads[layer]}
            for layer in range(num_layers)
        },
        "attention_k_eq_v": not all(file.has_tensor(f"blk.{layer}.attn_v.weight") for layer in own),
        "num_kv_shared_layers": shared,
        "intermediate_size": size,
        "use_double_wide_mlp": wide,
        "final_logit_softcapping": file.number("gemma4.final_logit_softcapping", 0.0) or None,
        "hidden_size_per_layer_input": file.get("gemma4.embedding_length_per_layer_input", int, 0),
        "vocab_size_per_layer_input": file.shape(inputs)[0] if file.has_tensor(inputs) else None,
        "rope_scaling": None,
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": file.number("gemma4.rope.freq_base_swa", 10_000.0),
            },
        },
    }
    if experts:
        found |= {
            "enable_moe_block": True,
            "num_experts": experts,
            "top_k_experts": file.size("gemma4.expert_used_count"),
            "moe_intermediate_size": file.size("gemma4.expert_feed_forward_length"),
        }
    return found


GGUF: Mapping[str, GgufArchitecture] = {
    "gemma4": GgufArchitecture(
        class_name="Gemma4ForCausalLM",
        model_type="gemma4_text",
        tensors=_GEMMA4,
        windows=True,
        experts=True,
        sizes_by_layer=True,
        own_fields=_gemma4_fields,
    ),
}
FAMILIES = (
    Family(
        name="Gemma 4",
        model_type="gemma4_text",
        architecture="Gemma4ForCausalLM",
        to_spec=spec,
        tool_parsers=("gemma4",),
        examples=("google/gemma-4-E2B-it", "google/gemma-4-26B-A4B-it", "google/gemma-4-31B-it"),
        gguf=("gemma4",),
        note="26B-A4B is a mixture of experts. Of checkpoints that also read images and "
        "sound (Gemma4ForConditionalGeneration) the text half loads.",
    ),
    Family(
        name="Gemma 4, unified",
        model_type="gemma4_unified_text",
        architecture="Gemma4UnifiedForCausalLM",
        to_spec=unified_spec,
        tool_parsers=("gemma4",),
        examples=("google/gemma-4-12B-it",),
        gguf=("gemma4",),
        note="Of checkpoints that also read images and sound "
        "(Gemma4UnifiedForConditionalGeneration) the text half loads.",
    ),
)
