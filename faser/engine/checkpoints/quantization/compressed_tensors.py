"""The quantisations of compressed-tensors: 8-bit floats, and integers of 4 or 8 bits.

Defaults of fields are those of the library.
"""

from faser.engine.checkpoints.quantization.config_object import ConfigObject
from faser.engine.checkpoints.quantization.stored import Layout, StoredFp8, StoredLowBit
from faser.errors import ModelError

_FLOATS = ("float-quantized", "naive-quantized")
_FORMATS = (*_FLOATS, Layout.PACKED.value, Layout.INTEGERS.value)
# static, weight: columns stay in their order. group, dynamic: weight_g_idx names the group of every column.
_ORDERS = (None, False, True, "static", "weight", "group", "dynamic")


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
        return StoredFp8(method="compressed-tensors", static_inputs=any(static))
    layout = Layout(kinds[0])
    bits = sorted({_integers(group, layout) for group in named.values()})
    return StoredLowBit(method=f"compressed-tensors {layout}", layout=layout, bits=tuple(bits))


def _floats(group: ConfigObject) -> bool:
    """Whether the inputs of this group have a fixed scale."""
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
