"""The rotary embedding in a GGUF file's metadata and tensors, as fields of config.json.

Scaling by factors of its own is stored as tensors: Llama 3's, of which the rule is recovered, and longrope's.
"""

import math
from typing import Any

import numpy as np

from faser.engine.checkpoints.gguf.file import GgufFile, shortest
from faser.errors import ModelError
from faser.types.arrays import Floats32

LLAMA3_FACTORS = "rope_freqs.weight"
LONG_FACTORS = "rope_factors_long.weight"
SHORT_FACTORS = "rope_factors_short.weight"
# llama.cpp stores Llama 3's rope scaling as factors. All published checkpoints compute them from these values.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192
_STOPPED = 1e29  # a factor: such a pair does not turn within any context
_SAME = 1e-6  # relative; a float32 that was computed in double precision


def rope_fields(file: GgufFile, architecture: str) -> dict[str, Any]:
    """rope_theta and rope_scaling, as in transformers 4.

    Raises ModelError that names the key and the value if they cannot be expressed.
    """
    theta = file.number(f"{architecture}.rope.freq_base", 10000.0)
    prefix = f"{architecture}.rope.scaling"
    kind = file.get(f"{prefix}.type", str, "none")
    scaling: dict[str, Any] | None = None
    if file.has_tensor(LLAMA3_FACTORS):
        scaling = _proportional(file) or _llama3(file, theta)
    elif file.has_tensor(LONG_FACTORS):
        scaling = _longrope(file, architecture)
    elif kind == "linear":
        scaling = {"rope_type": "linear", "factor": file.number(f"{prefix}.factor", 1.0)}
    elif kind == "yarn":
        scaling = _yarn(file, prefix)
    elif kind != "none":
        raise ModelError(
            f"{file.path}: {prefix}.type is {kind}; supported are none, linear, yarn, longrope with factors"
        )
    return {"rope_theta": theta, "rope_scaling": scaling}


def _proportional(file: GgufFile) -> dict[str, Any] | None:
    """Return the scaling of Gemma 4's global layers, whose last pairs stand still; None: it is another one."""
    factors = file.array(LLAMA3_FACTORS)
    turning = int((factors == 1).sum())
    if (factors[turning:] < _STOPPED).any() or (factors[:turning] != 1).any() or turning == len(factors):
        return None
    return {"rope_type": "proportional", "partial_rotary_factor": turning / len(factors)}


def _llama3(file: GgufFile, theta: float) -> dict[str, Any]:
    """The parameters of stored rope factors. Raises ModelError if Llama 3's rule does not yield the factors."""
    factors = file.array(LLAMA3_FACTORS)
    factor = shortest(factors.max())
    if not np.allclose(_llama3_factors(len(factors), theta, factor), factors, rtol=1e-4):
        raise ModelError(
            f"{file.path}: {LLAMA3_FACTORS} is not Llama 3's scaling by {factor:g}; it is not supported"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }


def _llama3_factors(num_pairs: int, theta: float, factor: float) -> Floats32:
    """Return the divisor of each rotary frequency: [num_pairs] float32.

    A wavelength that fits the original context at least _LLAMA3_HIGH times keeps its frequency; one that fits at
    most _LLAMA3_LOW times is divided by factor; in between the two are blended.

    Source: Llama 3.1's reference code, meta-llama/llama-models, apply_scaling.
    """
    wavelengths = 2 * math.pi * theta ** (np.arange(num_pairs) / num_pairs)
    fits = _LLAMA3_CONTEXT / wavelengths
    keep = np.clip((fits - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0, 1.0)
    return np.asarray(1 / ((1 - keep) / factor + keep), np.float32)


def _longrope(file: GgufFile, architecture: str) -> dict[str, Any]:
    """attention_factor is stated if it is not the usual one, √(1 + ln(growth) / ln(original positions))."""
    if not file.has_tensor(SHORT_FACTORS):
        raise ModelError(f"{file.path} has {LONG_FACTORS} but no {SHORT_FACTORS}")
    original = file.size(f"{architecture}.rope.scaling.original_context_length")
    if original < 2:
        raise ModelError(f"{file.path}: original_context_length is {original}; longrope needs at least 2")
    scaling = {
        "rope_type": "longrope",
        "short_factor": [shortest(each) for each in file.array(SHORT_FACTORS)],
        "long_factor": [shortest(each) for each in file.array(LONG_FACTORS)],
        "original_max_position_embeddings": original,
    }
    growth = file.size(f"{architecture}.context_length") / original
    usual = math.sqrt(1 + math.log(growth) / math.log(original)) if growth > 1 else 1.0
    stored = file.number(f"{architecture}.rope.scaling.attn_factor", usual)
    return scaling if math.isclose(stored, usual, rel_tol=_SAME) else scaling | {"attention_factor": stored}


def _yarn(file: GgufFile, prefix: str) -> dict[str, Any]:
    """yarn_log_multiplier is mscale_all_dim; llama.cpp takes mscale to be 1 then."""
    for key in ("yarn_ext_factor", "attn_factor"):
        if (value := file.number(f"{prefix}.{key}", 1.0)) != 1.0:
            raise ModelError(f"{file.path}: {prefix}.{key} is {value:g}; only 1 is supported")
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": file.number(f"{prefix}.factor", 1.0),
        "original_max_position_embeddings": file.size(f"{prefix}.original_context_length"),
    }
    stated = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "yarn_attn_factor": "attention_factor"}
    for key, name in stated.items():
        if file.has(f"{prefix}.{key}"):
            scaling[name] = file.number(f"{prefix}.{key}", 0.0)
    if multiplier := file.number(f"{prefix}.yarn_log_multiplier", 0.0):
        scaling |= {"mscale": 1.0, "mscale_all_dim": multiplier}
    return scaling
