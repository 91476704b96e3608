"""Writes a GGUF file of a model's shape with random weights in Q4_K and Q6_K, as llama.cpp's Q4_K_M has them.

That of gpt-oss is as ggml-org's: experts in MXFP4, all other matrices in Q8_0.

    python -m benchmarks models.random_gguf OUT.gguf VOCABULARY.gguf [--shape qwen2.5-1.5b] [--layers 28]
        [--weights q8_0] [--mtp wrong]

The vocabulary and its merges come from another file: llama.cpp has models/ggml-vocab-qwen2.gguf, which has no
tensors, and ggml-vocab-qwen35.gguf; it may as well be a whole model's. What the model says means nothing; its
start and its steps take as long as those of the real one.

With --mtp the file has a layer that drafts, all wrong or all right: it is random, or the model says
its last token again and the layer knows that. A step takes as long with either.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGUFWriter, RopeScalingType
from gguf import GGMLQuantizationType as Kind
from gguf.quants import quantize

from benchmarks.runner import command_line
from faser.engine.checkpoints.gguf.file import GgufFile


@dataclass(frozen=True, kw_only=True)
class Shape:
    """experts: how many, and how many of them a token passes, of `inner` each; None: one network of `inner`.

    shared: of one expert more, which every token passes; 0: there is none. delta_heads: key heads, value heads and
    channels of a head of the delta nets that three of four layers have; None: all layers have attention.
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
    shared: int = 0
    delta_heads: tuple[int, int, int] | None = None
    vocabulary: int = 151_936
    kinds: tuple[Kind, Kind, Kind, Kind | None] = (Kind.Q6_K, Kind.Q4_K, Kind.Q6_K, None)


