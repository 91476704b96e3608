"""Quantised weights as a config.json describes them: which kind, and what is refused by name.

Opens no tensor. Which tensors are quantised follows from the tensors themselves (execution/models/sources.py,
stored_codes.py). Defaults of fields are those of the libraries that write them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from faser.errors import ModelError

_SUPPORTED = "supported are fp8, fbgemm_fp8, modelopt, awq, gptq, compressed-tensors and mxfp4"
Block = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFp8:
    """Weights of linear layers in float8_e4m3fn; some may be unquantised.

    method: its name in the config. static_inputs: the checkpoint has a fixed scale for the inputs of each layer.
    block: outputs and inputs that share a scale; None: a channel or a whole tensor has one.
    """

    method: str
    static_inputs: bool
    block: Block | None = None


class Layout(StrEnum):
    """Layouts of integers and scales in the tensors of a checkpoint."""

    AWQ = "awq"
    GPTQ = "gptq"
    PACKED = "pack-quantized"
    INTEGERS = "int-quantized"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLowBit:
    """Weights of linear layers as integers with scales; some may be unquantised.

    method: its name in the config. bits: of an integer; a checkpoint may have products of several sizes.
    zero_offset: what is added to a stored zero point.
    """

    method: str
    layout: Layout
    bits: tuple[int, ...]
    zero_offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMxfp4:
    """Weights of experts as floats of four bits, 32 of which share a power of two; all others are unquantised."""

    method: str = "mxfp4"


StoredQuantization = StoredFp8 | StoredLowBit | StoredMxfp4

_FLOATS = ("float-quantized", "naive-quantized")
_FORMATS = (*_FLOATS, Layout.PACKED.value, Layout.INTEGERS.value)
# static, weight: columns stay in their order. group, dynamic: weight_g_idx names the group of every column.
_ORDERS = (None, False, True, "static", "weight", "group", "dynamic")


class ConfigObject:
    """An object in the config, and its path. Raises ModelError that names the path of anything else."""

    def __init__(self, path: str, value: object) -> None:
        if not isinstance(value, dict):
            raise ModelError(f"{path} is {value!r}; it must be an object")
        self.path = path
        self.fields: dict[str, Any] = value

    def within(self, name: str) -> "ConfigObject":
        return ConfigObject(f"{self.path}.{name}", self.fields.get(name))

    def one_of(self, name: str, supported: tuple[object, ...], default: object = None) -> object:
        """The value of a field, which must be one of `supported`. null is absent."""
        value = self.fields.get(name)
        value = default if value is None else value
        if not any(value is each or (value == each and type(value) is type(each)) for each in supported):
            raise ModelError(
                f"{self.path}.{name} is {value!r}; only {' and '.join(map(repr, supported))} can be read"
            )
        return value

    def block(self, name: str) -> Block | None:
        """Outputs and inputs that share a scale; null is none. Raises ModelError for anything but such a pair."""
        size = self.fields.get(name)
        if size is None:
            return None
        is_pair = isinstance(size, list) and len(size) == 2 and all(type(each) is int for each in size)
        if not is_pair or size[0] < 1 or size[1] < 32 or size[1] % 32:
            raise ModelError(
                f"{self.path}.{name} is {size!r}; only a pair of numbers can be read, the second a multiple of 32"
            )
        return size[0], size[1]

    def group_size(self, name: str = "group_size") -> None:
        """Check the values that share a scale: -1, which is a row, or a multiple of 32."""
        size = self.fields.get(name)
        if size is None or size == -1:
            return
        if not isinstance(size, int) or isinstance(size, bool) or size < 1 or size % 32:
            raise ModelError(f"{self.path}.{name} is {size!r}; only -1 and multiples of 32 can be read")


def stored_quantization(config: Mapping[str, Any]) -> StoredQuantization | None:
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
    if method == "fbgemm_fp8":
        return StoredFp8(method="fbgemm_fp8", static_inputs=False)
    if method == "modelopt":
        return _modelopt(config_object)
    if method == "compressed-tensors":
        return compressed_tensors(config_object)
    if method == "awq":
        return awq(config_object)
    if method == "gptq":
        return gptq(config_object)
    if method == "mxfp4":
        return StoredMxfp4()
    raise ModelError(f"config.json: {name} is {method!r}; {_SUPPORTED}")


def _fp8(config_object: ConfigObject) -> StoredFp8:
    """Read the config of DeepSeek's and Qwen's checkpoints, whose scales are per block, or vLLM's, per tensor.

    activation_scheme: static or dynamic. scale_fmt: ue8m0 rounds scales to powers of two.
    """
    config_object.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    config_object.one_of("scale_fmt", (None, "float", "ue8m0"))
    scheme = config_object.one_of("activation_scheme", ("static", "dynamic"))
    return StoredFp8(
        method="fp8", static_inputs=scheme == "static", block=config_object.block("weight_block_size")
    )


def _modelopt(config_object: ConfigObject) -> StoredFp8:
    """Read the config of NVIDIA's Model Optimizer. Scales are per tensor or channel."""
    algorithm = config_object.one_of("quant_algo", ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"))
    return StoredFp8(method="modelopt", static_inputs=algorithm == "FP8")


def compressed_tensors(config_object: ConfigObject) -> StoredFp8 | StoredLowBit:
    """Every group must be supported; the tensors themselves replace `ignore` and `targets`."""
    if config_object.fields.get("transform_config"):
        raise ModelError(f"{config_object.path}.transform_config is not empty; it is not supported")
    if config_object.fields.get("sparsity_config"):
        config_object.within("sparsity_config").one_of("format", ("dense",), "dense")
    groups = config_object.within("config_groups")
    if not groups.fields:
        raise ModelError(f"{groups.path} is empty; a quantised checkpoint has a group")
    named = {name: groups.within(name) for name in groups.fields}
    common = config_object.fields.get("format")
    formats = [str(group.one_of("format", _FORMATS, common)) for group in named.values()]
    kinds = sorted({"float-quantized" if each in _FLOATS else each for each in formats})
    if len(kinds) > 1:
        raise ModelError(f"{groups.path} are {' and '.join(kinds)}; only one kind at a time can be read")
    if kinds[0] == "float-quantized":
        static = [_floats(group) for group in named.values()]
        blocks = {_block(group.within("weights")) for group in named.values()}
        if len(blocks) > 1:
            raise ModelError(f"{groups.path} have scales of {len(blocks)} kinds; only one at a time can be read")
        return StoredFp8(method="compressed-tensors", static_inputs=any(static), block=blocks.pop())
    layout = Layout(kinds[0])
    bits = sorted({_integers(group, layout) for group in named.values()})
    return StoredLowBit(method=f"compressed-tensors {layout}", layout=layout, bits=tuple(bits))


def _floats(group: ConfigObject) -> bool:
    """Return whether the inputs of this group have a fixed scale."""
    group.one_of("output_activations", (None,))
    weights, inputs = group.within("weights"), group.within("input_activations")
    for config_object in (weights, inputs):
        config_object.one_of("num_bits", (8,), 8)
        config_object.one_of("type", ("float",), "int")
        config_object.one_of("symmetric", (True,), True)
    weights.one_of("dynamic", (False,), False)
    weights.one_of("strategy", ("tensor", "channel", "block", "group"), _strategy(weights))
    is_dynamic = inputs.one_of("dynamic", (True, False), False)
    inputs.one_of("strategy", ("token", "tensor", "group") if is_dynamic else ("tensor",), _strategy(inputs))
    return not is_dynamic


def _block(weights: ConfigObject) -> Block | None:
    """The values that share a scale, of weights in 8-bit floats; None: those of a channel or a tensor do."""
    strategy = weights.fields.get("strategy") or _strategy(weights)
    if strategy not in ("block", "group"):
        return None
    name = "block_structure" if strategy == "block" else "group_size"
    if weights.fields.get(name) is None:
        raise ModelError(f"{weights.path}.{name} is None; its strategy is {strategy!r}")
    if strategy == "block":
        return weights.block(name)
    weights.group_size()
    return 1, int(weights.fields[name])


def _integers(group: ConfigObject, layout: Layout) -> int:
    """The bits of this group's integers."""
    group.one_of("output_activations", (None,))
    weights = group.within("weights")
    bits = weights.one_of("num_bits", (4, 8) if layout is Layout.PACKED else (8,), 8)
    weights.one_of("type", ("int",), "int")
    weights.one_of("symmetric", (True, False), True)
    weights.one_of("dynamic", (False,), False)
    weights.one_of("strategy", ("tensor", "channel", "group"), _strategy(weights))
    weights.one_of("actorder", _ORDERS)
    weights.group_size()
    if group.fields.get("input_activations") is not None:
        inputs = group.within("input_activations")
        inputs.one_of("num_bits", (8,), 8)
        inputs.one_of("type", ("int",), "int")
        inputs.one_of("dynamic", (True,), False)
        inputs.one_of("strategy", ("token",), _strategy(inputs))
    assert isinstance(bits, int)
    return bits


def _strategy(config_object: ConfigObject) -> str:
    """The default strategy of scales, which follows from the group size."""
    size = config_object.fields.get("group_size")
    return "tensor" if size is None else "channel" if size == -1 else "group"


def awq(config_object: ConfigObject) -> StoredLowBit:
    """Read AutoAWQ's config; w_bit and q_group_size are older names. Raises ModelError that names a field."""
    fields = config_object.fields
    config_object.one_of("w_bit" if "w_bit" in fields else "bits", (4,))
    config_object.group_size("q_group_size" if "q_group_size" in fields else "group_size")
    config_object.one_of("zero_point", (True,), True)
    config_object.one_of("version", ("gemm", "GEMM"), "gemm")
    return StoredLowBit(method="awq", layout=Layout.AWQ, bits=(4,))


def gptq(config_object: ConfigObject) -> StoredLowBit:
    """Read the config of AutoGPTQ or GPTQModel. Raises ModelError that names a field.

    checkpoint_format gptq stores a zero point less one, gptq_v2 as it is.
    """
    bits = config_object.one_of("bits", (4, 8))
    config_object.group_size()
    config_object.one_of("is_marlin_format", (False,), False)
    config_object.one_of("pack_dtype", ("int32",), "int32")
    name = "format" if "checkpoint_format" not in config_object.fields else "checkpoint_format"
    written = config_object.one_of(name, ("gptq", "gptq_v2"), "gptq")
    # Patterns of modules: with +: they have bits or groups of their own, with -: they are not quantised.
    dynamic = config_object.fields.get("dynamic") or {}
    if own := [pattern for pattern in dynamic if not str(pattern).startswith("-:")]:
        raise ModelError(f"{config_object.path}.dynamic has {own[0]!r}; only modules with -: can be left out")
    assert isinstance(bits, int)
    return StoredLowBit(method="gptq", layout=Layout.GPTQ, bits=(bits,), zero_offset=int(written == "gptq"))
