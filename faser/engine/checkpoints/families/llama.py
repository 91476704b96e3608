"""Llama 2 and 3, and models of the same architecture (SmolLM, SmolLM2, TinyLlama)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from faser.engine.checkpoints.families.architecture import DecoderSpec, LayerSpec
from faser.engine.checkpoints.families.family import EXPERT, LAYER, Config, Family, GgufArchitecture
from faser.engine.checkpoints.families.fields import Fields, attention, decoder, dense, rope_spec

if TYPE_CHECKING:
    from faser.engine.checkpoints.gguf.file import GgufFile


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    """attention_bias applies to queries, keys, values and the output."""
    fields = Fields(config)
    bias = fields.flag("attention_bias", False)
    layer = LayerSpec(
        attention=attention(fields, rope_spec(fields), bias=bias, out_bias=bias),
        feed_forward=dense(fields, bias=fields.flag("mlp_bias", False)),
    )
    return decoder(fields, (layer,) * fields.num_layers())


TENSORS = LAYER | {  # a mixture is a Mixtral
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": f"block_sparse_moe.experts.{EXPERT}.w1",
    "ffn_up_exps": f"block_sparse_moe.experts.{EXPERT}.w3",
    "ffn_down_exps": f"block_sparse_moe.experts.{EXPERT}.w2",
}


def _llama_fields(file: "GgufFile", _config: Config) -> Config:
    """A llama file with a window was converted from a Mistral checkpoint, one with experts from a Mixtral."""
    if experts := file.get("llama.expert_count", int, 0):
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": experts,
            "num_experts_per_tok": file.size("llama.expert_used_count"),
            "sliding_window": file.get("llama.attention.sliding_window", int) or None,
        }
    window = file.get("llama.attention.sliding_window", int)
    if not window:
        return {}
    return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}


GGUF: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture(
        class_name="LlamaForCausalLM",
        model_type="llama",
        tensors=TENSORS,
        permuted=True,
        windows=True,
        experts=True,
        own_fields=_llama_fields,
    ),
}
FAMILIES = (
    Family(
        name="Llama",
        model_type="llama",
        architecture="LlamaForCausalLM",
        to_spec=spec,
        tool_parsers=("llama3_json",),
        examples=(
            "meta-llama/Llama-3.2-1B-Instruct",
            "HuggingFaceTB/SmolLM2-135M-Instruct",
            "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        ),
        gguf=("llama",),
        files=("SmolLM2-135M-Instruct: safetensors, and GGUF Q4_1, the default model",),
    ),
)
