"""A mixture of experts as a backend's operations, one expert after the other: the definition, and what serves
where no kernel takes the weights.
"""

import torch
from torch import Tensor

from faser.kernels.interface.backend import Backend
from faser.kernels.interface.blocks import Experts


def experts_one_by_one(
    backend: Backend, x: Tensor, block: Experts, hidden: Tensor, routed_by: Tensor | None = None, *, size: int
) -> int:
    """See Backend.experts. size: of an expert's inner network. Returns how many experts any row has chosen."""
    rows, width = hidden.shape
    of_router = x if routed_by is None else routed_by
    logits = backend.linear(of_router, block.router, x.new_empty((rows, len(block.gate_up)), dtype=torch.float32))
    chosen, weights = routed(logits, block)
    given = x.new_empty((rows, block.top_k, width), dtype=torch.float32)
    experts = sorted(set(chosen.flatten().tolist()))
    for expert in experts:
        at, places = (chosen == expert).nonzero(as_tuple=True)
        gate_up = backend.linear(x[at], block.gate_up[expert], x.new_empty((len(at), 2 * size)))
        inner = backend.gate(gate_up, x.new_empty((len(at), size)), block.activation)
        down = x.new_empty((len(at), width), dtype=torch.float32)
        given[at, places] = backend.linear(inner, block.down[expert], down)
    total = torch.zeros_like(given[:, 0])
    for place in range(block.top_k):
        total += weights[:, place, None] * given[:, place]
    hidden.copy_(hidden + total)
    return len(experts)


def routed(logits: Tensor, block: Experts) -> tuple[Tensor, Tensor]:
    """[R, k] experts of each row, int64, and their weights, float32. logits: [R, E] float32."""
    probs, chosen = torch.sort(logits.softmax(-1), dim=-1, descending=True, stable=True)
    weights = probs[:, : block.top_k]
    if block.renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    chosen = chosen[:, : block.top_k]
    return chosen, weights if block.scales is None else weights * block.scales[chosen]
