"""The quantisations of AWQ and GPTQ: integers with a scale and a zero point for every group of a row."""

from faser.engine.checkpoints.quantization.config_object import ConfigObject
from faser.engine.checkpoints.quantization.stored import Layout, StoredLowBit
from faser.errors import ModelError


def awq(config_object: ConfigObject) -> StoredLowBit:
    """As AutoAWQ writes it; w_bit and q_group_size are older names. Raises ModelError that names a field."""
    fields = config_object.fields
    config_object.one_of("w_bit" if "w_bit" in fields else "bits", (4,))
    config_object.group_size("q_group_size" if "q_group_size" in fields else "group_size")
    config_object.one_of("zero_point", (True,), True)
    config_object.one_of("version", ("gemm", "GEMM"), "gemm")
    return StoredLowBit(method="awq", layout=Layout.AWQ, bits=(4,))


def gptq(config_object: ConfigObject) -> StoredLowBit:
    """As AutoGPTQ and GPTQModel write it. Raises ModelError that names a field.

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
