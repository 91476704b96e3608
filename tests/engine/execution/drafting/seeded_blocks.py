"""Seeded block drafters on disk, in each layout, for any tiny target.

A drafter is described by BlockShape; write_block writes it as one of four layouts:

    dflash        config.json of DFlashDraftModel, or with a selector DFlash2DraftModel; neither embedding nor head
                  among the tensors
    dspark        config.json of Qwen3DSparkModel, or with gemma Gemma4DSparkModel, which have both
    speculators   speculators_model_type dspark or dflash, a head over a part of the vocabulary and its d2t
    gguf          a file as llama.cpp's conversion/qwen.py writes it; where draft_vocab says so, a head and its d2t
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from torch import Tensor

from tests.checkpoints import random_weights, write_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """The numbers of a drafter. state_layers: as FASER counts them, inputs of layers.

    draft_vocab: None: all tokens. window: of the layers that windowed names. causal: what the config says; None:
    it does not say. selector_rank: 0: there is neither a selector nor convolutions.
    """

    vocab_size: int
    hidden_size: int = 64
    num_layers: int = 2
    state_layers: tuple[int, ...] = (1, 2, 3)
    block_size: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    size: int = 96
    markov_rank: int = 8
    confidence: bool = True
    draft_vocab: int | None = None
    window: int | None = None
    windowed: tuple[bool, ...] = ()
    causal: bool | None = None
    from_anchor: bool = True
    mask_token_id: int | None = 5
    selector_rank: int = 0
    top_k: int = 16
    taps: int = 2
    group: int = 16
    embedding_scale: float | None = None
    multiplier: float | None = None
    cap: float | None = None
    gemma: bool = False
    k_eq_v: bool = False

    def layers(self) -> dict[str, Any]:
        """The fields of the layers, as Qwen3's config.json has them, or that of Gemma 4."""
        found: dict[str, Any] = {
            "model_type": "qwen3",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
        }
        if self.gemma:
            found |= {
                "model_type": "gemma4_unified_text",
                "hidden_activation": "gelu_pytorch_tanh",
                "layer_types": ["full_attention"] * self.num_layers,
                "global_head_dim": self.head_dim,
                "num_global_key_value_heads": self.num_kv_heads,
                "attention_k_eq_v": self.k_eq_v,
                "rope_parameters": {
                    "full_attention": {
                        "rope_type": "proportional",
                        "partial_rotary_factor": 0.25,
                        "rope_theta": 1_000_000.0,
                    }
                },
            }
            del found["rope_theta"], found["hidden_act"]
        if self.window is not None:
            kinds = ["sliding_attention" if each else "full_attention" for each in self.windowed]
            found |= {"layer_types": kinds, "sliding_window": self.window}
        return found

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that all layouts have."""
        hidden, heads = self.hidden_size, {"q": self.num_heads, "k": self.num_kv_heads, "v": self.num_kv_heads}
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, len(self.state_layers) * hidden),
            "hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
        }
        for number in range(self.num_layers):
            prefix = f"layers.{number}."
            shapes |= {
                f"{prefix}self_attn.{each}_proj.weight": (count * self.head_dim, hidden)
                for each, count in heads.items()
            }
            shapes |= {
                f"{prefix}input_layernorm.weight": (hidden,),
                f"{prefix}post_attention_layernorm.weight": (hidden,),
                f"{prefix}self_attn.q_norm.weight": (self.head_dim,),
                f"{prefix}self_attn.k_norm.weight": (self.head_dim,),
                f"{prefix}self_attn.o_proj.weight": (hidden, self.num_heads * self.head_dim),
                f"{prefix}mlp.gate_proj.weight": (self.size, hidden),
                f"{prefix}mlp.up_proj.weight": (self.size, hidden),
                f"{prefix}mlp.down_proj.weight": (hidden, self.size),
            }
            if self.gemma:
                shapes |= {f"{prefix}{each}_feedforward_layernorm.weight": (hidden,) for each in ("pre", "post")}
                shapes[f"{prefix}layer_scalar"] = (1,)
            if self.k_eq_v:
                del shapes[f"{prefix}self_attn.v_proj.weight"]
            if self.selector_rank:
                for each in ("attention_conv", "mlp_conv"):
                    shapes[f"{prefix}{each}.base_kernel"] = (2, self.taps, hidden)
                    rows = 2 * self.taps * hidden // self.group
                    shapes[f"{prefix}{each}.kernel_projection.weight"] = (rows, hidden)
        if self.selector_rank:
            for each in ("predecessor", "successor"):
                shapes[f"candidate_selector.{each}_codebook"] = (self.vocab_size, self.selector_rank)
            shapes["candidate_selector.hidden_projection.weight"] = (self.selector_rank, hidden)
        if self.markov_rank:
            shapes["markov_head.markov_w1.weight"] = (self.vocab_size, self.markov_rank)
            shapes["markov_head.markov_w2.weight"] = (self.draft_vocab or self.vocab_size, self.markov_rank)
        if self.confidence:
            shapes["confidence_head.proj.weight"] = (1, hidden + self.markov_rank)
            shapes["confidence_head.proj.bias"] = (1,)
        return shapes


def draft_ids(shape: BlockShape) -> Tensor:
    """[Vd] the target's tokens of the rows of the logits, ascending."""
    everything = torch.randperm(shape.vocab_size, generator=torch.Generator().manual_seed(5))
    return everything[: shape.draft_vocab or shape.vocab_size].sort().values