SHAPES = {
    "qwen2.5-1.5b": Shape(
        architecture="qwen2", hidden=1536, inner=8960, heads=12, kv_heads=2, head_dim=128, layers=28
    ),
    "qwen3-embedding-0.6b": Shape(
        architecture="qwen3", hidden=1024, inner=3072, heads=16, kv_heads=8, head_dim=128, layers=28
    ),
    "qwen3-4b": Shape(
        architecture="qwen3", hidden=2560, inner=9728, heads=32, kv_heads=8, head_dim=128, layers=36
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
    "qwen3.5-0.8b": Shape(
        architecture="qwen35",
        hidden=1024,
        inner=3584,
        heads=8,
        kv_heads=2,
        head_dim=256,
        layers=24,
        delta_heads=(16, 16, 128),
        vocabulary=248_320,
    ),
    "qwen3.5-4b": Shape(
        architecture="qwen35",
        hidden=2560,
        inner=9216,
        heads=16,
        kv_heads=4,
        head_dim=256,
        layers=32,
        delta_heads=(16, 32, 128),
        vocabulary=248_320,
    ),
    "qwen3.5-35b-a3b": Shape(
        architecture="qwen35moe",
        hidden=2048,
        inner=512,
        heads=16,
        kv_heads=2,
        head_dim=256,
        layers=40,
        experts=(256, 8),
        shared=512,
        delta_heads=(16, 32, 128),
        vocabulary=248_320,
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
# With delta nets: every fourth layer has attention, convolutions see 4 tokens, a quarter of a head is rotated.
_INTERVAL, _KERNEL, _ROTATED = 4, 4, 4
_SECTIONS = [11, 11, 10, 0]  # of rope with delta nets, of use for images
_YARN_FACTOR, _YARN_CONTEXT, _WINDOW = 32.0, 4096, 128  # of gpt-oss
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_STD, _LITTLE = 0.02, 1e-4  # of a weight, about; of one that adds next to nothing
_COPIED = ("model", "pre", "tokens", "token_type", "merges")
_Bytes = npt.NDArray[np.uint8]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("vocabulary", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-1.5b", help="[qwen2.5-1.5b]")
    parser.add_argument("--layers", type=int, help="fewer than the shape has, where memory is short [all]")
    parser.add_argument("--weights", choices=("q8_0",), help="of all matrices [as described above]")
    parser.add_argument("--mtp", choices=("wrong", "right"), help="a layer that drafts, of models with delta nets")
    options = parser.parse_args()
    if options.mtp and not SHAPES[options.shape].delta_heads:
        parser.error(f"--mtp is of models with delta nets, which {options.shape} is none of")
    shape = SHAPES[options.shape]
    if options.weights:
        shape = replace(shape, kinds=(Kind.Q8_0, Kind.Q8_0, Kind.Q8_0, None))
    write(options.out, GgufFile(options.vocabulary), shape, options.layers or shape.layers, options.mtp)
    print(f"{options.out}: {options.out.stat().st_size / 1e9:.2f} GB")


def write(out: Path, vocabulary: GgufFile, shape: Shape, num_layers: int, mtp: str | None = None) -> None:
    """vocabulary: filled up with unused tokens to the model's size. mtp: wrong, right; None: no layer drafts."""
    writer = GGUFWriter(out, shape.architecture)
    _add_keys(writer, shape, num_layers + (mtp is not None))
    if mtp is not None:
        writer.add_uint32(f"{shape.architecture}.nextn_predict_layers", 1)
    _add_vocabulary(writer, vocabulary, shape.vocabulary)
    tensors = _Tensors(writer, shape, repeats=mtp == "right")
    tensors.add_outer()
    for layer in range(num_layers):
        tensors.add_layer(layer, drafts=False)
    if mtp is not None:
        tensors.add_layer(num_layers, drafts=True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_keys(writer: GGUFWriter, shape: Shape, num_layers: int) -> None:
    is_gpt_oss = shape.architecture == "gpt-oss"
    writer.add_block_count(num_layers)
    writer.add_context_length(131_072 if is_gpt_oss else 32_768)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5 if is_gpt_oss else 1e-6)
    writer.add_rope_freq_base(150_000.0 if is_gpt_oss else 1e7 if shape.delta_heads else 1e6)
    if is_gpt_oss:
        writer.add_sliding_window(_WINDOW)
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(_YARN_FACTOR)
        writer.add_rope_scaling_orig_ctx_len(_YARN_CONTEXT)
    if shape.experts:
        writer.add_expert_count(shape.experts[0])
        writer.add_expert_used_count(shape.experts[1])
        writer.add_expert_feed_forward_length(shape.inner)
    if shape.shared:
        writer.add_expert_shared_feed_forward_length(shape.shared)
    if shape.delta_heads:
        k_heads, v_heads, channels = shape.delta_heads
        writer.add_rope_dimension_count(shape.head_dim // _ROTATED)
        writer.add_rope_dimension_sections(_SECTIONS)
        writer.add_full_attention_interval(_INTERVAL)
        writer.add_ssm_conv_kernel(_KERNEL)
        writer.add_ssm_state_size(channels)
        writer.add_ssm_group_count(k_heads)
        writer.add_ssm_time_step_rank(v_heads)
        writer.add_ssm_inner_size(v_heads * channels)
    writer.add_chat_template(_CHAT_TEMPLATE)


class _Tensors:
    """repeats: layers add next to nothing to the residual stream, so that a token is followed by itself."""

    def __init__(self, writer: GGUFWriter, shape: Shape, *, repeats: bool) -> None:
        self._writer, self._shape, self._rng = writer, shape, np.random.default_rng(0)
        self._repeats = repeats
        self._is_gpt_oss = shape.architecture == "gpt-oss"
        self._of_embedding, self._usual, self._of_half, self._of_experts = shape.kinds

    def add_outer(self) -> None:
        shape = self._shape
        self._add("token_embd", shape.vocabulary, shape.hidden, self._of_embedding)
        self._add_vector("output_norm.weight", shape.hidden, 1.0)
        if self._is_gpt_oss:
            self._add("output", shape.vocabulary, shape.hidden, self._of_embedding)

    def add_layer(self, layer: int, *, drafts: bool) -> None:
        shape, prefix = self._shape, f"blk.{layer}."
        wide = self._of_half if layer % 2 else self._usual
        if drafts:
            self._add_mtp(f"{prefix}nextn.")
        if shape.delta_heads and (layer + 1) % _INTERVAL and not drafts:
            self._add_delta_net(prefix, *shape.delta_heads)
        else:
            self._add_attention(prefix, wide)
        if shape.experts:
            self._add_experts(prefix, wide, shape.experts[0])
        else:
            self._add_network(f"{prefix}ffn_{{}}", shape.inner, wide)
        second = "post_attention_norm" if self._is_gpt_oss or shape.delta_heads else "ffn_norm"
        for name in ("attn_norm", second):
            self._add_vector(f"{prefix}{name}.weight", shape.hidden, 1.0)

    def _add_mtp(self, prefix: str) -> None:
        """Add what makes the layer's input of a token and the state before it: the state, if drafts are right."""
        hidden = self._shape.hidden
        for name in ("enorm", "hnorm", "shared_head_norm"):
            self._add_vector(f"{prefix}{name}.weight", hidden, 1.0)
        if self._repeats:
            of_state = np.concatenate((np.zeros((hidden, hidden)), np.eye(hidden)), 1).astype(np.float32)
            self._writer.add_tensor(f"{prefix}eh_proj.weight", quantize(of_state, Kind.Q8_0), raw_dtype=Kind.Q8_0)
        else:
            self._add(f"{prefix}eh_proj", hidden, 2 * hidden, Kind.Q8_0)

    def _add_attention(self, prefix: str, wide: Kind) -> None:
        """Add attention, gated in models with delta nets: a query has a gate."""
        shape, hidden = self._shape, self._shape.hidden
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self._add(f"{prefix}attn_q", 2 * queries if shape.delta_heads else queries, hidden, self._usual)
        self._add(f"{prefix}attn_k", keys, hidden, self._usual)
        self._add(f"{prefix}attn_v", keys, hidden, wide)
        self._add(f"{prefix}attn_output", hidden, queries, self._usual)
        if shape.architecture in ("qwen2", "gpt-oss"):
            for name, size in (("q", queries), ("k", keys), ("v", keys)):
                self._add_vector(f"{prefix}attn_{name}.bias", size, 0.0)
        else:
            for name in ("attn_q_norm", "attn_k_norm"):
                self._add_vector(f"{prefix}{name}.weight", shape.head_dim, 1.0)
        if self._is_gpt_oss:
            self._add_vector(f"{prefix}attn_output.bias", hidden, 0.0)
            self._add_vector(f"{prefix}attn_sinks.weight", shape.heads, 0.0)

    def _add_delta_net(self, prefix: str, k_heads: int, v_heads: int, channels: int) -> None:
        hidden, values = self._shape.hidden, v_heads * channels
        width = 2 * k_heads * channels + values
        self._add(f"{prefix}attn_qkv", width, hidden, self._usual)
        self._add(f"{prefix}attn_gate", values, hidden, self._usual)
        self._add(f"{prefix}ssm_out", hidden, values, self._usual)
        self._add_floats(f"{prefix}ssm_beta.weight", v_heads, hidden)
        self._add_floats(f"{prefix}ssm_alpha.weight", v_heads, hidden)
        self._add_floats(f"{prefix}ssm_conv1d.weight", width, _KERNEL, std=0.5)
        decays = -self._rng.uniform(0.01, 16, v_heads).astype(np.float32)
        self._writer.add_tensor(f"{prefix}ssm_a", decays)
        self._add_vector(f"{prefix}ssm_dt.bias", v_heads, 1.0)
        self._add_vector(f"{prefix}ssm_norm.weight", channels, 1.0)

    def _add_experts(self, prefix: str, wide: Kind, count: int) -> None:
        shape, hidden = self._shape, self._shape.hidden
        for name, columns, depth, kind in (
            ("gate", shape.inner, hidden, self._usual),
            ("up", shape.inner, hidden, self._usual),
            ("down", hidden, shape.inner, wide),
        ):
            kind = self._of_experts or kind
            blocks = random_blocks(self._rng, count * columns, depth, kind).reshape(count, columns, -1)
            self._writer.add_tensor(f"{prefix}ffn_{name}_exps.weight", blocks, raw_dtype=kind)
            if self._is_gpt_oss:
                self._writer.add_tensor(f"{prefix}ffn_{name}_exps.bias", np.zeros((count, columns), np.float32))
        self._add_floats(f"{prefix}ffn_gate_inp.weight", count, hidden)
        if self._is_gpt_oss:
            self._add_vector(f"{prefix}ffn_gate_inp.bias", count, 0.0)
        if shape.shared:
            self._add_floats(f"{prefix}ffn_gate_inp_shexp.weight", hidden)
            self._add_network(f"{prefix}ffn_{{}}_shexp", shape.shared, wide)

    def _add_network(self, name: str, size: int, wide: Kind) -> None:
        hidden = self._shape.hidden
        self._add(name.format("gate"), size, hidden, self._usual)
        self._add(name.format("up"), size, hidden, self._usual)
        self._add(name.format("down"), hidden, size, wide)

    def _add(self, name: str, columns: int, depth: int, kind: Kind) -> None:
        adds = name.endswith(("attn_output", "ssm_out", "ffn_down", "ffn_down_shexp"))
        blocks = random_blocks(self._rng, columns, depth, kind, _LITTLE if adds and self._repeats else _STD)
        self._writer.add_tensor(f"{name}.weight", blocks, raw_dtype=kind)

    def _add_vector(self, name: str, size: int, value: float) -> None:
        self._writer.add_tensor(name, np.full(size, value, np.float32))

    def _add_floats(self, name: str, *sizes: int, std: float = _STD) -> None:
        self._writer.add_tensor(name, self._rng.standard_normal(sizes, np.float32) * np.float32(std))


def random_blocks(rng: np.random.Generator, columns: int, depth: int, kind: Kind, std: float = _STD) -> _Bytes:
    """Return random codes and scales [columns, bytes of a row]; a block's scale makes weights of about std."""
    values, num_bytes = GGML_QUANT_SIZES[kind]
    count = columns * depth // values
    blocks = rng.integers(0, 256, (count, num_bytes), np.uint8)
    if kind is Kind.Q4_K:  # scale * 6 bits * code - minimum * 6 bits, centred
        scale = std / (32 * 4.6)
        blocks[:, :4] = np.array([scale, 7.5 * scale], np.float16).view(np.uint8)
    elif kind is Kind.Q6_K:  # scale * 8 signed bits * (code - 32)
        blocks[:, -2:] = np.array([std / (74 * 18.5)], np.float16).view(np.uint8)
    elif kind is Kind.Q8_0:  # scale * 8 signed bits
        blocks[:, :2] = np.array([std / 74], np.float16).view(np.uint8)
    elif kind is Kind.MXFP4:  # 2^(byte - 127) * a float of four bits
        blocks[:, 0] = round(np.log2(std / 2.9)) + 127
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
