"""The model families: from a checkpoint's config.json to a DecoderSpec.

A family is one module with a function `spec(config)`. To add one, write its module and add its Family here: `faser
models`, docs/models.md and the architectures of GGUF files follow. Imports only faser.errors; start with
architecture.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from faser.engine.checkpoints.families import (
    gemma,
    gemma4,
    glm4,
    gpt_oss,
    granite,
    lfm2,
    llama,
    mistral,
    mixtures,
    phi3,
    qwen2,
    qwen3,
    qwen3_5,
    smollm3,
)
from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.checkpoints.families.wrappers import named_text_half, text_half
from faser.errors import ModelError

ToSpec = Callable[[Mapping[str, Any]], DecoderSpec]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models of one architecture. model_type, architecture: in config.json. to_spec: makes a DecoderSpec of that.

    tool_parsers: names of the formats that the chat templates of its models ask for; none: they know no tools.
    examples: ids of models on the hub whose config.json names the architecture. gguf: general.architecture of its
    GGUF files. files: real weights that FASER has served; the rest of its tests have tiny
    ones. note: what else to know of them.
    """

    name: str
    model_type: str
    architecture: str
    to_spec: ToSpec
    tool_parsers: tuple[str, ...]
    examples: tuple[str, ...]
    gguf: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    note: str = ""


