"""Rotary angles: one table of cosines and sines for all positions of a model.

Computed in float32, in the order of the models' training code, so that late positions get the same rounding.
"""

import math

import torch
from torch import Tensor

from faser.engine.checkpoints.families.architecture import LinearScaling, Llama3Scaling, RopeSpec, YarnScaling


def rotary_angles(rope: RopeSpec, *, head_dim: int, num_positions: int) -> Tensor:
    """[num_positions, head_dim] float32 on the CPU: cosines of the head_dim / 2 pairs, then their sines.

    The scaling's attention factor is folded into both. Pair i is channels i and i + head_dim / 2.

    Source: Su et al., arXiv:2104.09864, section 3.2.2.
    """
    turns = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies(rope, head_dim)
    table = torch.cat((turns.cos(), turns.sin()), dim=-1)
    return table * rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling) else table


def frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """[head_dim / 2] float32: radians by which each pair turns from one position to the next."""
    unscaled = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    match rope.scaling:
        case None:
            return unscaled
        case LinearScaling(factor=factor):
            return unscaled / factor
        case Llama3Scaling():
            return _llama3(unscaled, rope.scaling)
        case YarnScaling():
            return _yarn(unscaled, rope.scaling, rope.theta)


def _llama3(unscaled: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Source: the Llama 3.1 reference code (meta-llama/llama-models), apply_scaling."""
    wavelengths = 2 * math.pi / unscaled
    turns = scaling.original_positions / wavelengths
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - kept) * unscaled / scaling.factor + kept * unscaled
    long = wavelengths > scaling.original_positions / scaling.low_freq_factor
    short = wavelengths < scaling.original_positions / scaling.high_freq_factor
    return torch.where(long, unscaled / scaling.factor, torch.where(short, unscaled, blended))


def _yarn(unscaled: Tensor, scaling: YarnScaling, theta: float) -> Tensor:
    """Source: Peng et al., arXiv:2309.00071, section 3.2 ("NTK-by-parts"); its α is beta_slow, its β beta_fast.

    pair       0 ......... first ............ last ......... D/2
    frequency  |  kept as it is  |  blended  |  divided by factor  |
    """
    pairs = len(unscaled)

    def pair_that_turns(times: float) -> float:
        return 2 * pairs * math.log(scaling.original_positions / (times * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    width = last - first or 0.001  # one pair: the ramp is a step
    divided = ((torch.arange(pairs, dtype=torch.float32) - first) / width).clamp(0, 1)
    return unscaled / scaling.factor * divided + unscaled * (1 - divided)
