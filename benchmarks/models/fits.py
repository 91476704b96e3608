"""Estimates on which GPU thirty published models fit, with which context and how many sequences.

    python -m benchmarks models.fits --out benchmarks/results/gpu-memory.json

Sizes are those of the models' published config.json files. Prints the table of docs/gpu.md.
"""

from pathlib import Path
from typing import Any

from benchmarks.gpu.families import GPT_OSS_20B, QWEN3_30B_A3B
from benchmarks.gpu.models import LLAMA_8B, QWEN3_8B, QWEN3_600M, Config
from benchmarks.runner import about, command_line, write_json
from faser.cli.memory import GPUS, as_fields, estimates
from faser.engine.checkpoints.families import decoder_spec
from faser.engine.checkpoints.files import ModelConfig
from faser.engine.checkpoints.quantized import stored_quantization

_SIZE_NAMES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
Sizes = tuple[int, int, int, int, int]
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
_MXFP4 = {"quant_method": "mxfp4"}
_QWEN2: Config = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
    "vocab_size": 152064,
    "bos_token_id": 151643,
    "torch_dtype": "bfloat16",
}
_MISTRAL: Config = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "vocab_size": 131072,
    "bos_token_id": 1,
    "torch_dtype": "bfloat16",
}
_GEMMA3: Config = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "vocab_size": 262208,
    "bos_token_id": 2,
    "torch_dtype": "bfloat16",
    "head_dim": 256,
    "sliding_window": 1024,
}
_GEMMA2: Config = _GEMMA3 | {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "max_position_embeddings": 8192,
    "vocab_size": 256000,
    "sliding_window": 4096,
}
_QWEN3_NEXT: Config = QWEN3_30B_A3B | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "max_position_embeddings": 262144,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "partial_rotary_factor": 0.25,
}
_PHI4: Config = _MISTRAL | {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "vocab_size": 100352,
    "max_position_embeddings": 16384,
    "original_max_position_embeddings": 16384,
    "pad_token_id": 0,
}
_MIXTRAL: Config = _MISTRAL | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_GLM4: Config = _MISTRAL | {
    "architectures": ["Glm4ForCausalLM"],
    "model_type": "glm4",
    "vocab_size": 151552,
    "partial_rotary_factor": 0.5,
    "pad_token_id": 0,
}
_SMOLLM3: Config = LLAMA_8B | {
    "architectures": ["SmolLM3ForCausalLM"],
    "model_type": "smollm3",
    "max_position_embeddings": 65536,
    "rope_scaling": None,
    "pad_token_id": 0,
}


def _sized(like: Config, sizes: Sizes, stored: Config | None = None, **fields: Any) -> Config:
    """A model of a family: sizes in the order of _SIZE_NAMES. stored: how its weights are quantised."""
    own = {"tie_word_embeddings": False} | dict(zip(_SIZE_NAMES, sizes, strict=True)) | fields
    return like | own | ({} if stored is None else {"quantization_config": stored})


