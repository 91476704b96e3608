"""Writes a GGUF file of a model's shape with random weights in Q4_K and Q6_K, as llama.cpp's Q4_K_M has them.

That of gpt-oss is as ggml-org's: experts in MXFP4, all other matrices in Q8_0.

    python -m benchmarks.models.random_gguf OUT.gguf VOCABULARY.gguf [--shape qwen2.5-1.5b] [--layers 28]

The vocabulary and its merges come from another file: llama.cpp has models/ggml-vocab-qwen2.gguf, which has no
tensors. What the model says means nothing; its start and its steps take as long as those of the real one.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGUFWriter, RopeScalingType
from gguf import GGMLQuantizationType as Kind

from benchmarks.runner import command_line
from faser.engine.checkpoints.gguf.file import GgufFile


@dataclass(frozen=True, kw_only=True)
class Shape:
    """experts: how many, and how many of them a token passes, of `inner` each; None: one network of `inner`.

    kinds: of the embedding; of most matrices; of half of the values and down projections, as Q4_K_M has them; of
    experts' matrices, None: as of others.
    """

    architecture: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    experts: tuple[int, int] | None = None
    vocabulary: int = 151_936
    kinds: tuple[Kind, Kind, Kind, Kind | None] = (Kind.Q6_K, Kind.Q4_K, Kind.Q6_K, None)


SHAPES = {
    "qwen2.5-1.5b": Shape(
        architecture="qwen2", hidden=1536, inner=8960, heads=12, kv_heads=2, head_dim=128, layers=28
    ),
    "qwen3-30b-a3b": Shape(
        architecture="qwen3moe",
        hidden=2048,
        inner=768,
        heads=32,
        kv_heads=4,
        head_dim=128,
        layers=48,
        experts=(128, 8),
    ),
    "gpt-oss-20b": Shape(
        architecture="gpt-oss",
        hidden=2880,
        inner=2880,
        heads=64,
        kv_heads=8,
        head_dim=64,
        layers=24,
        experts=(32, 4),
        vocabulary=201_088,
        kinds=(Kind.Q8_0, Kind.Q8_0, Kind.Q8_0, Kind.MXFP4),
    ),
}
_YARN_FACTOR, _YARN_CONTEXT, _WINDOW = 32.0, 4096, 128  # of gpt-oss
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_STD = 0.02  # of a weight, about
_COPIED = ("model", "pre", "tokens", "token_type", "merges")
_Bytes = npt.NDArray[np.uint8]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("vocabulary", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-1.5b", help="[qwen2.5-1.5b]")
    parser.add_argument("--layers", type=int, help="fewer than the shape has, where memory is short [all]")
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    write(options.out, GgufFile(options.vocabulary), shape, options.layers or shape.layers)
    print(f"{options.out}: {options.out.stat().st_size / 1e9:.2f} GB")


def write(out: Path, vocabulary: GgufFile, shape: Shape, num_layers: int) -> None:
    """vocabulary: filled up with unused tokens to the model's size."""
    writer, rng = GGUFWriter(out, shape.architecture), np.random.default_rng(0)
    writer.add_block_count(num_layers)
    is_gpt_oss = shape.architecture == "gpt-oss"
    writer.add_context_length(131_072 if is_gpt_oss else 32_768)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5 if is_gpt_oss else 1e-6)
    writer.add_rope_freq_base(150_000.0 if is_gpt_oss else 1e6)
    if is_gpt_oss:
        writer.add_sliding_window(_WINDOW)
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(_YARN_FACTOR)
        writer.add_rope_scaling_orig_ctx_len(_YARN_CONTEXT)
    if shape.experts:
        writer.add_expert_count(shape.experts[0])
        writer.add_expert_used_count(shape.experts[1])
        writer.add_expert_feed_forward_length(shape.inner)
    writer.add_chat_template(_CHAT_TEMPLATE)
    _add_vocabulary(writer, vocabulary, shape.vocabulary)

    def add(name: str, columns: int, depth: int, kind: Kind) -> None:
        writer.add_tensor(name, random_blocks(rng, columns, depth, kind), raw_dtype=kind)

    def add_network(name: str, columns: int, depth: int, kind: Kind) -> None:
        if shape.experts is None:
            add(f"{name}.weight", columns, depth, kind)
            return
        kind = of_experts or kind
        blocks = random_blocks(rng, shape.experts[0] * columns, depth, kind)
        writer.add_tensor(f"{name}_exps.weight", blocks.reshape(shape.experts[0], columns, -1), raw_dtype=kind)
        if is_gpt_oss:
            writer.add_tensor(f"{name}_exps.bias", np.zeros((shape.experts[0], columns), np.float32))

    def add_vector(name: str, size: int, value: float) -> None:
        writer.add_tensor(name, np.full(size, value, np.float32))

    of_embedding, usual, of_half, of_experts = shape.kinds
    hidden, queries, keys = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    add("token_embd.weight", shape.vocabulary, hidden, of_embedding)
    add_vector("output_norm.weight", hidden, 1.0)
    if is_gpt_oss:
        add("output.weight", shape.vocabulary, hidden, of_embedding)
    for layer in range(num_layers):
        prefix = f"blk.{layer}."
        wide = of_half if layer % 2 else usual
        add(f"{prefix}attn_q.weight", queries, hidden, usual)
        add(f"{prefix}attn_k.weight", keys, hidden, usual)
        add(f"{prefix}attn_v.weight", keys, hidden, wide)
        add(f"{prefix}attn_output.weight", hidden, queries, usual)
        add_network(f"{prefix}ffn_gate", shape.inner, hidden, usual)
        add_network(f"{prefix}ffn_up", shape.inner, hidden, usual)
        add_network(f"{prefix}ffn_down", hidden, shape.inner, wide)
        if shape.experts:
            router = rng.standard_normal((shape.experts[0], hidden), np.float32) * _STD
            writer.add_tensor(f"{prefix}ffn_gate_inp.weight", router)
        if shape.architecture in ("qwen2", "gpt-oss"):
            for name, size in (("q", queries), ("k", keys), ("v", keys)):
                add_vector(f"{prefix}attn_{name}.bias", size, 0.0)
        if is_gpt_oss:
            assert shape.experts is not None
            add_vector(f"{prefix}attn_output.bias", hidden, 0.0)
            add_vector(f"{prefix}attn_sinks.weight", shape.heads, 0.0)
            add_vector(f"{prefix}ffn_gate_inp.bias", shape.experts[0], 0.0)
        elif shape.architecture != "qwen2":
            for name in ("attn_q_norm", "attn_k_norm"):
                add_vector(f"{prefix}{name}.weight", shape.head_dim, 1.0)
        for name in ("attn_norm", "post_attention_norm" if is_gpt_oss else "ffn_norm"):
            add_vector(f"{prefix}{name}.weight", hidden, 1.0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_blocks(rng: np.random.Generator, columns: int, depth: int, kind: Kind) -> _Bytes:
    """[columns, bytes of a row]: random codes and scales; the block's own scale makes weights of about _STD."""
    values, num_bytes = GGML_QUANT_SIZES[kind]
    count = columns * depth // values
    blocks = rng.integers(0, 256, (count, num_bytes), np.uint8)
    if kind is Kind.Q4_K:  # scale * 6 bits * code - minimum * 6 bits, centred
        scale = _STD / (32 * 4.6)
        blocks[:, :4] = np.array([scale, 7.5 * scale], np.float16).view(np.uint8)
    elif kind is Kind.Q6_K:  # scale * 8 signed bits * (code - 32)
        blocks[:, -2:] = np.array([_STD / (74 * 18.5)], np.float16).view(np.uint8)
    elif kind is Kind.Q8_0:  # scale * 8 signed bits
        blocks[:, :2] = np.array([_STD / 74], np.float16).view(np.uint8)
    elif kind is Kind.MXFP4:  # 2^(byte - 127) * a float of four bits
        blocks[:, 0] = round(np.log2(_STD / 2.9)) + 127
    else:
        raise ValueError(f"random blocks are of Q4_K, Q6_K, Q8_0 and MXFP4, not of {kind.name}")
    return blocks.reshape(columns, -1)


def _add_vocabulary(writer: GGUFWriter, vocabulary: GgufFile, size: int) -> None:
    model, pre, tokens, types, merges = (vocabulary.value(f"tokenizer.ggml.{name}") for name in _COPIED)
    unused = size - len(tokens)
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*tokens, *(f"[PAD{len(tokens) + i}]" for i in range(unused))])
    writer.add_token_types([*types, *[5] * unused])
    writer.add_token_merges(merges)
    for role in ("bos", "eos"):
        if (token_id := vocabulary.get(f"tokenizer.ggml.{role}_token_id", int)) is not None:
            (writer.add_bos_token_id if role == "bos" else writer.add_eos_token_id)(token_id)


if __name__ == "__main__":
    main()
