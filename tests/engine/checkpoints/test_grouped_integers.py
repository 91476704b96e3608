"""AWQ and GPTQ in a config: what is read, and what is refused with the name of the field."""

import re
from typing import Any

import pytest

from faser.engine.checkpoints.quantized import Layout, StoredLowBit, stored_quantization
from faser.errors import ModelError
from tests.engine.checkpoints.low_bit_checkpoints import Kind

AWQ = Kind(layout="awq", group_size=128).config
GPTQ = Kind(layout="gptq", group_size=128).config


def read(quantization: dict[str, Any]) -> object:
    return stored_quantization({"quantization_config": quantization})


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


@pytest.mark.parametrize(
    "quantization",
    [
        AWQ,
        AWQ | {"version": "GEMM"},
        AWQ | {"group_size": -1},
        without(AWQ, "bits", "group_size") | {"w_bit": 4, "q_group_size": 64},
    ],
)
def test_awq_is_read(quantization: dict[str, Any]) -> None:
    assert read(quantization) == StoredLowBit(method="awq", layout=Layout.AWQ, bits=(4,))


@pytest.mark.parametrize(
    "changes, bits, zero_offset",
    [
        ({}, 4, 1),
        ({"bits": 8, "group_size": -1}, 8, 1),
        ({"checkpoint_format": "gptq_v2"}, 4, 0),
        ({"desc_act": True, "sym": False, "lm_head": False, "is_marlin_format": False}, 4, 1),
        ({"dynamic": {"-:.*lm_head": {}}, "pack_dtype": "int32"}, 4, 1),
    ],
)
def test_gptq_is_read(changes: dict[str, Any], bits: int, zero_offset: int) -> None:
    """The first format stores zero points less one."""
    wanted = StoredLowBit(method="gptq", layout=Layout.GPTQ, bits=(bits,), zero_offset=zero_offset)
    assert read(GPTQ | changes) == wanted
    assert read(without(GPTQ, "checkpoint_format")) == StoredLowBit(
        method="gptq", layout=Layout.GPTQ, bits=(4,), zero_offset=1
    )


@pytest.mark.parametrize(
    "quantization, named",
    [
        (AWQ | {"bits": 3}, "bits is 3; only 4 can be read"),
        (AWQ | {"version": "gemv"}, "version is 'gemv'; only 'gemm'"),
        (AWQ | {"version": "marlin"}, "version is 'marlin'; only 'gemm'"),
        (AWQ | {"zero_point": False}, "zero_point is False; only True"),
        (AWQ | {"group_size": 16}, "group_size is 16; only -1 and multiples of 32 can be read"),
        (AWQ | {"group_size": "x"}, "group_size is 'x'; only -1 and multiples of 32"),
        (GPTQ | {"bits": 2}, "bits is 2; only 4 and 8 can be read"),
        (GPTQ | {"bits": 3}, "bits is 3; only 4 and 8 can be read"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; only 'gptq' and 'gptq_v2'"),
        (without(GPTQ, "checkpoint_format") | {"format": "bitblas"}, "format is 'bitblas'; only 'gptq'"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format is True; only False"),
        (GPTQ | {"pack_dtype": "int8"}, "pack_dtype is 'int8'; only 'int32'"),
        (GPTQ | {"dynamic": {"+:.*down": {"bits": 8}}}, "dynamic has '+:.*down'; only modules with -:"),
    ],
)
def test_what_is_not_read_is_refused_with_the_name_of_its_field(quantization: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=re.escape(f"quantization_config.{named}")):
        read(quantization)
