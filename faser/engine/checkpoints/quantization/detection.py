"""Finds the quantisation that a config.json states for the stored weights.

Which tensors are quantised follows from the tensors themselves (models/stored_fp8.py, models/stored_codes.py).
"""

from collections.abc import Mapping
from typing import Any

from faser.engine.checkpoints.quantization.compressed_tensors import compressed_tensors
from faser.engine.checkpoints.quantization.config_object import ConfigObject
from faser.engine.checkpoints.quantization.grouped_integers import awq, gptq
from faser.engine.checkpoints.quantization.stored import StoredFp8, StoredLowBit
from faser.errors import ModelError

_SUPPORTED = "supported are fp8, awq, gptq and compressed-tensors"


def stored_quantization(config: Mapping[str, Any]) -> StoredFp8 | StoredLowBit | None:
    """The quantisation in quantization_config (compression_config in old checkpoints). None: there is none.

    Raises ModelError that names the unsupported method or field.
    """
    name = "quantization_config" if config.get("quantization_config") is not None else "compression_config"
    stated = config.get(name)
    if stated is None:
        return None
    config_object = ConfigObject(f"config.json: {name}", stated)
    method = config_object.fields.get("quant_method", stated)
    if method == "fp8":
        return _fp8(config_object)
    if method == "compressed-tensors":
        return compressed_tensors(config_object)
    if method == "awq":
        return awq(config_object)
    if method == "gptq":
        return gptq(config_object)
    raise ModelError(f"config.json: {name} is {method!r}; {_SUPPORTED}")


def _fp8(config_object: ConfigObject) -> StoredFp8:
    """activation_scheme: static or dynamic. Scales are per tensor, in weight_scale and input_scale."""
    config_object.one_of("weight_block_size", (None,))
    config_object.one_of("fmt", ("e4m3",), "e4m3")
    scheme = config_object.one_of("activation_scheme", ("static", "dynamic"))
    return StoredFp8(method="fp8", static_inputs=scheme == "static")
