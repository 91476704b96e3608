"""Rotary angles: tables of cosines and sines for all positions of a model.

Computed in float32, in the order of the models' training code, so that late positions get the same rounding.
"""

import math

import torch
from torch import Tensor

from faser.engine.checkpoints.families.architecture import (
    AttentionSpec,
    DecoderSpec,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    QueryGrowth,
    RopeSpec,
    YarnScaling,
)


class RotaryTables:
    """The angles of a model's layers, on a device: a table for each rotary embedding and size of heads."""

    def __init__(self, spec: DecoderSpec, *, num_positions: int, device: torch.device) -> None:
        self._keys: dict[tuple[RopeSpec | None, int], Tensor] = {}
        self._queries: dict[tuple[RopeSpec | None, int], Tensor] = {}
        for rope, head_dim in {(each.rope, each.head_dim) for each in spec.attentions}:
            if rope is None:
                continue
            angles = rotary_angles(rope, head_dim=head_dim, num_positions=num_positions)
            self._keys[rope, head_dim] = angles.to(device)
            if rope.query_growth is not None:
                growth = query_factors(rope.query_growth, num_positions)
                self._queries[rope, head_dim] = (angles * growth[:, None]).to(device)

    def keys(self, attention: AttentionSpec) -> Tensor | None:
        """Return the keys' angles [P, D] float32, see rotary_angles; None: no channel rotates."""
        return self._keys.get((attention.rope, attention.head_dim))

    def queries(self, attention: AttentionSpec) -> Tensor | None:
        """The same for queries; None: they have the angles of keys."""
        return self._queries.get((attention.rope, attention.head_dim))


def rotary_angles(rope: RopeSpec, *, head_dim: int, num_positions: int) -> Tensor:
    """Return [num_positions, head_dim] float32 on the CPU: cosines of the head_dim / 2 pairs, then their sines.

    The scaling's attention factor is folded into those of pairs that rotate; others have cosine 1 and sine 0. Pair
    i is channels i and i + head_dim / 2.

    Source: Su et al., arXiv:2104.09864, section 3.2.2.
    """
    rotated = rope.rotated or head_dim
    speeds = frequencies(rope, rotated, num_positions=num_positions)
    turns = torch.arange(num_positions, dtype=torch.float32)[:, None] * speeds
    factor = rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling | LongRopeScaling) else 1.0
    resting = torch.zeros(num_positions, (head_dim - rotated) // 2)
    return torch.cat((turns.cos() * factor, resting + 1, turns.sin() * factor, resting), dim=-1)


def query_factors(growth: QueryGrowth, num_positions: int) -> Tensor:
    """Return the factor of the queries at each position: [num_positions] float32."""
    lengths = torch.arange(num_positions) // growth.original_positions
    return 1 + growth.beta * torch.log(1 + lengths.float())


def frequencies(rope: RopeSpec, rotated: int, *, num_positions: int = 1) -> Tensor:
    """Return the radians by which each pair turns from one position to the next: [rotated / 2] float32.

    num_positions: the longest context that is served, which decides between the factors of longrope.
    """
    unscaled = 1.0 / rope.theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
    match rope.scaling:
        case None:
            return unscaled
        case LinearScaling(factor=factor):
            return unscaled / factor
        case Llama3Scaling():
            return _llama3(unscaled, rope.scaling)
        case YarnScaling():
            return _yarn(unscaled, rope.scaling, rope.theta)
        case ProportionalScaling(turning=turning, factor=factor):
            return torch.where(torch.arange(len(unscaled)) < turning, unscaled / factor, 0.0)
        case LongRopeScaling(short=short, long=long, original_positions=original):
            factors = torch.tensor(long if num_positions > original else short, dtype=torch.float32)
            return 1.0 / (factors * rope.theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated))


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
