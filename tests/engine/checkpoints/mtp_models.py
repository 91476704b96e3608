"""Tiny Qwen3.5 models with the layer that their checkpoints have to draft with, and that layer in float64.

The reference knows no cache, no plan and no backend: it runs over whole sequences. It is written from vLLM's
qwen3_5_mtp.py and llama.cpp's qwen35.cpp.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import VOCAB_SIZE, random_weights, write_tokenizer
from tests.engine.checkpoints.family_models import write_family_model

Shapes = dict[str, tuple[int, ...]]

FIELDS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.25},
}


EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}


def write_mtp_model(directory: Path, family: str = "qwen3_5_text", **fields: Any) -> Any:
    """With such a layer, and a tokenizer. Returns the model as transformers has it, without the layer."""
    model = write_family_model(directory, family, FIELDS | fields)
    write_tokenizer(directory)
    add_mtp(directory)
    return model


def mtp_shapes(config: dict[str, Any]) -> Shapes:
    hidden, width = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    of_layer: Shapes = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (2 * q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "self_attn.q_norm": (width,),
        "self_attn.k_norm": (width,),
        "post_attention_layernorm": (hidden,),
    }
    if "num_experts" in config:
        of_layer |= mixture_shapes(config)
    else:
        of_layer |= network_shapes("mlp", hidden, config["intermediate_size"])
    own: Shapes = {
        "fc": (hidden, 2 * hidden),
        "pre_fc_norm_embedding": (hidden,),
        "pre_fc_norm_hidden": (hidden,),
        "norm": (hidden,),
    }
    own |= {f"layers.0.{name}": shape for name, shape in of_layer.items()}
    return {f"mtp.{name}.weight": shape for name, shape in own.items()}


def network_shapes(name: str, hidden: int, inner: int) -> Shapes:
    up, down = (inner, hidden), (hidden, inner)
    return {f"{name}.gate_proj": up, f"{name}.up_proj": up, f"{name}.down_proj": down}


def mixture_shapes(config: dict[str, Any]) -> Shapes:
    """Expert by expert, as the hub has Qwen3-Next's."""
    hidden, count = config["hidden_size"], config["num_experts"]
    shapes: Shapes = {"mlp.gate": (count, hidden), "mlp.shared_expert_gate": (1, hidden)}
    shapes |= network_shapes("mlp.shared_expert", hidden, config["shared_expert_intermediate_size"])
    for number in range(count):
        shapes |= network_shapes(f"mlp.experts.{number}", hidden, config["moe_intermediate_size"])
    return shapes


def stack_experts(directory: Path) -> None:
    """The layer's experts in two tensors, as the hub has those of Qwen3.5."""
    config = json.loads((directory / "config.json").read_text())
    weights, prefix = load_file(directory / "model.safetensors"), "mtp.layers.0.mlp.experts."
    single = {name: each for name, each in weights.items() if name.startswith(prefix)}

    def all_of(part: str) -> Tensor:
        return torch.stack([single[f"{prefix}{number}.{part}.weight"] for number in range(config["num_experts"])])

    stacked = {
        f"{prefix}gate_up_proj": torch.cat((all_of("gate_proj"), all_of("up_proj")), 1),
        f"{prefix}down_proj": all_of("down_proj"),
    }
    edit_weights(directory, dict.fromkeys(single) | stacked)


def add_mtp(directory: Path, *, seed: int = 13) -> None:
    """Add a seeded layer to the checkpoint. Norms multiply by 1 + w, so their weights lie around 0."""
    config = json.loads((directory / "config.json").read_text())
    more = random_weights(mtp_shapes(config), seed=seed)
    edit_weights(directory, more | {name: weight - 1 for name, weight in more.items() if "norm" in name})


