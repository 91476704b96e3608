"""A DSpark block drafter in float64, from the files of its directory: the oracle of the trainable block.

Written from the formulas (arXiv 2607.05147): all context rows and the rows of all blocks at once, and an explicit
mask. Knows no batch and no padding. Rotation multiplies complex numbers.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """logits: [A, b, Vd] of every anchor's block. confidence: [A, b]."""

    logits: Tensor
    confidence: Tensor


class BlockReference:
    """embedding: [V, H], the target's."""

    def __init__(self, directory: Path, embedding: Tensor) -> None:
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        stored = load_file(directory / "model.safetensors")
        self.draft_ids = torch.arange(len(stored["d2t"])) + stored["d2t"]
        self.weights = {name: weight.double() for name, weight in stored.items()}
        self.embedding = embedding.double()

    def draft(self, token_ids: Tensor, states: Tensor, anchors: Sequence[int]) -> Drafted:
        """token_ids: [n], the answer as it was said. states: [T, K * H] of its first tokens."""
        weights, size = self.weights, self.config["block_size"]
        context = self._norm(states.double() @ weights["fc.weight"].T, "hidden_norm.weight")
        starts = torch.tensor(anchors)
        positions = (starts[:, None] + torch.arange(size)).flatten()
        stream = weights["mask_embedding"].repeat(len(anchors), size, 1)
        stream[:, 0] = self.embedding[token_ids[starts]]
        stream = stream.flatten(0, 1)
        owner = starts.repeat_interleave(size)
        mask = torch.cat((torch.arange(len(context)) < owner[:, None], owner == owner[:, None]), 1)
        for layer in range(self.config["transformer_layer_config"]["num_hidden_layers"]):
            stream = self._layer(f"layers.{layer}.", stream, positions, context, mask)
        hidden = self._norm(stream, "norm.weight")
        markov = weights["markov_head.markov_w1.weight"][token_ids[positions.clamp(max=len(token_ids) - 1)]]
        logits = hidden @ weights["lm_head.weight"].T + markov @ weights["markov_head.markov_w2.weight"].T
        said = torch.cat((hidden, markov), 1) @ weights["confidence_head.proj.weight"][0]
        chance = (said + weights["confidence_head.proj.bias"]).sigmoid()
        return Drafted(logits=logits.view(len(anchors), size, -1), confidence=chance.view(len(anchors), size))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        eps: float = self.config["transformer_layer_config"]["rms_norm_eps"]
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * self.weights[name]

    def _layer(self, prefix: str, stream: Tensor, positions: Tensor, context: Tensor, mask: Tensor) -> Tensor:
        config, weights = self.config["transformer_layer_config"], self.weights
        num_heads, num_kv, width = (
            config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        x = self._norm(stream, f"{prefix}input_layernorm.weight")
        rows = torch.cat((context, x))
        at = torch.cat((torch.arange(len(context)), positions))
        keys = (rows @ weights[f"{prefix}self_attn.k_proj.weight"].T).view(-1, num_kv, width)
        values = (rows @ weights[f"{prefix}self_attn.v_proj.weight"].T).view(-1, num_kv, width)
        queries = (x @ weights[f"{prefix}self_attn.q_proj.weight"].T).view(-1, num_heads, width)
        keys = self._turned(self._norm(keys, f"{prefix}self_attn.k_norm.weight"), at)
        queries = self._turned(self._norm(queries, f"{prefix}self_attn.q_norm.weight"), positions)
        mixed = torch.zeros_like(queries)
        for head in range(num_heads):
            of_head = head // (num_heads // num_kv)
            scores = queries[:, head] @ keys[:, of_head].T / width**0.5
            mixed[:, head] = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values[:, of_head]
        stream = stream + mixed.flatten(1) @ weights[f"{prefix}self_attn.o_proj.weight"].T
        x = self._norm(stream, f"{prefix}post_attention_layernorm.weight")
        gate, up = (x @ weights[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return stream + (gate * gate.sigmoid() * up) @ weights[f"{prefix}mlp.down_proj.weight"].T

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        theta = self.config["transformer_layer_config"]["rope_theta"]
        turns = positions[:, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(turns), turns)[:, None]
        return torch.cat((turned.real, turned.imag), -1)
