"""What a config.json says of weights that are stored quantised, and which ways of that are read.

Two are: `fp8`, as AutoFP8 writes it, and the 8-bit floats of `compressed-tensors`. Read without torch; which
tensors are quantised is seen from the tensors themselves (stored_fp8).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from faser.errors import ModelError

_READ = "read are fp8 and compressed-tensors of 8-bit floats, with one scale a tensor or an output channel"
_FORMATS = ("float-quantized", "naive-quantized")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFp8:
    """Products are float8_e4m3fn, with a scale a tensor or a channel; some may have been left as they were.

    method: its name in the config. static_inputs: the checkpoint brings a fixed scale for the inputs of a product.
    """

    method: str
    static_inputs: bool


def stored_quantization(config: Mapping[str, Any]) -> StoredFp8 | None:
    """What quantization_config says (compression_config in old checkpoints). None: nothing is quantised.

    Raises ModelError that names the method, or the field, that is not read.
    """
    name = "quantization_config" if config.get("quantization_config") is not None else "compression_config"
    stated = config.get(name)
    if stated is None:
        return None
    place = _ConfigObject(f"config.json: {name}", stated)
    method = place.fields.get("quant_method", stated)
    if method == "fp8":
        return _fp8(place)
    if method == "compressed-tensors":
        return _compressed_tensors(place)
    raise ModelError(f"config.json: {name} is {method!r}; {_READ}")


class _ConfigObject:
    """An object in the config, and where it is. Raises ModelError that names it when it is none."""

    def __init__(self, path: str, value: object) -> None:
        if not isinstance(value, dict):
            raise ModelError(f"{path} is {value!r}; it must be an object")
        self.path = path
        self.fields: dict[str, Any] = value

    def within(self, name: str) -> "_ConfigObject":
        return _ConfigObject(f"{self.path}.{name}", self.fields.get(name))

    def one_of(self, name: str, read: tuple[object, ...], default: object = None) -> object:
        """The value of a field, which must be one of these. null is absence."""
        value = self.fields.get(name)
        value = default if value is None else value
        if not any(value is each or (value == each and type(value) is type(each)) for each in read):
            raise ModelError(f"{self.path}.{name} is {value!r}; only {' and '.join(map(repr, read))} can be read")
        return value


def _fp8(place: _ConfigObject) -> StoredFp8:
    """activation_scheme is static or dynamic; scales are per tensor, in weight_scale and input_scale."""
    place.one_of("weight_block_size", (None,))
    place.one_of("fmt", ("e4m3",), "e4m3")
    scheme = place.one_of("activation_scheme", ("static", "dynamic"))
    return StoredFp8(method="fp8", static_inputs=scheme == "static")


def _compressed_tensors(place: _ConfigObject) -> StoredFp8:
    """Every group of products must be one that is read; `ignore` and `targets` are seen from the tensors."""
    if place.fields.get("transform_config"):
        raise ModelError(f"{place.path}.transform_config is not empty; transformed weights are not read")
    if place.fields.get("sparsity_config"):
        place.within("sparsity_config").one_of("format", ("dense",), "dense")
    groups = place.within("config_groups")
    if not groups.fields:
        raise ModelError(f"{groups.path} is empty; a quantised checkpoint has a group")
    static = [_group(groups.within(name), place.fields.get("format")) for name in groups.fields]
    return StoredFp8(method="compressed-tensors", static_inputs=any(static))


def _group(group: _ConfigObject, common_format: object) -> bool:
    """Whether inputs of this group have a fixed scale. Defaults are those of the library that writes this."""
    group.one_of("format", _FORMATS, common_format)
    group.one_of("output_activations", (None,))
    weights, inputs = group.within("weights"), group.within("input_activations")
    for place in (weights, inputs):
        place.one_of("num_bits", (8,), 8)
        place.one_of("type", ("float",), "int")
        place.one_of("symmetric", (True,), True)
    weights.one_of("dynamic", (False,), False)
    weights.one_of("strategy", ("tensor", "channel"), _strategy(weights))
    is_dynamic = inputs.one_of("dynamic", (True, False), False)
    inputs.one_of("strategy", ("token", "tensor") if is_dynamic else ("tensor",), _strategy(inputs))
    return not is_dynamic


def _strategy(place: _ConfigObject) -> str:
    """What scales belong to where it is not stated: it follows from the size of a group."""
    size = place.fields.get("group_size")
    return "tensor" if size is None else "channel" if size == -1 else "group"
