"""The weights that training begins with: a seeded layer, and what the target lends."""

import math

import torch
from torch import Tensor

from faser.engine.checkpoints.heads import HeadSpec
from faser.engine.execution.drafting import head_tensors as tensors

_LAYER = tensors.layer_prefix(0)
_INTO_STREAM = (_LAYER + "self_attn.o_proj.weight", _LAYER + "mlp.down_proj.weight")
_SMALLER = 0.25  # what a layer adds to the stream at first, against other products


def initial_weights(spec: HeadSpec, *, head_rows: Tensor, final_norm: Tensor, seed: int) -> dict[str, Tensor]:
    """Every weight but the embedding, float32 with gradients, under the names of head_tensors.py.

    head_rows: [Vd, H], of the target's head. final_norm: [H], the target's. At first features are the last state
    that the head reads, and its logits those that the target's own head gives it.
    """
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for name, shape in tensors.eagle3_shapes(spec).items():
        if name == tensors.EMBEDDING:
            continue
        if name == tensors.HEAD:
            weight = head_rows.float()
        elif name == tensors.NORM:
            weight = final_norm.float()
        elif len(shape) == 1:
            weight = torch.ones(shape)
        else:
            weight = torch.randn(shape, generator=generator) / math.sqrt(shape[1])
            weight *= _SMALLER if name in _INTO_STREAM else 1.0
        if name == tensors.FC:
            weight *= _SMALLER
            weight[:, -spec.target_hidden_size :] += torch.eye(*weight.shape[:1])[:, : spec.target_hidden_size]
        found[name] = weight.clone().contiguous().requires_grad_()
    return found