_LLAMA_70B: Sizes = (8192, 28672, 80, 64, 8)
_QWEN2_32B: Sizes = (5120, 27648, 64, 40, 8)
_QWEN3_32B: Sizes = (5120, 25600, 64, 64, 8)
_QWEN3_235B: Sizes = (4096, 12288, 94, 64, 4)
MODELS: dict[str, Config] = {
    "meta-llama/Llama-3.2-3B-Instruct": _sized(LLAMA_8B, (3072, 8192, 28, 24, 8), tie_word_embeddings=True),
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA_8B,
    "meta-llama/Llama-3.3-70B-Instruct": _sized(LLAMA_8B, _LLAMA_70B),
    "casperhansen/llama-3.3-70b-instruct-awq": _sized(LLAMA_8B, _LLAMA_70B, _AWQ),
    "Qwen/Qwen2.5-7B-Instruct": _sized(_QWEN2, (3584, 18944, 28, 28, 4)),
    "Qwen/Qwen2.5-14B-Instruct": _sized(_QWEN2, (5120, 13824, 48, 40, 8)),
    "Qwen/Qwen2.5-Coder-32B-Instruct": _sized(_QWEN2, _QWEN2_32B),
    "Qwen/Qwen2.5-32B-Instruct-AWQ": _sized(_QWEN2, _QWEN2_32B, _AWQ),
    "Qwen/Qwen2.5-72B-Instruct-AWQ": _sized(_QWEN2, (8192, 29568, 80, 64, 8), _AWQ),
    "Qwen/Qwen3-0.6B": QWEN3_600M,
    "Qwen/Qwen3-4B-Instruct-2507": _sized(
        QWEN3_8B, (2560, 9728, 36, 32, 8), tie_word_embeddings=True, max_position_embeddings=262144
    ),
    "Qwen/Qwen3-8B": QWEN3_8B,
    "Qwen/Qwen3-8B-FP8": QWEN3_8B | {"quantization_config": _FP8},
    "Qwen/Qwen3-14B": _sized(QWEN3_8B, (5120, 17408, 40, 40, 8)),
    "Qwen/Qwen3-32B": _sized(QWEN3_8B, _QWEN3_32B),
    "Qwen/Qwen3-32B-FP8": _sized(QWEN3_8B, _QWEN3_32B, _FP8),
    "Qwen/Qwen3-32B-AWQ": _sized(QWEN3_8B, _QWEN3_32B, _AWQ),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": QWEN3_30B_A3B | {"max_position_embeddings": 262144},
    "Qwen/Qwen3-30B-A3B-Instruct-2507-FP8": QWEN3_30B_A3B
    | {"max_position_embeddings": 262144, "quantization_config": _FP8},
    "Qwen/Qwen3-30B-A3B-GPTQ-Int4": QWEN3_30B_A3B | {"quantization_config": _GPTQ},
    "Qwen/Qwen3-235B-A22B-Instruct-2507-FP8": _sized(
        QWEN3_30B_A3B, _QWEN3_235B, _FP8, moe_intermediate_size=1536, max_position_embeddings=262144
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct-FP8": _QWEN3_NEXT | {"quantization_config": _FP8},
    "mistralai/Mistral-7B-Instruct-v0.3": _sized(_MISTRAL, (4096, 14336, 32, 32, 8), vocab_size=32768),
    "mistralai/Mistral-Nemo-Instruct-2407": _sized(
        _MISTRAL, (5120, 14336, 40, 32, 8), max_position_embeddings=131072
    ),
    "mistralai/Mistral-Small-24B-Instruct-2501": _sized(_MISTRAL, (5120, 32768, 40, 32, 8)),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": _sized(_MIXTRAL, (4096, 14336, 32, 32, 8)),
    "microsoft/phi-4": _sized(_PHI4, (5120, 17920, 40, 40, 10)),
    "google/gemma-2-9b-it": _sized(_GEMMA2, (3584, 14336, 42, 16, 8), tie_word_embeddings=True),
    "google/gemma-3-12b-it": _sized(_GEMMA3, (3840, 15360, 48, 16, 8), tie_word_embeddings=True),
    "google/gemma-3-27b-it": _sized(_GEMMA3, (5376, 21504, 62, 32, 16), tie_word_embeddings=True, head_dim=128),
    "zai-org/GLM-4-32B-0414": _sized(_GLM4, (6144, 23040, 61, 48, 2)),
    "HuggingFaceTB/SmolLM3-3B": _sized(_SMOLLM3, (2048, 11008, 36, 16, 4), tie_word_embeddings=True),
    "openai/gpt-oss-20b": GPT_OSS_20B | {"quantization_config": _MXFP4},
    "openai/gpt-oss-120b": GPT_OSS_20B
    | {"num_hidden_layers": 36, "num_local_experts": 128, "quantization_config": _MXFP4},
}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    found = {name: fits(config) for name, config in MODELS.items()}
    write_json(arguments.out, about("models.fits") | {"models": found})
    print(table(found))


def fits(config: Config) -> dict[str, dict[str, int]]:
    """Estimate a model on each GPU, by the fields of its config.json."""
    model = ModelConfig(
        spec=decoder_spec(config),
        dtype="bfloat16",
        eos_token_ids=(),
        quantization=stored_quantization(config),
    )
    return {size: as_fields(each) for size, each in estimates(model, GPUS).items()}


def table(found: dict[str, dict[str, dict[str, int]]]) -> str:
    """Return a table in Markdown: of each model and GPU the longest context and the sequences of 8,192 tokens."""
    lines = [
        f"| model | weights | KV a token | {' | '.join(GPUS)} |",
        f"| --- | --- | --- |{' --- |' * len(GPUS)}",
    ]
    for name, sizes in found.items():
        some = sizes[next(iter(GPUS))]
        cells = [_cell(sizes[size]) for size in GPUS]
        weights, per_token = some["weights"] / (1 << 30), some["kv_token"] / 1024
        lines.append(f"| {name} | {weights:.1f} GiB | {per_token:.0f} KiB | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(sizes: dict[str, int]) -> str:
    if not sizes["longest_context"]:
        return "no"
    context = sizes["longest_context"]
    rounded = f"{context // 1024}k" if context >= 1024 else str(context)
    return f"{rounded}, {sizes['sequences']}"