def edit_weights(directory: Path, changes: Mapping[str, Tensor | None]) -> None:
    """None: the checkpoint does not have that tensor."""
    path = directory / "model.safetensors"
    weights = {**load_file(path), **changes}
    save_file({name: each for name, each in weights.items() if each is not None}, path, {"format": "pt"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Mtp:
    """weights: of the whole checkpoint, float64. config: the text model's."""

    weights: dict[str, Tensor]
    config: dict[str, Any]

    @classmethod
    def of(cls, directory: Path) -> "Mtp":
        weights = load_file(directory / "model.safetensors")
        return cls(
            weights={name: weight.double() for name, weight in weights.items()},
            config=json.loads((directory / "config.json").read_text()),
        )

    def draft(
        self, token_ids: list[int], states: Tensor, count: int, draft_ids: Sequence[int] = range(VOCAB_SIZE)
    ) -> tuple[list[int], Tensor]:
        """Of draft_ids those that follow these tokens, greedily, and the logits that they come from, [count, Vd].

        states: [T, H] of at least all tokens but the last, as the target's final norm gives them.
        """
        read, features = token_ids[1:], states[: len(token_ids) - 1]
        found, logits = list[int](), list[Tensor]()
        for _ in range(count):
            outputs = self._outputs(read, features)
            logits.append(self.weights["lm_head.weight"][list(draft_ids)] @ outputs[-1])
            found.append(draft_ids[int(logits[-1].argmax())])
            read, features = [*read, found[-1]], torch.cat((features, outputs[-1:]))
        return found, torch.stack(logits)

    def final_norm(self, stream: Tensor) -> Tensor:
        return self._norm(stream, "model.norm")

    def _outputs(self, token_ids: list[int], features: Tensor) -> Tensor:
        """[T, H]. features: of the position before each token."""
        embedded = self._norm(self.weights["model.embed_tokens.weight"][token_ids], "mtp.pre_fc_norm_embedding")
        hidden = self._norm(features, "mtp.pre_fc_norm_hidden")
        x = self._product(torch.cat((embedded, hidden), -1), "mtp.fc")
        x = x + self._attention(self._norm(x, "mtp.layers.0.input_layernorm"))
        normed = self._norm(x, "mtp.layers.0.post_attention_layernorm")
        of_layer = self._mixture if "num_experts" in self.config else self._network
        return self._norm(x + of_layer(normed, "mtp.layers.0.mlp"), "mtp.norm")

    def _network(self, x: Tensor, name: str) -> Tensor:
        gate, up = (self._product(x, f"{name}.{part}_proj") for part in ("gate", "up"))
        return self._product(gate * gate.sigmoid() * up, f"{name}.down_proj")

    def _mixture(self, x: Tensor, name: str) -> Tensor:
        """Every expert over every row, weighted; 0 where a row has not chosen it."""
        chances = self._product(x, f"{name}.gate").softmax(-1)
        best, chosen = chances.topk(self.config["num_experts_per_tok"], -1)
        weights = torch.zeros_like(chances).scatter(1, chosen, best / best.sum(-1, keepdim=True))
        shared = self._product(x, f"{name}.shared_expert_gate").sigmoid()
        mixed = shared * self._network(x, f"{name}.shared_expert")
        for number, weight in enumerate(weights.unbind(1)):
            mixed = mixed + weight[:, None] * self._network(x, f"{name}.experts.{number}")
        return mixed

    def _attention(self, x: Tensor) -> Tensor:
        """Rows of q_proj: of each head a query, then its gate."""
        length, width = len(x), self.config["head_dim"]
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        prefix = "mtp.layers.0.self_attn."
        of_heads = self._product(x, f"{prefix}q_proj").view(length, heads, 2, width)
        queries, gates = of_heads[:, :, 0], of_heads[:, :, 1]
        keys, values = (self._product(x, f"{prefix}{name}_proj").view(length, kv_heads, width) for name in "kv")
        queries = self._turned(self._norm(queries, f"{prefix}q_norm"))
        keys = self._turned(self._norm(keys, f"{prefix}k_norm"))
        keys, values = (each.repeat_interleave(heads // kv_heads, 1) for each in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) / math.sqrt(width)
        later = torch.ones(length, length).triu(1).bool()
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -math.inf).softmax(-1), values)
        return self._product((mixed * gates.sigmoid()).flatten(1), f"{prefix}o_proj")

    def _turned(self, x: Tensor) -> Tensor:
        """x: [T, heads, D]. Of the first R channels, i and i + R/2 are a complex number; the others stay."""
        rope = self.config["rope_parameters"]
        rotated = int(x.shape[-1] * rope["partial_rotary_factor"])
        half = rotated // 2
        turns = torch.arange(len(x)).double()[:, None] * rope["rope_theta"] ** (
            -torch.arange(half).double() * 2 / rotated
        )
        turned = torch.complex(x[..., :half].contiguous(), x[..., half:rotated].contiguous())
        turned = turned * torch.polar(torch.ones_like(turns), turns)[:, None]
        return torch.cat((turned.real, turned.imag, x[..., rotated:]), -1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        eps = float(self.config["rms_norm_eps"])
        scale = (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
        return x * scale * (1 + self.weights[f"{name}.weight"])

    def _product(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T
