"""Block drafters in float64 with whole sequences, written from the formulas of DFlash and DSpark: the oracle.

Knows no cache, no plan and no backend: keys of the context and of the block are computed anew for every draft.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.engine.execution.drafting.seeded_blocks import BlockShape

Floats = NDArray[np.float64]
_CANDIDATES = 16


def norm(x: Floats, weight: Floats) -> Floats:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight)


def rotated(x: Floats, positions: NDArray[np.int64], theta: float = 10_000.0) -> Floats:
    """x: [T, heads, D]. Channels i and i + D/2 are a complex number, turned by position * theta ** (-2 i / D)."""
    half = x.shape[-1] // 2
    turns = positions[:, None] * theta ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * turns)[:, None]
    return np.concatenate((turned.real, turned.imag), -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockReference:
    """weights: float64, with embed_tokens.weight and lm_head.weight. ids: of the rows of the logits.

    causal: of each layer.
    """

    shape: BlockShape
    weights: Mapping[str, Floats]
    ids: NDArray[np.int64]
    causal: Sequence[bool]

    def hidden(self, states: Floats, anchor: int, count: int) -> Floats:
        """[count, H] behind the final norm. states: [n, K * H] of positions 0 … n - 1."""
        shape, w = self.shape, self.weights
        n = len(states)
        context = norm(states @ w["fc.weight"].T, w["hidden_norm.weight"])
        mask = (
            w["mask_embedding"] if shape.mask_token_id is None else w["embed_tokens.weight"][shape.mask_token_id]
        )
        e = np.stack([w["embed_tokens.weight"][anchor], *[mask] * (count - 1)])
        places, own = np.arange(n + count), np.arange(n, n + count)
        for number in range(shape.num_layers):
            at = f"layers.{number}."

            def heads(x: Floats, which: str, at: str = at) -> Floats:
                return (x @ w[f"{at}self_attn.{which}_proj.weight"].T).reshape(len(x), -1, shape.head_dim)

            x = norm(e, w[f"{at}input_layernorm.weight"])
            both = np.concatenate((context, x))
            queries = rotated(norm(heads(x, "q"), w[f"{at}self_attn.q_norm.weight"]), own)
            keys = rotated(norm(heads(both, "k"), w[f"{at}self_attn.k_norm.weight"]), places)
            values = heads(both, "v")
            gap = own[:, None] - places[None]
            seen = gap >= 0 if self.causal[number] else np.ones_like(gap, dtype=bool)
            if shape.window is not None and shape.windowed[number]:
                seen &= np.abs(gap) < shape.window
            mixed = np.empty_like(queries)
            for head in range(shape.num_heads):
                of = head // (shape.num_heads // shape.num_kv_heads)
                scores = np.where(seen, queries[:, head] @ keys[:, of].T / np.sqrt(shape.head_dim), -np.inf)
                parts = np.exp(scores - scores.max(-1, keepdims=True))
                mixed[:, head] = parts / parts.sum(-1, keepdims=True) @ values[:, of]
            e = e + mixed.reshape(count, -1) @ w[f"{at}self_attn.o_proj.weight"].T
            x = norm(e, w[f"{at}post_attention_layernorm.weight"])
            gate, up = (x @ w[f"{at}mlp.{each}_proj.weight"].T for each in ("gate", "up"))
            e = e + gate / (1 + np.exp(-gate)) * up @ w[f"{at}mlp.down_proj.weight"].T
        return norm(e, w["norm.weight"])

    def draft(self, states: Floats, anchor: int, num_tokens: int) -> tuple[list[int], list[float]]:
        """The likeliest tokens, and the confidence of each: the confidence head's log-odds, or the margin."""
        w, from_anchor = self.weights, self.shape.from_anchor
        hidden = self.hidden(states, anchor, num_tokens + (not from_anchor))[0 if from_anchor else 1 :]
        token_ids, confidences, before = [], [], anchor
        for h in hidden:
            logits = w["lm_head.weight"] @ h
            best = np.argsort(-logits)[:_CANDIDATES]
            scores = logits[best]
            if self.shape.markov_rank:
                given = w["markov_head.markov_w1.weight"][before]
                scores = scores + w["markov_head.markov_w2.weight"][best] @ given
            first, second = np.argsort(-scores)[:2]
            if self.shape.confidence:
                parts = np.concatenate((h, given)) if self.shape.markov_rank else h
                bias = w["confidence_head.proj.bias"].item()
                confidences.append(float(w["confidence_head.proj.weight"][0] @ parts) + bias)
            else:
                confidences.append(float(scores[first] - scores[second]))
            before = int(self.ids[best[first]])
            token_ids.append(before)
        return token_ids, confidences
