"""Block drafters in float64 with whole sequences, from the formulas of DFlash, DFlash 2 and DSpark: the oracle.

Knows no cache, no plan and no backend: keys of the context and of the block are computed anew for every draft.
There are two forms, `hidden`, of one block, row by row, and `hidden_of_blocks`, of many blocks of one text at once
under a mask, as in training.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.engine.execution.drafting.seeded_blocks import BlockShape

Floats = NDArray[np.float64]


def norm(x: Floats, weight: Floats) -> Floats:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight)


def rotated(x: Floats, positions: NDArray[np.int64], theta: float = 10_000.0) -> Floats:
    """x: [T, heads, D]. Channels i and i + D/2 are a complex number, turned by position * theta ** (-2 i / D)."""
    half = x.shape[-1] // 2
    turns = positions[:, None] * theta ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * turns)[:, None]
    return np.concatenate((turned.real, turned.imag), -1)


def gelu(x: Floats) -> Floats:
    return np.asarray(x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))


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
        scale = shape.embedding_scale or 1.0
        mask = mask if shape.mask_token_id is None else mask * scale
        e = np.stack([w["embed_tokens.weight"][anchor] * scale, *[mask] * (count - 1)])
        places, own = np.arange(n + count), np.arange(n, n + count)
        for number in range(shape.num_layers):
            at = f"layers.{number}."

            def heads(x: Floats, which: str, at: str = at) -> Floats:
                return (x @ w[f"{at}self_attn.{which}_proj.weight"].T).reshape(len(x), -1, shape.head_dim)

            x, end = self._begin(f"{at}attention_conv.", norm(e, w[f"{at}input_layernorm.weight"]))
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
            e = e + end(mixed.reshape(count, -1) @ w[f"{at}self_attn.o_proj.weight"].T)
            x, end = self._begin(f"{at}mlp_conv.", norm(e, w[f"{at}post_attention_layernorm.weight"]))
            gate, up = (x @ w[f"{at}mlp.{each}_proj.weight"].T for each in ("gate", "up"))
            e = e + end(gate / (1 + np.exp(-gate)) * up @ w[f"{at}mlp.down_proj.weight"].T)
        return norm(e, w["norm.weight"])

    def _begin(self, at: str, x: Floats) -> tuple[Floats, Callable[[Floats], Floats]]:
        """x convolved by side 0, and what convolves by side 1. Row by row, channel by channel's group."""
        if not self.shape.selector_rank:
            return x, lambda y: y
        base, taps, group = self.weights[f"{at}base_kernel"], self.shape.taps, self.shape.group
        dynamic = [self.weights[f"{at}kernel_projection.weight"] @ row for row in x]

        def side(number: int, values: Floats) -> Floats:
            found = np.zeros_like(values)
            for t in range(len(values)):
                for tap in range(min(taps, t + 1)):
                    first = (number * taps + tap) * x.shape[1] // group
                    for channel in range(x.shape[1]):
                        kernel = base[number, tap, channel] + dynamic[t][first + channel // group]
                        found[t, channel] += kernel * values[t - tap, channel]
            return found

        return side(0, x), lambda y: side(1, y)

    def hidden_of_blocks(
        self, states: Floats, tokens: Sequence[int], anchors: Sequence[int], count: int
    ) -> Floats:
        """[blocks, count, H]: what `hidden` gives of a block at each of these positions of one text."""
        shape, w = self.shape, self.weights
        width, blocks = shape.hidden_size, len(anchors)
        block = np.repeat(np.arange(blocks), count)
        place = np.repeat(anchors, count) + np.tile(np.arange(count), blocks)
        same = block[:, None] == block
        behind = place[:, None] - place
        context = norm(states @ w["fc.weight"].T, w["hidden_norm.weight"])
        ids = np.full((blocks, count), shape.mask_token_id)
        ids[:, 0] = [tokens[each] for each in anchors]
        e = w["embed_tokens.weight"][ids.ravel()] * (shape.embedding_scale or 1.0)
        places = np.concatenate((np.arange(len(states)), place))
        gap = place[:, None] - places
        seen = np.concatenate((np.arange(len(states)) < np.repeat(anchors, count)[:, None], same), axis=1)

        def around(at: str, x: Floats, inner: Callable[[Floats], Floats]) -> Floats:
            if not shape.selector_rank:
                return inner(x)
            base = w[f"{at}base_kernel"]
            dynamic = (x @ w[f"{at}kernel_projection.weight"].T).reshape(len(x), 2, shape.taps, -1)
            kernels = base + dynamic.repeat(shape.group, axis=-1)  # [rows, 2, taps, H]
            shifts = [(same & (behind == tap)).astype(np.float64) for tap in range(shape.taps)]
            for side in range(2):
                x = np.sum([kernels[:, side, tap] * (shift @ x) for tap, shift in enumerate(shifts)], axis=0)
                x = inner(x) if side == 0 else x
            return x

        for number in range(shape.num_layers):
            at = f"layers.{number}."
            mask = seen if not self.causal[number] else seen & (gap >= 0)
            if shape.window is not None and shape.windowed[number]:
                mask = mask & (np.abs(gap) < shape.window)

            def attention(x: Floats, at: str = f"{at}self_attn.", mask: NDArray[np.bool_] = mask) -> Floats:
                q, k, v = (
                    np.einsum("hdw,tw->thd", w[f"{at}{name}_proj.weight"].reshape(-1, shape.head_dim, width), each)
                    for name, each in (("q", x), *((name, np.concatenate((context, x))) for name in "kv"))
                )
                q, k = (
                    rotated(norm(q, w[f"{at}q_norm.weight"]), place),
                    rotated(norm(k, w[f"{at}k_norm.weight"]), places),
                )
                shared = shape.num_heads // shape.num_kv_heads
                scores = np.einsum("thd,shd->hts", q, k.repeat(shared, 1)) / shape.head_dim**0.5
                parts = np.exp(np.where(mask, scores, -np.inf))
                mixed = np.einsum("hts,shd->thd", parts / parts.sum(-1, keepdims=True), v.repeat(shared, 1))
                return np.asarray(mixed.reshape(len(x), -1) @ w[f"{at}o_proj.weight"].T)

            def network(x: Floats, at: str = f"{at}mlp.") -> Floats:
                gate, up = (x @ w[f"{at}{each}_proj.weight"].T for each in ("gate", "up"))
                return np.asarray(gate / (1 + np.exp(-gate)) * up @ w[f"{at}down_proj.weight"].T)

            e = e + around(f"{at}attention_conv.", norm(e, w[f"{at}input_layernorm.weight"]), attention)
            e = e + around(f"{at}mlp_conv.", norm(e, w[f"{at}post_attention_layernorm.weight"]), network)
        return norm(e, w["norm.weight"]).reshape(blocks, count, width)

    def draft(self, states: Floats, anchor: int, num_tokens: int) -> tuple[list[int], list[float]]:
        """The likeliest tokens, and the confidence of each: the confidence head's log-odds, or the margin."""
        w, from_anchor = self.weights, self.shape.from_anchor
        hidden = self.hidden(states, anchor, num_tokens + (not from_anchor))[0 if from_anchor else 1 :]
        token_ids, confidences, before = [], [], anchor
        for h in hidden:
            logits = w["lm_head.weight"] @ h * (self.shape.multiplier or 1.0)
            if (cap := self.shape.cap) is not None:
                logits = cap * np.tanh(logits / cap)
            best = np.argsort(-logits)[: self.shape.top_k]
            scores = logits[best]
            if self.shape.selector_rank:
                first, second = (w[f"candidate_selector.{each}_codebook"] for each in ("predecessor", "successor"))
                projected = w["candidate_selector.hidden_projection.weight"] @ h
                scores = scores + second[best] @ (first[before] * projected)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaReference(BlockReference):
    """DSpark with the layers of Gemma 4, from deepseek-ai's DeepSpec.

    Values are normalised without a weight, scores have no scale, a quarter of the channels of a head turns, both
    parts of a layer are normalised once more, and each layer multiplies the stream by a scalar.
    """

    def hidden(self, states: Floats, anchor: int, count: int) -> Floats:
        shape, w, n, ones = self.shape, self.weights, len(states), np.ones(self.shape.head_dim)
        context = norm(states @ w["fc.weight"].T, w["hidden_norm.weight"])
        ids = np.full(count, shape.mask_token_id)
        ids[0] = anchor
        e = w["embed_tokens.weight"][ids] * shape.hidden_size**0.5
        places = np.arange(n + count)
        turning = shape.head_dim // 8

        def turned(x: Floats, positions: NDArray[np.int64]) -> Floats:
            angles = positions[:, None] * 1_000_000.0 ** (-2 * np.arange(turning) / shape.head_dim)
            half, found = shape.head_dim // 2, x.copy()
            first, second = x[..., :turning], x[..., half : half + turning]
            cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
            found[..., :turning] = first * cos - second * sin
            found[..., half : half + turning] = second * cos + first * sin
            return found

        for number in range(shape.num_layers):
            at = f"layers.{number}."
            x = norm(e, w[f"{at}input_layernorm.weight"])
            both, heads = np.concatenate((context, x)), (-1, shape.head_dim)
            q = (x @ w[f"{at}self_attn.q_proj.weight"].T).reshape(count, *heads)
            k = (both @ w[f"{at}self_attn.k_proj.weight"].T).reshape(n + count, *heads)
            v = k if shape.k_eq_v else (both @ w[f"{at}self_attn.v_proj.weight"].T).reshape(n + count, *heads)
            q = turned(norm(q, w[f"{at}self_attn.q_norm.weight"]), places[n:])
            k, v = turned(norm(k, w[f"{at}self_attn.k_norm.weight"]), places), norm(v, ones)
            mixed = np.empty_like(q)
            for head in range(shape.num_heads):
                of = head // (shape.num_heads // shape.num_kv_heads)
                scores = q[:, head] @ k[:, of].T
                parts = np.exp(scores - scores.max(-1, keepdims=True))
                mixed[:, head] = parts / parts.sum(-1, keepdims=True) @ v[:, of]
            out = mixed.reshape(count, -1) @ w[f"{at}self_attn.o_proj.weight"].T
            e = e + norm(out, w[f"{at}post_attention_layernorm.weight"])
            x = norm(e, w[f"{at}pre_feedforward_layernorm.weight"])
            gate, up = (x @ w[f"{at}mlp.{each}_proj.weight"].T for each in ("gate", "up"))
            out = gelu(gate) * up @ w[f"{at}mlp.down_proj.weight"].T
            e = (e + norm(out, w[f"{at}post_feedforward_layernorm.weight"])) * w[f"{at}layer_scalar"]
        return norm(e, w["norm.weight"])
