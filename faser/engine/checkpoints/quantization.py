"""StoredFp8: the quantisation that a config.json states for the stored weights.

Two formats are supported: `fp8`, as AutoFP8 writes it, and the 8-bit floats of `compressed-tensors`. Which
tensors are quantised follows from the tensors themselves (models/stored_fp8.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from faser.errors import ModelError

_SUPPORTED = "supported are fp8 and compressed-tensors of 8-bit floats, one scale per tensor or output channel"
_FORMATS = ("float-quantized", "naive-quantized")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFp8:
    """Weights of linear layers in float8_e4m3fn, one scale per tensor or channel; some may be unquantised.

    method: its name in the config. static_inputs: the checkpoint has a fixed scale for the inputs of each layer.
    """

    method: str
    static_inputs: bool


def stored_quantization(config: Mapping[str, Any]) -> StoredFp8 | None:
    """The quantisation in quantization_config (compression_config in old checkpoints). None: there is none.

    Raises ModelError that names the unsupported method or field.
    """
    name = "quantization_config" if config.get("quantization_config") is not None else "compression_config"
    stated = config.get(name)
    if stated is None:
        return None
    config_object = _ConfigObject(f"config.json: {name}", stated)
    method = config_object.fields.get("quant_method", stated)
    if method == "fp8":
        return _fp8(config_object)
    if method == "compressed-tensors":
        return _compressed_tensors(config_object)
    raise ModelError(f"config.json: {name} is {method!r}; {_SUPPORTED}")


class _ConfigObject:
    """An object in the config, and its path. Raises ModelError that names the path of anything else."""

    def __init__(self, path: str, value: object) -> None:
        if not isinstance(value, dict):
            raise ModelError(f"{path} is {value!r}; it must be an object")
        self.path = path
        self.fields: dict[str, Any] = value

    def within(self, name: str) -> "_ConfigObject":
        return _ConfigObject(f"{self.path}.{name}", self.fields.get(name))

    def one_of(self, name: str, supported: tuple[object, ...], default: object = None) -> object:
        """The value of a field, which must be one of `supported`. null is absent."""
        value = self.fields.get(name)
        value = default if value is None else value
        if not any(value is each or (value == each and type(value) is type(each)) for each in supported):
            raise ModelError(
                f"{self.path}.{name} is {value!r}; only {' and '.join(map(repr, supported))} can be read"
            )
        return value


def _fp8(config_object: _ConfigObject) -> StoredFp8:
    """activation_scheme: static or dynamic. Scales are per tensor, in weight_scale and input_scale."""
    config_object.one_of("weight_block_size", (None,))
    config_object.one_of("fmt", ("e4m3",), "e4m3")
    scheme = config_object.one_of("activation_scheme", ("static", "dynamic"))
    return StoredFp8(method="fp8", static_inputs=scheme == "static")


def _compressed_tensors(config_object: _ConfigObject) -> StoredFp8:
    """Every group must be supported; the tensors themselves replace `ignore` and `targets`."""
    if config_object.fields.get("transform_config"):
        raise ModelError(f"{config_object.path}.transform_config is not empty; it is not supported")
    if config_object.fields.get("sparsity_config"):
        config_object.within("sparsity_config").one_of("format", ("dense",), "dense")
    groups = config_object.within("config_groups")
    if not groups.fields:
        raise ModelError(f"{groups.path} is empty; a quantised checkpoint has a group")
    static = [_group(groups.within(name), config_object.fields.get("format")) for name in groups.fields]
    return StoredFp8(method="compressed-tensors", static_inputs=any(static))


def _group(group: _ConfigObject, common_format: object) -> bool:
    """Whether the inputs of this group have a fixed scale. Defaults are those of compressed-tensors."""
    group.one_of("format", _FORMATS, common_format)
    group.one_of("output_activations", (None,))
    weights, inputs = group.within("weights"), group.within("input_activations")
    for config_object in (weights, inputs):
        config_object.one_of("num_bits", (8,), 8)
        config_object.one_of("type", ("float",), "int")
        config_object.one_of("symmetric", (True,), True)
    weights.one_of("dynamic", (False,), False)
    weights.one_of("strategy", ("tensor", "channel"), _strategy(weights))
    is_dynamic = inputs.one_of("dynamic", (True, False), False)
    inputs.one_of("strategy", ("token", "tensor") if is_dynamic else ("tensor",), _strategy(inputs))
    return not is_dynamic


def _strategy(config_object: _ConfigObject) -> str:
    """The default strategy of scales, which follows from the group size."""
    size = config_object.fields.get("group_size")
    return "tensor" if size is None else "channel" if size == -1 else "group"
