"""Shapes of mixtures of experts and of Gemma, by the published sizes; what a step of a mixture has to read.

Checked shapes have few layers, and windows so short that the steps of checks run over their ends. A mixture reads
the experts that any row has chosen: how many these are is counted by the device, and bytes follow from the count.
"""

from benchmarks.gpu.models import QWEN3_FIELDS, TINY_SIZES, VALUE_BYTES, Config, has_room
from faser.engine.checkpoints.families.architecture import DecoderSpec, ExpertsSpec
from faser.engine.execution.models import tensors

QWEN3_30B_A3B: Config = QWEN3_FIELDS | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
GPT_OSS_20B: Config = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "max_position_embeddings": 131072,
    "vocab_size": 201088,
    "bos_token_id": 199998,
    "torch_dtype": "bfloat16",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "attention_bias": True,
    "tie_word_embeddings": False,
}
_GEMMA: Config = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": 262144,
    "bos_token_id": 2,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 8192,
    "head_dim": 256,
}
GEMMA3_1B: Config = _GEMMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "sliding_window": 512,
}
GEMMA2_2B: Config = _GEMMA | {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
}
_SHORT: Config = {"sliding_window": 48}
CHECKED: tuple[Config, ...] = (
    QWEN3_30B_A3B | {"num_hidden_layers": 2},
    GPT_OSS_20B | _SHORT | {"num_hidden_layers": 4},
    GEMMA3_1B | _SHORT | {"num_hidden_layers": 3, "sliding_window_pattern": 2},
)

_TINY_MIXTURE = TINY_SIZES | {"num_hidden_layers": 2}
TINY_QWEN3_MOE: Config = (
    QWEN3_30B_A3B | _TINY_MIXTURE | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
)
TINY_GPT_OSS: Config = GPT_OSS_20B | _TINY_MIXTURE | {"num_local_experts": 5, "num_experts_per_tok": 2} | _SHORT
TINY_GEMMA2: Config = GEMMA2_2B | _TINY_MIXTURE | _SHORT


def experts_of(spec: DecoderSpec) -> ExpertsSpec:
    """Return the experts of the first layer; in a mixture of these shapes all layers have the same."""
    found = spec.layers[0].feed_forward
    assert isinstance(found, ExpertsSpec), "the model is no mixture"
    return found


def num_experts(spec: DecoderSpec) -> int:
    """Count the experts of all layers together."""
    return spec.num_layers * experts_of(spec).num_experts


def expert_values(spec: DecoderSpec) -> int:
    """Count the values of one expert: gate, up and down, and their biases."""
    network = experts_of(spec)
    biases = 2 * network.size + spec.hidden_size if network.bias else 0
    return 3 * network.size * spec.hidden_size + biases


def other_values(spec: DecoderSpec) -> int:
    """Count the values that every step reads of a mixture: all weights but the experts and the embedding."""
    embedding = 0 if spec.tie_word_embeddings else spec.vocab_size * spec.hidden_size
    return tensors.num_parameters(spec) - num_experts(spec) * expert_values(spec) - embedding


def mixture_step_bytes(spec: DecoderSpec, *, experts: float, sequences: int, context: int) -> float:
    """Return the least bytes that a step reads. experts: that it reads, of all layers together; may be a mean.

    Of each sequence a layer reads the keys and values that its window leaves.
    """
    tokens = sum(min(context, each.window or context) for each in spec.attentions)
    cached = 2 * spec.attention.kv_size * tokens * sequences
    return VALUE_BYTES * (other_values(spec) + experts * expert_values(spec) + cached)


def mixture_step_flops(spec: DecoderSpec, *, rows: int) -> int:
    """Multiplications and additions of the products of rows, each through its own experts."""
    return 2 * rows * (other_values(spec) + spec.num_layers * experts_of(spec).top_k * expert_values(spec))


def cut_to_fit(config: Config, memory_bytes: int | None, *, sequences: int, context: int) -> Config:
    """With as many of its layers as a device has room for; None: all. Raises ValueError where that is none."""
    if memory_bytes is None:
        return config
    for layers in range(int(config["num_hidden_layers"]), 0, -1):
        cut = config | {"num_hidden_layers": layers}
        if has_room(memory_bytes, [cut], sequences=sequences, context=context):
            return cut
    raise ValueError(f"a device of {memory_bytes} bytes has no room for a layer of {config['model_type']}")
