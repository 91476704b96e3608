"""A tiny model whose layers have heads of three shapes, and its forward written out in torch.

No family has as many: the tests add this one to the table of families.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from faser.engine.checkpoints.families.architecture import (
    AttentionSpec,
    DecoderSpec,
    DenseSpec,
    LayerSpec,
    RopeSpec,
)
from faser.engine.checkpoints.families.family import Family
from faser.engine.execution.models.tensors import tensor_shapes
from tests.checkpoints import VOCAB_SIZE, random_weights, write_checkpoint, write_tokenizer

_LOCAL = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, rope=RopeSpec(theta=100.0), window=13)
_GLOBAL = AttentionSpec(num_heads=3, num_kv_heads=1, head_dim=128, rope=RopeSpec(theta=5000.0, rotated=32))
# Rotates as the local ones do, with heads of another size.
_OTHER = replace(_LOCAL, num_kv_heads=4, head_dim=32, window=None, qk_norm=True)
_HIDDEN = 64


def spec(_config: Mapping[str, Any]) -> DecoderSpec:
    network = DenseSpec(size=96)
    order = (_GLOBAL, _LOCAL, _OTHER, _GLOBAL, _LOCAL)
    return DecoderSpec(
        vocab_size=VOCAB_SIZE,
        hidden_size=_HIDDEN,
        layers=tuple(LayerSpec(attention=each, feed_forward=network) for each in order),
        rms_norm_eps=1e-5,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )


FAMILY = Family(
    name="several shapes",
    model_type="shapes",
    architecture="ShapesForCausalLM",
    to_spec=spec,
    tool_parsers=(),
    examples=(),
)


def write_shapes_model(directory: Path) -> None:
    config = {"architectures": [FAMILY.architecture], "eos_token_id": 2, "dtype": "float32"}
    write_checkpoint(directory, config, random_weights(tensor_shapes(spec({})), seed=7))
    write_tokenizer(directory)


class Reference:
    """All positions at once, in float32, with no cache and no code of the engine but the spec."""

    def __init__(self, directory: Path) -> None:
        self._weights = load_file(directory / "model.safetensors")
        self._spec = spec({})

    def logits(self, token_ids: list[int]) -> Tensor:
        """[len, V]."""
        weights, eps = self._weights, self._spec.rms_norm_eps
        hidden = weights["model.embed_tokens.weight"][token_ids]
        for number, attention in enumerate(self._spec.attentions):
            own = {
                name.removeprefix(f"model.layers.{number}.").removesuffix(".weight"): weight
                for name, weight in weights.items()
                if name.startswith(f"model.layers.{number}.")
            }
            normed = rms_norm(hidden, (_HIDDEN,), own["input_layernorm"], eps)
            hidden = hidden + _attention(normed, own, attention, eps) @ own["self_attn.o_proj"].T
            normed = rms_norm(hidden, (_HIDDEN,), own["post_attention_layernorm"], eps)
            gated = silu(normed @ own["mlp.gate_proj"].T) * (normed @ own["mlp.up_proj"].T)
            hidden = hidden + gated @ own["mlp.down_proj"].T
        return rms_norm(hidden, (_HIDDEN,), weights["model.norm.weight"], eps) @ weights["lm_head.weight"].T

    def follows(self, token_ids: list[int], answer: list[int]) -> bool:
        """Whether an answer to token_ids has the likeliest token at each place: greedy decoding has no other."""
        best = self.logits(token_ids + answer[:-1])[len(token_ids) - 1 :].argmax(-1)
        return best.tolist() == answer


def _attention(x: Tensor, own: dict[str, Tensor], of: AttentionSpec, eps: float) -> Tensor:
    """[len, Hq * D]: the mixed values, before the output product."""
    length, width = len(x), of.head_dim
    q, k, v = (
        (x @ own[f"self_attn.{name}_proj"].T).view(length, -1, width).transpose(0, 1) for name in ("q", "k", "v")
    )
    if of.qk_norm:
        q = rms_norm(q, (width,), own["self_attn.q_norm"], eps)
        k = rms_norm(k, (width,), own["self_attn.k_norm"], eps)
    assert of.rope is not None
    rotated = of.rope.rotated or width
    angles = torch.arange(length)[:, None] * of.rope.theta ** -(torch.arange(0, rotated, 2) / rotated)
    q, k = (_rotated(each, angles, rotated) for each in (q, k))
    k, v = (each.repeat_interleave(of.num_heads // of.num_kv_heads, 0) for each in (k, v))
    back = torch.arange(length)[:, None] - torch.arange(length)
    seen = (back >= 0) & (back < (of.window or length))
    scores = (q @ k.mT / width**0.5).masked_fill(~seen, -torch.inf)
    mixed: Tensor = scores.softmax(-1) @ v
    return mixed.transpose(0, 1).reshape(length, -1)


def _rotated(x: Tensor, angles: Tensor, rotated: int) -> Tensor:
    first, second, rest = x[..., : rotated // 2], x[..., rotated // 2 : rotated], x[..., rotated:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)