def write_block(
    directory: Path,
    shape: BlockShape,
    layout: str,
    *,
    seed: int = 11,
    target: dict[str, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    quantization: GGMLQuantizationType = GGMLQuantizationType.F32,
    **config: Any,
) -> dict[str, Tensor]:
    """Write a seeded drafter. Returns its tensors, of whatever layout, with embedding and head where it has them.

    layout: dflash, dspark, speculators or gguf, whose file is block_path. target: tensors of the target, which
    dspark has copies of. quantization: of matrices, to whose values those of all layouts are rounded. config:
    further fields, in place of those that follow from the shape.
    """
    weights = {
        name: _rounded(each, quantization) for name, each in random_weights(shape.tensors(), seed=seed).items()
    }
    if layout == "gguf":
        if shape.draft_vocab is not None:
            ids = draft_ids(shape)
            weights |= random_weights({"lm_head.weight": (len(ids), shape.hidden_size)}, seed=seed + 2)
            weights["d2t"] = ids - torch.arange(len(ids))
        write_block_gguf(block_path(directory, layout), shape, weights, quantization=quantization, **config)
        return weights
    fields: dict[str, Any] = {
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token_id,
        "markov_rank": shape.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": shape.confidence,
        "confidence_head_with_markov": shape.confidence and shape.markov_rank > 0,
    }
    if shape.mask_token_id is None:
        weights |= random_weights({"mask_embedding": (shape.hidden_size,)}, seed=seed + 1)
        del fields["mask_token_id"]
    if shape.causal is not None:
        fields["is_causal"] = shape.causal
    if layout == "speculators":
        kind = "dspark" if shape.markov_rank or shape.confidence else "dflash"
        fields |= {
            "speculators_model_type": kind,
            "transformer_layer_config": shape.layers(),
            "draft_vocab_size": shape.draft_vocab or shape.vocab_size,
            "aux_hidden_state_layer_ids": list(shape.state_layers),
            "sample_from_anchor": shape.from_anchor,
            "architectures": ["DSparkDraftModel" if kind == "dspark" else "DFlashDraftModel"],
        }
        ids = draft_ids(shape)
        weights |= random_weights({"lm_head.weight": (len(ids), shape.hidden_size)}, seed=seed + 2)
        weights["d2t"] = ids - torch.arange(len(ids))
    else:
        fields |= shape.layers() | {"target_layer_ids": [each - 1 for each in shape.state_layers]}
        fields["architectures"] = ["Qwen3DSparkModel" if layout == "dspark" else "DFlashDraftModel"]
        if shape.gemma:
            fields["architectures"] = ["Gemma4DSparkModel"]
        if shape.selector_rank:
            fields["architectures"] = ["DFlash2DraftModel"]
            fields |= {
                "conv_kernel_size": shape.taps,
                "conv_group_size": shape.group,
                "selector_rank": shape.selector_rank,
                "selector_top_k": shape.top_k,
            }
        for name, value in (
            ("input_embedding_scale", shape.embedding_scale),
            ("output_multiplier", shape.multiplier),
            ("final_logit_softcapping", shape.cap),
        ):
            fields |= {name: value} if value is not None else {}
        if layout == "dflash":
            inner = (
                *("mask_token_id", "target_layer_ids", "block_size", "conv_kernel_size", "conv_group_size"),
                *("selector_rank", "selector_top_k", "input_embedding_scale", "output_multiplier"),
                "final_logit_softcapping",
            )
            fields["dflash_config"] = {name: fields.pop(name) for name in inner if name in fields}
        elif target is not None:
            embedding = target["model.embed_tokens.weight"]
            weights |= {"embed_tokens.weight": embedding.clone()}
            weights |= {"lm_head.weight": target.get("lm_head.weight", embedding).clone()}
    stored = {name: each if name == "d2t" else each.to(dtype) for name, each in weights.items()}
    write_checkpoint(directory, fields | {"torch_dtype": str(dtype).removeprefix("torch.")} | config, stored)
    return weights


def _rounded(weight: Tensor, quantization: GGMLQuantizationType) -> Tensor:
    """A matrix with the values that a GGUF file has of it."""
    if weight.dim() != 2 or len(weight) == 1:
        return weight
    return torch.from_numpy(quants.dequantize(quants.quantize(weight.numpy(), quantization), quantization).copy())


def block_path(directory: Path, layout: str) -> Path:
    """Where write_block leaves a drafter: a directory, or a file in it."""
    return directory / "drafter.gguf" if layout == "gguf" else directory


_OUTER = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
}
_INNER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
}
_BARE = {"attention_conv.base_kernel": "attn_conv_base", "mlp_conv.base_kernel": "ffn_conv_base"}


