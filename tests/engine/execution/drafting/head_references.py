"""EAGLE-3 heads in float64 with whole sequences, written from the paper: the oracle of the heads' arithmetic.

Knows no cache, no plan and no backend. Rotation multiplies complex numbers, attention is a sum for each position.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The numbers of a head's layers."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    theta: float = 10_000.0
    window: int | None = None


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(x: Tensor, theta: float) -> Tensor:
    """x: [T, heads, D]. Channels i and i + D/2 are a complex number, turned by t * theta ** (-2 i / D)."""
    length, _, width = x.shape
    half = width // 2
    turns = torch.arange(length, dtype=torch.float64)[:, None] * theta ** (
        -torch.arange(half, dtype=torch.float64) * 2 / width
    )
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(turns), turns)[:, None]
    return torch.cat((turned.real, turned.imag), -1)


def attention(x: Tensor, weights: Mapping[str, Tensor], prefix: str, shape: Shape) -> Tensor:
    """x: [T, width of the products]. Causal; each query head h reads key-value head h // (heads / kv heads)."""

    def product(name: str, heads: int) -> Tensor:
        out = x @ weights[f"{prefix}self_attn.{name}.weight"].T
        bias = weights.get(f"{prefix}self_attn.{name}.bias")
        return (out if bias is None else out + bias).view(len(x), heads, shape.head_dim)

    queries, keys = product("q_proj", shape.num_heads), product("k_proj", shape.num_kv_heads)
    values = product("v_proj", shape.num_kv_heads)
    if f"{prefix}self_attn.q_norm.weight" in weights:
        queries = norm(queries, weights[f"{prefix}self_attn.q_norm.weight"], shape.eps)
        keys = norm(keys, weights[f"{prefix}self_attn.k_norm.weight"], shape.eps)
    queries, keys = rotated(queries, shape.theta), rotated(keys, shape.theta)
    mixed = torch.zeros_like(queries)
    for t in range(len(x)):
        first = 0 if shape.window is None else max(0, t - shape.window + 1)
        for head in range(shape.num_heads):
            kv = head // (shape.num_heads // shape.num_kv_heads)
            scores = keys[first : t + 1, kv] @ queries[t, head] / math.sqrt(shape.head_dim)
            mixed[t, head] = scores.softmax(0) @ values[first : t + 1, kv]
    out = mixed.flatten(1) @ weights[f"{prefix}self_attn.o_proj.weight"].T
    bias = weights.get(f"{prefix}self_attn.o_proj.bias")
    return out if bias is None else out + bias


def feed_forward(x: Tensor, weights: Mapping[str, Tensor], prefix: str) -> Tensor:
    gate, up = (x @ weights[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return (gate * torch.sigmoid(gate) * up) @ weights[f"{prefix}mlp.down_proj.weight"].T


def layer(x: Tensor, weights: Mapping[str, Tensor], prefix: str, shape: Shape) -> Tensor:
    """A pre-norm decoder layer over the stream x, [T, H]."""
    x = x + attention(norm(x, weights[f"{prefix}input_layernorm.weight"], shape.eps), weights, prefix, shape)
    normed = norm(x, weights[f"{prefix}post_attention_layernorm.weight"], shape.eps)
    return x + feed_forward(normed, weights, prefix)


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3:
    """arXiv 2503.01840. weights: float64, under the names of `speculators`."""

    weights: Mapping[str, Tensor]
    shape: Shape
    num_layers: int = 1
    norm_before_residual: bool = False
    norm_output: bool = False

    def features(self, states: list[Tensor]) -> Tensor:
        """states: of each layer that is read, [T, H]."""
        weights, eps = self.weights, self.shape.eps
        if "fc_norm.0.weight" in weights:
            states = [norm(each, weights[f"fc_norm.{i}.weight"], eps) for i, each in enumerate(states)]
        joined = torch.cat(states, -1)
        if "input_norm.weight" in weights:
            joined = norm(joined, weights["input_norm.weight"], eps)
        return joined @ weights["fc.weight"].T

    def outputs(self, token_ids: list[int], features: Tensor) -> Tensor:
        """[T, H], what the next row takes in place of features."""
        weights, shape = self.weights, self.shape
        embedded = norm(
            weights["embed_tokens.weight"][token_ids], weights["layers.0.input_layernorm.weight"], shape.eps
        )
        normed = norm(features, weights["layers.0.hidden_norm.weight"], shape.eps)
        x = normed if self.norm_before_residual else features
        x = x + attention(torch.cat((embedded, normed), -1), weights, "layers.0.", shape)
        x = x + feed_forward(
            norm(x, weights["layers.0.post_attention_layernorm.weight"], shape.eps), weights, "layers.0."
        )
        for index in range(1, self.num_layers):
            x = layer(x, weights, f"layers.{index}.", shape)
        return norm(x, weights["norm.weight"], shape.eps) if self.norm_output else x

    def logits(self, outputs: Tensor) -> Tensor:
        if not self.norm_output:
            outputs = norm(outputs, self.weights["norm.weight"], self.shape.eps)
        return outputs @ self.weights["lm_head.weight"].T


def draft(
    head: Eagle3, token_ids: list[int], features: Tensor, draft_ids: list[int], count: int
) -> tuple[list[int], Tensor]:
    """`count` tokens after the last one, greedily, and the logits that they come from, [count, Vd].

    token_ids, features: of the rows so far. draft_ids: the target's token of each row of the logits.
    """
    token_ids, found, logits = list(token_ids), [], []
    for _ in range(count):
        outputs = head.outputs(token_ids, features)
        logits.append(head.logits(outputs[-1]))
        found.append(draft_ids[int(logits[-1].argmax())])
        token_ids.append(found[-1])
        features = torch.cat((features, outputs[-1:]))
    return found, torch.stack(logits)
