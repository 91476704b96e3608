"""Granite 3 and 4: a Llama with four constants; of GraniteMoe with a mixture of experts in every layer.

Embeddings are multiplied by embedding_multiplier, what a layer adds by residual_multiplier r, scores by
attention_multiplier; logits are divided by logits_scaling. The residual stream is kept divided by r here, so that
nothing multiplies what a layer adds: norms give the same with eps / r².
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from faser.engine.checkpoints.families import llama
from faser.engine.checkpoints.families.architecture import (
    DecoderSpec,
    DenseSpec,
    ExpertsSpec,
    LayerSpec,
    RopeSpec,
    StackedExperts,
    TensorNames,
)
from faser.engine.checkpoints.families.family import Config, Family, GgufArchitecture
from faser.engine.checkpoints.families.fields import Fields, attention, decoder, dense, rope_spec
from faser.engine.checkpoints.families.mixtures import local_experts
from faser.errors import ModelError

if TYPE_CHECKING:
    from faser.engine.checkpoints.gguf.file import GgufFile

_NAMES = TensorNames()
_MOE_NAMES = TensorNames(
    router="block_sparse_moe.router.layer",
    expert="block_sparse_moe.experts.{}.",
    expert_parts=("w1", "w3", "w2"),
    stacked_experts=StackedExperts.HALVES,
)
_HYBRID_NAMES = TensorNames(gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear")
_ATTENTION = ("attention", "full_attention")


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    fields = Fields(config)
    return _decoder(fields, rope_spec(fields), dense(fields, bias=fields.flag("mlp_bias", False)), _NAMES)


def moe_spec(config: Mapping[str, Any]) -> DecoderSpec:
    fields = Fields(config)
    return _decoder(fields, rope_spec(fields), local_experts(fields), _MOE_NAMES)


def hybrid_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """Read a Granite 4 of attention and dense networks alone. Raises ModelError for a layer of Mamba."""
    fields = Fields(config)
    num_layers = fields.num_layers()
    listed = fields.optional_list("layer_types", num_layers) or ["mamba"] * num_layers
    for number, kind in enumerate(listed):
        if kind not in _ATTENTION:
            raise ModelError(f"config.json: layer_types[{number}] is {kind!r}; only attention is supported")
    experts = config.get("num_local_experts", 8)
    if experts != 0:
        raise ModelError(
            f"config.json: num_local_experts is {experts}; experts beside a shared one are not supported"
        )
    fields.expect("position_embedding_type", ("rope", "nope"), "only rope, or none, is supported")
    rope = rope_spec(fields) if config.get("position_embedding_type") == "rope" else None
    network = DenseSpec(size=fields.positive_int("shared_intermediate_size", 1024), activation=fields.activation())
    return _decoder(fields, rope, network, _HYBRID_NAMES)


def _decoder(
    fields: Fields, rope: RopeSpec | None, network: DenseSpec | ExpertsSpec, names: TensorNames
) -> DecoderSpec:
    """attention_bias applies to queries, keys, values and the output."""
    bias = fields.flag("attention_bias", False)
    scale = fields.positive_float("attention_multiplier", 1.0)
    layer = LayerSpec(
        attention=attention(fields, rope, scale=scale, bias=bias, out_bias=bias), feed_forward=network
    )
    residual = fields.positive_float("residual_multiplier", 1.0)
    return decoder(
        fields,
        (layer,) * fields.num_layers(),
        rms_norm_eps=fields.positive_float("rms_norm_eps", 1e-6) / residual**2,
        embedding_scale=fields.positive_float("embedding_multiplier", 1.0) / residual,
        logit_scale=1 / fields.positive_float("logits_scaling", 1.0),
        names=names,
    )


_GRANITE_MOE = llama.TENSORS | {"ffn_gate_inp": "block_sparse_moe.router.layer"}


def _granite_fields(file: "GgufFile", config: Config, name: str = "granite") -> Config:
    """attention.scale: of the scores; none, or 0: 1 / √head_dim."""
    if not file.get(f"{name}.rope.scaling.finetuned", bool, True):
        raise ModelError(
            f"{file.path}: {name}.rope.scaling.finetuned is false; only models with rope are supported"
        )
    return {
        "attention_multiplier": file.number(f"{name}.attention.scale", 0.0) or config["head_dim"] ** -0.5,
        "embedding_multiplier": file.number(f"{name}.embedding_scale", 0.0) or 1.0,
        "residual_multiplier": file.number(f"{name}.residual_scale", 0.0) or 1.0,
        "logits_scaling": file.number(f"{name}.logit_scale", 0.0) or 1.0,
    }


def _granite_moe_fields(file: "GgufFile", config: Config) -> Config:
    return _granite_fields(file, config, "granitemoe") | {
        "num_local_experts": file.size("granitemoe.expert_count"),
        "num_experts_per_tok": file.size("granitemoe.expert_used_count"),
    }


GGUF: Mapping[str, GgufArchitecture] = {
    "granite": GgufArchitecture(
        class_name="GraniteForCausalLM", model_type="granite", permuted=True, own_fields=_granite_fields
    ),
    "granitemoe": GgufArchitecture(
        class_name="GraniteMoeForCausalLM",
        model_type="granitemoe",
        tensors=_GRANITE_MOE,
        permuted=True,
        experts=True,
        own_fields=_granite_moe_fields,
    ),
}
FAMILIES = (
    Family(
        name="Granite",
        model_type="granite",
        architecture="GraniteForCausalLM",
        to_spec=spec,
        tool_parsers=("granite",),
        examples=("ibm-granite/granite-3.3-2b-instruct", "ibm-granite/granite-3.3-8b-instruct"),
        gguf=("granite",),
    ),
    Family(
        name="Granite 4, dense",
        model_type="granitemoehybrid",
        architecture="GraniteMoeHybridForCausalLM",
        to_spec=hybrid_spec,
        tool_parsers=("hermes",),
        examples=("ibm-granite/granite-4.0-micro", "ibm-granite/granite-4.0-350m"),
        gguf=("granite",),
        note="Models with Mamba layers (the names with an h) are refused.",
    ),
    Family(
        name="Granite-MoE",
        model_type="granitemoe",
        architecture="GraniteMoeForCausalLM",
        to_spec=moe_spec,
        tool_parsers=("granite",),
        examples=("ibm-granite/granite-3.1-1b-a400m-instruct", "ibm-granite/granite-3.1-3b-a800m-instruct"),
        gguf=("granitemoe",),
        note="A mixture of experts.",
    ),
)
