"""Seeded block drafters on disk, in each layout, for any tiny target.

A drafter is described by BlockShape; write_block writes it as one of three layouts:

    dflash        config.json of DFlashDraftModel, neither embedding nor head among the tensors
    dspark        config.json of Qwen3DSparkModel, which has both
    speculators   speculators_model_type dspark or dflash, a head over a part of the vocabulary and its d2t
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.checkpoints import random_weights, write_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """The numbers of a drafter. state_layers: as FASER counts them, inputs of layers.

    draft_vocab: None: all tokens. window: of the layers that windowed names. causal: what the config says; None:
    it does not say.
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

    def layers(self) -> dict[str, Any]:
        """The fields of the layers, as Qwen3's config.json has them."""
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
    **config: Any,
) -> dict[str, Tensor]:
    """Write a seeded drafter. Returns its tensors, of whatever layout, with embedding and head where it has them.

    layout: dflash, dspark or speculators. target: tensors of the target, which dspark has copies of.
    config: further fields, in place of those that follow from the shape.
    """
    weights = random_weights(shape.tensors(), seed=seed)
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
        if layout == "dflash":
            inner = ("mask_token_id", "target_layer_ids", "block_size")
            fields["dflash_config"] = {name: fields.pop(name) for name in inner if name in fields}
        elif target is not None:
            embedding = target["model.embed_tokens.weight"]
            weights |= {"embed_tokens.weight": embedding.clone()}
            weights |= {"lm_head.weight": target.get("lm_head.weight", embedding).clone()}
    stored = {name: each if name == "d2t" else each.to(dtype) for name, each in weights.items()}
    write_checkpoint(directory, fields | {"torch_dtype": str(dtype).removeprefix("torch.")} | config, stored)
    return weights
