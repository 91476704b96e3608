"""A mixture of experts for few rows in three launches, norms included, instead of seven to ten.

    route      norms of the rows; each program some logits; the last one to end routes and gathers all rows
    gate_up    as for more rows
    down       as for more rows; for each piece of the outputs the last program to end adds up the weighed results

Programs know that they are the last by counting in `arrived`, which each launch leaves as zeros. The sums of a row
have one order, whichever program is last, and products have tiles of a fixed size: a row's bits depend neither on
the other rows nor on their number, up to FEW_ROWS. A shared expert is one more expert, which every row passes.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from faser.kernels.cuda.triton.common import ACTIVATIONS, EXACT, expect, expect_lines, next_power_of_2
from faser.kernels.cuda.triton.expert_kernels import _route_few
from faser.kernels.cuda.triton.expert_weights import TYPES, ExpertWeights
from faser.kernels.cuda.triton.experts import FEW_ROWS, Routes, Tiles, down, gate_up

# Tiles of the products, by the names of the ways to compute a mixture. All have one block of pairs an expert.
FEW_ROW_TILES = {
    "3 launches of 64 outputs": Tiles(rows=16, outputs=64, depth=128, weights_first=True),
    "3 launches of 32 outputs": Tiles(rows=16, outputs=32, depth=128, stages=4),
}
_ROUTER = Tiles(rows=16, outputs=16, depth=128)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FewRowExperts:
    """A mixture for up to FEW_ROWS rows. networks: the shared one last, if there is one.

    router: [N, H], of the rows' type; router_bias: [N] or None: of logits, the shared expert's last. scales: [E]
    float32 or None, without the shared one. Other fields: see Experts.
    """

    networks: ExpertWeights
    router: Tensor
    router_bias: Tensor | None
    top_k: int
    renormalise: bool
    activation: str
    scales: Tensor | None
    shares: bool
    arrived: Tensor = field(init=False)

    def __post_init__(self) -> None:
        width, first = self.networks.width, self.networks.first
        expect("router", self.router, (self.networks.count, width), *TYPES, like=first)
        self.networks.check(self.router.dtype, width)
        assert self.activation in ACTIVATIONS, self.activation
        most_pieces = -(-width // min(each.outputs for each in FEW_ROW_TILES.values()))
        arrived = torch.zeros(1 + most_pieces, dtype=torch.int32, device=first.device)
        object.__setattr__(self, "arrived", arrived)

    def __call__(
        self,
        x: Tensor,
        norm: Tensor,
        eps: float,
        hidden: Tensor,
        read: Tensor,
        slots: Tensor | None = None,
        router_norm: Tensor | None = None,
        *,
        tiles: Tiles,
    ) -> None:
        """hidden += the mixture of rms_norm(x). x, hidden: [R, H], each row contiguous; they may be the same.

        norm, router_norm: [H] float32, before the experts and the router; None: the same one. read, slots: see
        experts.py. tiles: of FEW_ROW_TILES. Raises EngineError that names the tensor that does not fit.
        """
        (rows, width), networks = x.shape, self.networks
        assert 0 < rows <= FEW_ROWS, rows
        first, router_norm = networks.first, norm if router_norm is None else router_norm
        expect_lines("x", x, (rows, width), self.router.dtype, like=first)
        expect_lines("hidden", hidden, (rows, width), x.dtype, like=first)
        expect("norm", norm, (width,), torch.float32, like=first)
        expect("router_norm", router_norm, (width,), torch.float32, like=first)
        expect("read", read, (1,), torch.int64, like=first)
        if slots is not None:
            expect("slots", slots, (rows,), torch.int64, like=first)
        normed = torch.empty((rows, width), dtype=x.dtype, device=x.device)
        routes = self._route(x, norm, router_norm, eps, normed, read, slots)
        inner = gate_up(networks, normed, routes, self.activation, tiles)
        down(networks, inner, routes, tiles, hidden=hidden, arrived=self.arrived)

    def _route(
        self,
        x: Tensor,
        norm: Tensor,
        router_norm: Tensor,
        eps: float,
        normed: Tensor,
        read: Tensor,
        slots: Tensor | None,
    ) -> Routes:
        (rows, width), columns = x.shape, self.networks.count
        logits = torch.empty((rows, columns), dtype=torch.float32, device=x.device)
        weights = logits.new_empty((rows, self.top_k + self.shares))
        pairs, counts = (logits.new_empty(each, dtype=torch.int32) for each in ((columns, rows), (columns,)))
        num_experts = columns - self.shares
        scales, bias = self.scales, self.router_bias
        _route_few[(-(-columns // _ROUTER.outputs),)](
            x, x.stride(0), norm, router_norm, eps, self.router, self.router if bias is None else bias,
            logits if scales is None else scales, logits if slots is None else slots, normed, logits, pairs,
            counts, weights, read, self.arrived, rows, width, num_experts, ROWS=FEW_ROWS, SUM_ROWS=_ROUTER.rows,
            OUTPUTS=_ROUTER.outputs, DEPTH=_ROUTER.depth, BLOCK=next_power_of_2(num_experts), TOP=self.top_k,
            PLACES=next_power_of_2(self.top_k), RENORMALISE=self.renormalise, SCALED=scales is not None,
            PADDED=slots is not None, BIASED=bias is not None, SHARES=self.shares, WIDE=x.device.type == "cpu",
            num_warps=_ROUTER.warps, num_stages=_ROUTER.stages, **EXACT,
        )  # fmt: skip
        return Routes(weights=weights, pairs=pairs, counts=counts, slots=slots)
