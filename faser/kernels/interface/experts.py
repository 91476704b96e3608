"""A mixture of experts as a backend's operations, one expert after the other: the definition, and what serves
where no kernel takes the weights.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from faser.kernels.interface.backend import Backend
from faser.kernels.interface.blocks import Experts
from faser.kernels.interface.shapes import PackedLinear

SIGMOID_EPS = 1e-6  # added to the sum of weights that are sigmoids, by which they are divided


def experts_one_by_one(
    backend: Backend,
    x: Tensor,
    block: Experts,
    hidden: Tensor,
    routed_by: Tensor | None = None,
    *,
    outputs: Callable[[PackedLinear], int],
) -> int:
    """Compute Backend.experts one by one. outputs: of a product. Returns how many experts any row has chosen."""
    rows, width = hidden.shape

    def network(x: Tensor, gate_up: PackedLinear, down: PackedLinear) -> Tensor:
        size = outputs(gate_up) // 2
        both = backend.linear(x, gate_up, x.new_empty((len(x), 2 * size)))
        inner = backend.gate(both, x.new_empty((len(x), size)), block.activation)
        return backend.linear(inner, down, x.new_empty((len(x), width), dtype=torch.float32))

    of_router = x if routed_by is None else routed_by
    logits = backend.linear(of_router, block.router, x.new_empty((rows, block.num_logits), dtype=torch.float32))
    chosen, weights = routed(logits[:, : len(block.gate_up)], block)
    given = x.new_empty((rows, block.top_k, width), dtype=torch.float32)
    experts = sorted(set(chosen.flatten().tolist()))
    for expert in experts:
        at, places = (chosen == expert).nonzero(as_tuple=True)
        given[at, places] = network(x[at], block.gate_up[expert], block.down[expert])
    total = torch.zeros_like(given[:, 0])
    for place in range(block.top_k):
        total += weights[:, place, None] * given[:, place]
    if block.shared is not None:
        total += logits[:, -1:].sigmoid() * network(x, *block.shared)
    hidden.copy_(hidden + total)
    return len(experts)


def routed(logits: Tensor, block: Experts) -> tuple[Tensor, Tensor]:
    """Choose the experts [R, k] of each row, int64, and their weights, float32. logits: [R, E] float32."""
    weights = logits.sigmoid() if block.sigmoid else logits.softmax(-1)
    liked = weights if block.choice_bias is None else weights + block.choice_bias
    chosen = torch.sort(liked, dim=-1, descending=True, stable=True).indices[:, : block.top_k]
    weights = weights.gather(-1, chosen)
    if block.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + (SIGMOID_EPS if block.sigmoid else 0.0))
    return chosen, weights if block.scales is None else weights * block.scales[chosen]
