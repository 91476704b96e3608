"""Reads the rotary embedding of a config.json, in both formats in use.

These are: rope_theta and rope_scaling as separate fields, or both in rope_parameters. Unsupported kinds of
scaling are refused by name.
"""

import math

from faser.engine.checkpoints.families.architecture import (
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)
from faser.engine.checkpoints.families.fields import Fields
from faser.errors import ModelError

_DEFAULT_THETA = 10_000.0


def rope_spec(fields: Fields, *, default_theta: float = _DEFAULT_THETA) -> RopeSpec:
    """Raises ModelError that names the unsupported kind of scaling or parameter."""
    given = fields.optional_dict("rope_scaling") or fields.optional_dict("rope_parameters") or {}
    nested = [name for name, value in given.items() if isinstance(value, dict)]
    if nested:
        raise ModelError(f"config.json: rope_parameters differ by layer type ({', '.join(nested)}); not supported")
    rope = Fields(given)
    for source in (fields, rope):
        fraction = source.positive_float("partial_rotary_factor", 1.0)
        if fraction != 1.0:
            raise ModelError(f"config.json: partial_rotary_factor is {fraction}; only 1 is supported")
    theta = rope.positive_float("rope_theta", fields.positive_float("rope_theta", default_theta))
    return RopeSpec(theta=theta, scaling=_scaling(given.get("rope_type", given.get("type")), rope, fields))


def _scaling(kind: object, rope: Fields, fields: Fields) -> RopeScaling | None:
    match kind:
        case None | "default":
            return None
        case "linear":
            return LinearScaling(factor=rope.positive_float("factor"))
        case "llama3":
            return _llama3(rope, _original_positions(rope, fields))
        case "yarn":
            return _yarn(rope, fields)
        case _:
            raise ModelError(
                f"config.json: rope_type {kind!r} is not supported; supported are default, linear, llama3, yarn"
            )


def _llama3(rope: Fields, original_positions: int) -> Llama3Scaling:
    low, high = rope.positive_float("low_freq_factor"), rope.positive_float("high_freq_factor")
    if not low < high:
        raise ModelError(f"config.json: low_freq_factor {low} must be below high_freq_factor {high}")
    return Llama3Scaling(
        factor=rope.positive_float("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_positions=original_positions,
    )


def _yarn(rope: Fields, fields: Fields) -> YarnScaling:
    original = _original_positions(rope, fields)
    factor = rope.positive_float("factor", fields.positive_int("max_position_embeddings") / original)
    return YarnScaling(
        factor=factor,
        beta_fast=rope.positive_float("beta_fast", 32.0),
        beta_slow=rope.positive_float("beta_slow", 1.0),
        attention_factor=rope.positive_float("attention_factor", _yarn_attention_factor(rope, factor)),
        original_positions=original,
        truncate=rope.flag("truncate", True),
    )


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    """0.1 ln(factor) + 1 (arXiv 2309.00071, eq. 22), or the ratio of two such terms if the config has mscale."""
    if factor <= 1.0:
        return 1.0
    growth = 0.1 * math.log(factor)
    above, below = (rope.optional_float(name) for name in ("mscale", "mscale_all_dim"))
    if above and below:
        return (above * growth + 1.0) / (below * growth + 1.0)
    return growth + 1.0


def _original_positions(rope: Fields, fields: Fields) -> int:
    """The context length of the pretraining: stated at the top level, in the scaling, or the whole context."""
    name = "original_max_position_embeddings"
    return fields.optional_int(name) or rope.positive_int(name, fields.positive_int("max_position_embeddings"))