def write_block_gguf(
    path: Path,
    shape: BlockShape,
    weights: dict[str, Tensor],
    *,
    quantization: GGMLQuantizationType = GGMLQuantizationType.F32,
    **keys: Any,
) -> None:
    """keys: metadata in place of what follows from the shape, with `__` for a dot; None: left out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(path, keys.pop("architecture", "dflash"))
    found: dict[str, Any] = {
        "dflash.block_count": shape.num_layers,
        "dflash.context_length": 2048,
        "dflash.embedding_length": shape.hidden_size,
        "dflash.feed_forward_length": shape.size,
        "dflash.attention.head_count": shape.num_heads,
        "dflash.attention.head_count_kv": shape.num_kv_heads,
        "dflash.attention.key_length": shape.head_dim,
        "dflash.attention.value_length": shape.head_dim,
        "dflash.attention.layer_norm_rms_epsilon": 1e-6,
        "dflash.rope.freq_base": 10_000.0,
        "dflash.block_size": shape.block_size,
        "dflash.target_layers": list(shape.state_layers),
        "dflash.sample_from_anchor": shape.from_anchor,
        "tokenizer.ggml.tokens": [f"<{each}>" for each in range(shape.vocab_size)],
        "tokenizer.ggml.mask_token_id": shape.mask_token_id,
        "tokenizer.ggml.eos_token_id": 0,
    }
    if shape.selector_rank:
        found |= {"dflash.conv_kernel_size": shape.taps, "dflash.conv_group_size": shape.group}
        found |= {"dflash.selector_rank": shape.selector_rank, "dflash.selector_top_k": shape.top_k}
    for name, value in (
        ("embedding_scale", shape.embedding_scale),
        ("logit_scale", shape.multiplier),
        ("final_logit_softcapping", shape.cap),
    ):
        found |= {f"dflash.{name}": value} if value is not None else {}
    if shape.causal is not None:
        found["dflash.attention.causal"] = shape.causal
    if shape.window is not None:
        found |= {"dflash.attention.sliding_window": shape.window}
        found |= {"dflash.attention.sliding_window_pattern": list(shape.windowed)}
    for key, value in (found | {name.replace("__", "."): each for name, each in keys.items()}).items():
        match value:
            case None:
                pass
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case _:
                writer.add_array(key, value)
    for name, each in weights.items():
        values = each.numpy()
        if name == "d2t":
            writer.add_tensor("d2t", values + np.arange(len(values)))
            continue
        stored = _OUTER.get(name)
        if stored is None:
            _, number, inner = name.split(".", 2)
            middle, _, ending = inner.rpartition(".")
            stored = f"blk.{number}." + (_BARE.get(inner) or f"{_INNER[middle]}.{ending}")
        values = values.squeeze() if values.size > 1 else values  # as the converter does
        kept = quantization if values.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(stored, quants.quantize(values, kept), raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
