"""Attention sinks behind an attention kernel that knows none: mixed values are scaled in place, in one launch.

A sink is one more score of a head, without a value: its weight counts in the sum alone. Of scores s with
weights w = exp(s) / sum(exp(s)), a sink t leaves w * sum / (sum + exp(t)) = w * sigmoid(ln(sum) - t). Knows no
scores: the attention kernel says the logarithm of their sum.
"""

import torch
import triton.language as tl
from torch import Tensor

from faser.kernels.cuda.triton.common import EXACT, expect, jit

_TYPES = (torch.bfloat16, torch.float16)
_BLOCK = 1024
_LN_2 = tl.constexpr(0.6931471805599453)


@jit
def _scale_by_sinks(mixed, log2_sums, sinks, num_heads, head_dim, BLOCK: tl.constexpr):
    """Some columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_heads * head_dim
    head = column // head_dim
    scores = tl.load(log2_sums + row * num_heads + head, mask=inside, other=0.0) * _LN_2
    share = 1.0 / (1.0 + tl.exp(tl.load(sinks + head, mask=inside, other=0.0) - scores))
    at = mixed + row * num_heads * head_dim + column
    values = tl.load(at, mask=inside, other=0.0)
    tl.store(at, (values.to(tl.float32) * share).to(values.dtype), mask=inside)


def scale_by_sinks(mixed: Tensor, log2_sums: Tensor, sinks: Tensor) -> None:
    """mixed[r, h] *= sigmoid(ln(2) * log2_sums[r, h] - sinks[h]), in place and rounded once.

    mixed: [R, Hq, D] bfloat16 or float16, of weights that leave the sinks out. log2_sums: [R, Hq] float32, the
    logarithm to base 2 of the sum of exp(score). sinks: [Hq] float32, natural. All contiguous.
    Raises EngineError that names the tensor that does not fit.
    """
    rows, heads, head_dim = mixed.shape
    expect("mixed", mixed, (rows, heads, head_dim), *_TYPES, like=mixed)
    expect("log2_sums", log2_sums, (rows, heads), torch.float32, like=mixed)
    expect("sinks", sinks, (heads,), torch.float32, like=mixed)
    if rows:
        _scale_by_sinks[(rows, -(-heads * head_dim // _BLOCK))](
            mixed, log2_sums, sinks, heads, head_dim, BLOCK=_BLOCK, **EXACT
        )
