"""Writes a GGUF file of Qwen2.5-1.5B's shape with random weights in Q4_K and Q6_K, as llama.cpp's Q4_K_M has them.

    python -m benchmarks.models.random_gguf OUT.gguf VOCABULARY.gguf [--layers 28]

The vocabulary and its merges come from another file: llama.cpp has models/ggml-vocab-qwen2.gguf, which has no
tensors. What the model says means nothing; its start and its steps take as long as those of the real one.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

from benchmarks.runner import command_line
from faser.engine.checkpoints.gguf.file import GgufFile

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, VOCABULARY = 1536, 8960, 12, 2, 151_936
_HEAD_DIM = HIDDEN // HEADS
_STD = 0.02  # of a weight, about
_COPIED = ("model", "pre", "tokens", "token_type", "merges")
_Bytes = npt.NDArray[np.uint8]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("vocabulary", type=Path)
    parser.add_argument("--layers", type=int, default=28)
    options = parser.parse_args()
    write(options.out, GgufFile(options.vocabulary), options.layers)
    print(f"{options.out}: {options.out.stat().st_size / 1e9:.2f} GB")


def write(out: Path, vocabulary: GgufFile, num_layers: int) -> None:
    """vocabulary: filled up with unused tokens to the model's size."""
    writer, rng = GGUFWriter(out, "qwen2"), np.random.default_rng(0)
    writer.add_block_count(num_layers)
    writer.add_context_length(32_768)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    _add_vocabulary(writer, vocabulary)

    def add(name: str, columns: int, depth: int, kind: GGMLQuantizationType) -> None:
        writer.add_tensor(name, random_blocks(rng, columns, depth, kind), raw_dtype=kind)

    def add_vector(name: str, size: int, value: float) -> None:
        writer.add_tensor(name, np.full(size, value, np.float32))

    add("token_embd.weight", VOCABULARY, HIDDEN, GGMLQuantizationType.Q6_K)
    add_vector("output_norm.weight", HIDDEN, 1.0)
    for layer in range(num_layers):
        prefix = f"blk.{layer}."
        # Q4_K_M keeps half of the values and down projections in six bits.
        wide = GGMLQuantizationType.Q6_K if layer % 2 else GGMLQuantizationType.Q4_K
        add(f"{prefix}attn_q.weight", HIDDEN, HIDDEN, GGMLQuantizationType.Q4_K)
        add(f"{prefix}attn_k.weight", KV_HEADS * _HEAD_DIM, HIDDEN, GGMLQuantizationType.Q4_K)
        add(f"{prefix}attn_v.weight", KV_HEADS * _HEAD_DIM, HIDDEN, wide)
        add(f"{prefix}attn_output.weight", HIDDEN, HIDDEN, GGMLQuantizationType.Q4_K)
        add(f"{prefix}ffn_gate.weight", INTERMEDIATE, HIDDEN, GGMLQuantizationType.Q4_K)
        add(f"{prefix}ffn_up.weight", INTERMEDIATE, HIDDEN, GGMLQuantizationType.Q4_K)
        add(f"{prefix}ffn_down.weight", HIDDEN, INTERMEDIATE, wide)
        for name, size in (("q", HIDDEN), ("k", KV_HEADS * _HEAD_DIM), ("v", KV_HEADS * _HEAD_DIM)):
            add_vector(f"{prefix}attn_{name}.bias", size, 0.0)
        for name in ("attn_norm", "ffn_norm"):
            add_vector(f"{prefix}{name}.weight", HIDDEN, 1.0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_blocks(rng: np.random.Generator, columns: int, depth: int, kind: GGMLQuantizationType) -> _Bytes:
    """[columns, bytes of a row]: random codes and scales; the block's own scale makes weights of about _STD."""
    values, num_bytes = GGML_QUANT_SIZES[kind]
    count = columns * depth // values
    blocks = rng.integers(0, 256, (count, num_bytes), np.uint8)
    if kind is GGMLQuantizationType.Q4_K:  # scale * 6 bits * code - minimum * 6 bits, centred
        scale = _STD / (32 * 4.6)
        blocks[:, :4] = np.array([scale, 7.5 * scale], np.float16).view(np.uint8)
    elif kind is GGMLQuantizationType.Q6_K:  # scale * 8 signed bits * (code - 32)
        blocks[:, -2:] = np.array([_STD / (74 * 18.5)], np.float16).view(np.uint8)
    else:
        raise ValueError(f"random blocks are of Q4_K and Q6_K, not of {kind.name}")
    return blocks.reshape(columns, -1)


def _add_vocabulary(writer: GGUFWriter, vocabulary: GgufFile) -> None:
    model, pre, tokens, types, merges = (vocabulary.value(f"tokenizer.ggml.{name}") for name in _COPIED)
    unused = VOCABULARY - len(tokens)
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
