"""Products, norms and the optimiser of the training step, in few passes over memory.

Matrices are products in the type of the activations; norms, softmax and losses are computed in float32.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_CHUNK_ROWS = 1024  # most rows whose logits exist at a time
_COEFFICIENTS = (3.4445, -4.775, 2.0315)  # of the iteration of Newton and Schulz
_ITERATIONS = 5
_BLOCK = 576  # rows of a matrix that are made orthogonal together, at most
_LONG = 2.5  # long side over short one, from which iterating over Gram matrices is less work
_MOMENTUM = 0.95
_RMS = 0.2  # of the entries of a step, which is that of AdamW's
_LEAST_NORM = 1e-7


class RmsNorm(torch.autograd.Function):
    """x / sqrt(mean(x²) + eps) * weight. x: [R, D]; weight: [D], float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x.float() * scale
        grad = grads[0].float()
        grad_weight = (grad * normed).sum(0) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None
        scaled = grad * weight
        share = (scaled * normed).mean(-1, keepdim=True)
        return scaled.sub_(normed.mul_(share)).mul_(scale).to(x.dtype), grad_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize the rows of x by their root mean square, with a gradient: see RmsNorm."""
    normed: Tensor = RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return normed


class LinearLoss(torch.autograd.Function):
    """The loss of rows of logits against target distributions, the best id of each row, and its overlap.

    Σ_r weights[r] * ((1 - distance) * cross-entropy + distance * L1 distance) of probs[r] and the softmax of
    hidden[r] @ head.T. overlap: [R] float32, Σ_i min(p_i, q_i), the chance that a coupled draft is accepted; the
    L1 distance is 2 - 2 * overlap, which is exact where probs sum to 1.

    hidden: [R, H]. head: [Vd, H]. ids: [R, k] int64, distinct in a row where probs are above 0. probs: [R, k]
    float32, summing to at most 1. weights: [R] float32. Gradients are computed along with the loss, in chunks: the
    logits of all rows never exist. The gradient of the loss must be 1.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, ids: Tensor, probs: Tensor, weights: Tensor, distance: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros(head.shape, dtype=torch.float32, device=head.device)
        best = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
        overlap = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for first in range(0, len(hidden), _CHUNK_ROWS):
            part = slice(first, first + _CHUNK_ROWS)
            weight = weights[part, None]
            weighted = probs[part] * weight * (1 - distance)
            mass = weighted.sum(-1, keepdim=True)
            logits = (hidden[part] @ head.T).float()
            highest, best[part] = logits.max(-1)
            logits -= highest[:, None]
            said = logits.gather(-1, ids[part])
            total = logits.exp_().sum(-1, keepdim=True)
            chances = said.exp() / total
            overlap[part] = torch.minimum(chances, probs[part]).sum(-1)
            loss += (mass * total.log()).sum() - (weighted * said).sum()
            if distance:
                loss += 2 * distance * (weight[:, 0] * (1 - overlap[part])).sum()
                lacking = 2 * distance * weight * chances * (chances < probs[part])
                weighted, mass = weighted + lacking, mass + lacking.sum(-1, keepdim=True)
            logits *= mass / total
            logits.scatter_add_(-1, ids[part], -weighted)
            grads = logits.to(hidden.dtype)
            torch.mm(grads, head, out=grad_hidden[part])
            grad_head += grads.T @ hidden[part]
        ctx.save_for_backward(grad_hidden, grad_head.to(head.dtype))
        ctx.mark_non_differentiable(best, overlap)
        return loss, best, overlap

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        del grads  # that of the loss is 1
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden, grad_head, None, None, None, None


def linear_loss(
    hidden: Tensor, head: Tensor, ids: Tensor, probs: Tensor, weights: Tensor, distance: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, best ids [R], overlap [R]); see LinearLoss."""
    found: tuple[Tensor, Tensor, Tensor] = LinearLoss.apply(hidden, head, ids, probs, weights, distance)  # type: ignore[no-untyped-call]
    return found


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn channel pairs (i, i + D / 2) of each head.

    x: [R, heads, D]. angles: [R, D] float32, cosines, then sines.
    """
    half = x.shape[-1] // 2
    cosines, sines = angles[:, None, :half], angles[:, None, half:]
    first, second = x[..., :half].float(), x[..., half:].float()
    turned = torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)
    return turned.to(x.dtype)


class Muon(torch.optim.Optimizer):
    """An optimiser for matrices, whose steps have singular values near 1 (K. Jordan et al., 2024).

    Steps are as large as AdamW's, so both follow one rate (arXiv 2502.16982). torch.optim.Muon computes the same
    in bfloat16 alone, which takes sixty times as long as float32 on a processor without products of bfloat16.
    params: groups of matrices. dtype: of the products that make a step.
    """

    def __init__(
        self, params: Iterable[dict[str, object]], lr: float, weight_decay: float, dtype: torch.dtype
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "a step reads the gradients that are there"
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                momentum = state.setdefault("momentum", torch.zeros_like(weight))
                momentum.lerp_(weight.grad, 1 - _MOMENTUM)
                step = orthogonal(weight.grad.lerp(momentum, _MOMENTUM).to(self._dtype))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(step, alpha=-group["lr"] * _RMS * max(weight.shape) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """About U V' of the matrix U S V', in blocks of its short side: singular values become .7 to 1.2.

    One block of 1,536 rows takes six times as many products as three of 512. Blocks of one matrix learn nearly as
    well as a whole one (arXiv 2510.16981).
    """
    short = 0 if matrix.shape[0] <= matrix.shape[1] else 1
    blocks = matrix.chunk(-(-matrix.shape[short] // _BLOCK), short)
    return torch.cat([_orthogonal(block.mT if short else block) for block in blocks]).transpose(0, short)


def _orthogonal(block: Tensor) -> Tensor:
    """block: [short, long]. Every iterate is a polynomial of the Gram matrix, times the block.

    So a long block is multiplied twice in all, and what is iterated has the size of its short side. It is iterated
    in float32: rounding makes the smallest eigenvalues of a Gram matrix negative, and each iteration makes these
    twelve times as large. Gradients have many small ones: with bfloat16 a step had singular values of thousands.
    """
    a, b, c = _COEFFICIENTS
    found: Tensor = block / block.norm().clamp_min(_LEAST_NORM)
    if found.shape[1] < _LONG * found.shape[0]:
        for _ in range(_ITERATIONS):
            gram = found @ found.mT
            found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
        return found
    wide = found.float()
    gram = wide @ wide.mT
    factor = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    for _ in range(_ITERATIONS):
        step = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        step.diagonal().add_(a)
        factor = step @ factor
        gram = step @ gram @ step
    product: Tensor = factor.to(found.dtype) @ found
    return product