FAMILIES = (
    Family(
        name="Llama",
        model_type="llama",
        architecture="LlamaForCausalLM",
        to_spec=llama.spec,
        tool_parsers=("llama3_json",),
        examples=(
            "meta-llama/Llama-3.2-1B-Instruct",
            "HuggingFaceTB/SmolLM2-135M-Instruct",
            "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        ),
        gguf=("llama",),
        files=("SmolLM2-135M-Instruct: safetensors, and GGUF Q4_1, the default model",),
    ),
    Family(
        name="Mistral",
        model_type="mistral",
        architecture="MistralForCausalLM",
        to_spec=mistral.spec,
        tool_parsers=("mistral",),
        examples=("mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Mistral-Nemo-Instruct-2407"),
        gguf=("llama", "mistral3"),
    ),
    Family(
        name="Ministral 3",
        model_type="ministral3",
        architecture="Ministral3ForCausalLM",
        to_spec=mistral.ministral3_spec,
        tool_parsers=("mistral",),
        examples=("mistralai/Devstral-2-123B-Instruct-2512",),
        gguf=("mistral3",),
        note="Checkpoints that also read images (Mistral3ForConditionalGeneration) load as their text half.",
    ),
    Family(
        name="Qwen2",
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        to_spec=qwen2.spec,
        tool_parsers=("hermes",),
        examples=("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-Coder-1.5B-Instruct"),
        gguf=("qwen2", "qwen2vl"),
        files=("Qwen2.5-Coder-1.5B: GGUF Q4_K_M",),
    ),
    Family(
        name="Qwen3",
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        to_spec=qwen3.spec,
        tool_parsers=("hermes",),
        examples=("Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B-Instruct-2507"),
        gguf=("qwen3", "qwen3vl"),
    ),
    Family(
        name="Qwen3.5, dense",
        model_type="qwen3_5_text",
        architecture="Qwen3_5ForCausalLM",
        to_spec=qwen3_5.spec,
        tool_parsers=("qwen3_coder",),
        examples=("Qwen/Qwen3.5-0.8B", "Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-9B"),
        gguf=("qwen35",),
        note="Gated delta nets; no GPU has run them. The MTP layer of a checkpoint drafts; of checkpoints that "
        "also read images (Qwen3_5ForConditionalGeneration) the text half loads.",
    ),
    Family(
        name="Qwen3.5-MoE",
        model_type="qwen3_5_moe_text",
        architecture="Qwen3_5MoeForCausalLM",
        to_spec=qwen3_5.moe_spec,
        tool_parsers=("qwen3_coder",),
        examples=("Qwen/Qwen3.5-35B-A3B", "Qwen/Qwen3.6-35B-A3B"),
        gguf=("qwen35moe",),
        note="A mixture of experts with gated delta nets; no GPU has run them. The MTP layer of a checkpoint "
        "drafts; of checkpoints that also read images (Qwen3_5MoeForConditionalGeneration) the text half loads.",
    ),
    Family(
        name="Qwen3-Next",
        model_type="qwen3_next",
        architecture="Qwen3NextForCausalLM",
        to_spec=qwen3_5.next_spec,
        tool_parsers=("hermes", "qwen3_coder"),
        examples=("Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen/Qwen3-Coder-Next"),
        gguf=("qwen3next",),
        note="A mixture of experts with gated delta nets; no GPU has run them. The MTP layer of a checkpoint "
        "drafts.",
    ),
    Family(
        name="SmolLM3",
        model_type="smollm3",
        architecture="SmolLM3ForCausalLM",
        to_spec=smollm3.spec,
        tool_parsers=("hermes",),
        examples=("HuggingFaceTB/SmolLM3-3B",),
        gguf=("smollm3",),
    ),
    Family(
        name="Phi-3",
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        to_spec=phi3.spec,
        tool_parsers=("phi4_mini_json",),
        examples=("microsoft/Phi-3-mini-4k-instruct", "microsoft/phi-4", "microsoft/Phi-4-mini-instruct"),
        gguf=("phi3",),
    ),
    Family(
        name="Granite",
        model_type="granite",
        architecture="GraniteForCausalLM",
        to_spec=granite.spec,
        tool_parsers=("granite",),
        examples=("ibm-granite/granite-3.3-2b-instruct", "ibm-granite/granite-3.3-8b-instruct"),
        gguf=("granite",),
    ),
    Family(
        name="Granite 4, dense",
        model_type="granitemoehybrid",
        architecture="GraniteMoeHybridForCausalLM",
        to_spec=granite.hybrid_spec,
        tool_parsers=("hermes",),
        examples=("ibm-granite/granite-4.0-micro", "ibm-granite/granite-4.0-350m"),
        gguf=("granite",),
        note="Models with Mamba layers (the names with an h) are refused.",
    ),
    Family(
        name="Granite-MoE",
        model_type="granitemoe",
        architecture="GraniteMoeForCausalLM",
        to_spec=granite.moe_spec,
        tool_parsers=("granite",),
        examples=("ibm-granite/granite-3.1-1b-a400m-instruct", "ibm-granite/granite-3.1-3b-a800m-instruct"),
        gguf=("granitemoe",),
        note="A mixture of experts. An H200 has run its kernels, in the shapes of Qwen3-MoE and gpt-oss.",
    ),
    Family(
        name="Gemma 2",
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        to_spec=gemma.gemma2_spec,
        tool_parsers=(),
        examples=("google/gemma-2-2b-it", "google/gemma-2-9b-it"),
        gguf=("gemma2",),
    ),
    Family(
        name="Gemma 3",
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        to_spec=gemma.gemma3_spec,
        tool_parsers=(),
        examples=("google/gemma-3-270m-it", "google/gemma-3-1b-it"),
        gguf=("gemma3",),
        note="From 4B on they also read images (Gemma3ForConditionalGeneration): their text half loads.",
    ),
    Family(
        name="Gemma 4",
        model_type="gemma4_text",
        architecture="Gemma4ForCausalLM",
        to_spec=gemma4.spec,
        tool_parsers=("gemma4",),
        examples=("google/gemma-4-E2B-it", "google/gemma-4-26B-A4B-it", "google/gemma-4-31B-it"),
        gguf=("gemma4",),
        note="No GPU has run it yet. 26B-A4B is a mixture of experts. Of checkpoints that also read images and "
        "sound (Gemma4ForConditionalGeneration) the text half loads.",
    ),
    Family(
        name="Gemma 4, unified",
        model_type="gemma4_unified_text",
        architecture="Gemma4UnifiedForCausalLM",
        to_spec=gemma4.unified_spec,
        tool_parsers=("gemma4",),
        examples=("google/gemma-4-12B-it",),
        gguf=("gemma4",),
        note="No GPU has run it yet. Of checkpoints that also read images and sound "
        "(Gemma4UnifiedForConditionalGeneration) the text half loads.",
    ),
    Family(
        name="GLM-4",
        model_type="glm4",
        architecture="Glm4ForCausalLM",
        to_spec=glm4.spec,
        tool_parsers=("glm4",),
        examples=("zai-org/GLM-4-9B-0414", "zai-org/GLM-4-32B-0414"),
        gguf=("glm4",),
    ),
    Family(
        name="Qwen3-MoE",
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        to_spec=mixtures.qwen3_moe_spec,
        tool_parsers=("hermes", "qwen3_coder"),
        examples=("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-Coder-30B-A3B-Instruct"),
        gguf=("qwen3moe",),
        note="A mixture of experts. An H200 has run this shape, with made-up weights.",
    ),
    Family(
        name="Mixtral",
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        to_spec=mixtures.mixtral_spec,
        tool_parsers=(),
        examples=("mistralai/Mixtral-8x7B-Instruct-v0.1",),
        gguf=("llama",),
        note="A mixture of experts. An H200 has run its kernels, in the shapes of Qwen3-MoE and gpt-oss.",
    ),
    Family(
        name="OLMoE",
        model_type="olmoe",
        architecture="OlmoeForCausalLM",
        to_spec=mixtures.olmoe_spec,
        tool_parsers=(),
        examples=("allenai/OLMoE-1B-7B-0924-Instruct", "allenai/OLMoE-1B-7B-0125-Instruct"),
        gguf=("olmoe",),
        note="A mixture of experts. An H200 has run its kernels, in the shapes of Qwen3-MoE and gpt-oss.",
    ),
    Family(
        name="gpt-oss",
        model_type="gpt_oss",
        architecture="GptOssForCausalLM",
        to_spec=gpt_oss.spec,
        tool_parsers=("openai",),
        examples=("openai/gpt-oss-20b", "openai/gpt-oss-120b"),
        gguf=("gpt-oss",),
        note="A mixture of experts, stored in MXFP4, which GPUs hold in 16 bits. An H200 has run the shape of "
        "the 20b, with made-up weights.",
    ),
    Family(
        name="LFM2, LFM2.5",
        model_type="lfm2",
        architecture="Lfm2ForCausalLM",
        to_spec=lfm2.spec,
        tool_parsers=("lfm2",),
        examples=("LiquidAI/LFM2-1.2B", "LiquidAI/LFM2.5-1.2B-Instruct"),
        gguf=("lfm2",),
        note="Short convolutions, which CPUs compute.",
    ),
    Family(
        name="LFM2-MoE",
        model_type="lfm2_moe",
        architecture="Lfm2MoeForCausalLM",
        to_spec=lfm2.moe_spec,
        tool_parsers=("lfm2",),
        examples=("LiquidAI/LFM2-8B-A1B",),
        gguf=("lfm2moe",),
        note="A mixture of experts with short convolutions, which CPUs compute.",
    ),
)

# What a model of another architecture may have, by the field of its config.json that shows it.
_FOREIGN = {
    "vision_config": "it reads images",
    "audio_config": "it reads sound",
    "num_experts": "it is a mixture of experts",
    "num_local_experts": "it is a mixture of experts",
    "n_routed_experts": "it is a mixture of experts",
}


def decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The decoder that a config.json describes; of a vision-language wrapper, that of its text half.

    Raises ModelError as find_family does, or for a field.
    """
    family, half = find_family(config), text_half(config)
    return family.to_spec(config if half is None else half.config)


def find_family(config: Mapping[str, Any]) -> Family:
    """The family of a config.json: that of its architecture, or without one that of its model_type.

    Of a vision-language wrapper: the family of its text half. Raises ModelError that names the unknown
    architecture, and a field that shows why it is none of ours.
    """
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(each, str) for each in architectures):
        raise ModelError(f"config.json: architectures is {architectures!r}; it must be a list of names")
    if (half := text_half(config)) is not None:
        return find_family(half.config)
    by_class = {each.architecture: each for each in FAMILIES}
    by_type = {each.model_type: each for each in FAMILIES}
    model_type = config.get("model_type")
    known = [by_class[each] for each in architectures if each in by_class]
    if not architectures and isinstance(model_type, str) and model_type in by_type:
        known = [by_type[model_type]]
    if not known:
        unknown = ", ".join(architectures) or f"model_type {model_type}"
        if (text := named_text_half(config)) is not None:
            unknown += f" with the text half {text}"
        why = next((f" ({name}: {what})" for name, what in _FOREIGN.items() if config.get(name)), "")
        raise ModelError(f"architecture {unknown} is not supported{why}; supported are {', '.join(by_class)}")
    return known[0]
