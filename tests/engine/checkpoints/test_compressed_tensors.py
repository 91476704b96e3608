"""Integers of compressed-tensors in a config: what is read, and what is refused with the name of the field.

8-bit floats are in test_detection.py.
"""

import re
from typing import Any

import pytest

from faser.engine.checkpoints.quantized import Layout, StoredLowBit, stored_quantization
from faser.errors import ModelError
from tests.engine.checkpoints.fp8_checkpoints import compressed_tensors
from tests.engine.checkpoints.low_bit_checkpoints import DYNAMIC_BYTES, compressed_integers

GROUP: dict[str, Any] = {"strategy": "group", "group_size": 128, "num_bits": 4}
BYTES: list[dict[str, Any]] = [{}, {"symmetric": False}, {"strategy": "tensor"}]


def read(quantization: dict[str, Any]) -> object:
    return stored_quantization({"quantization_config": quantization})


@pytest.mark.parametrize(
    "weights, bits",
    [
        (GROUP, 4),
        (GROUP | {"symmetric": False}, 4),
        (GROUP | {"num_bits": 8}, 8),
        (GROUP | {"strategy": None}, 4),
        (GROUP | {"actorder": "group"}, 4),
        (GROUP | {"actorder": "static"}, 4),
        ({"strategy": "channel", "num_bits": 4}, 4),
    ],
)
@pytest.mark.parametrize("inputs", [None, DYNAMIC_BYTES])
def test_packed_integers_are_read(weights: dict[str, Any], bits: int, inputs: dict[str, Any] | None) -> None:
    found = read(compressed_integers("pack-quantized", inputs=inputs, **weights))
    wanted = StoredLowBit(method="compressed-tensors pack-quantized", layout=Layout.PACKED, bits=(bits,))
    assert found == wanted


@pytest.mark.parametrize("weights", BYTES)
@pytest.mark.parametrize("inputs", [DYNAMIC_BYTES, DYNAMIC_BYTES | {"symmetric": False}])
def test_bytes_are_read(weights: dict[str, Any], inputs: dict[str, Any]) -> None:
    found = read(compressed_integers("int-quantized", inputs=inputs, **weights))
    assert found == StoredLowBit(method="compressed-tensors int-quantized", layout=Layout.INTEGERS, bits=(8,))


def test_groups_of_several_sizes_of_integers_are_read_and_of_several_kinds_are_not() -> None:
    first, second = compressed_integers("pack-quantized", **GROUP), compressed_integers("pack-quantized")
    groups = {"a": first["config_groups"]["group_0"], "b": second["config_groups"]["group_0"]}
    found = read(first | {"config_groups": groups})
    assert isinstance(found, StoredLowBit)
    assert found.bits == (4, 8)
    groups["b"] = compressed_tensors()["config_groups"]["group_0"] | {"format": "float-quantized"}
    with pytest.raises(ModelError, match="config_groups are float-quantized and pack-quantized; only one kind"):
        read(first | {"config_groups": groups})


@pytest.mark.parametrize(
    "layout, inputs, weights, named",
    [
        ("pack-quantized", None, GROUP | {"num_bits": 3}, "weights.num_bits is 3; only 4 and 8"),
        ("int-quantized", DYNAMIC_BYTES, {"num_bits": 4}, "weights.num_bits is 4; only 8"),
        ("pack-quantized", None, GROUP | {"strategy": "block"}, "weights.strategy is 'block'"),
        ("pack-quantized", None, GROUP | {"group_size": 16}, "weights.group_size is 16; only -1 and multiples"),
        ("pack-quantized", None, GROUP | {"actorder": "other"}, "weights.actorder is 'other'"),
        ("pack-quantized", None, GROUP | {"dynamic": True}, "weights.dynamic is True"),
        (
            "int-quantized",
            DYNAMIC_BYTES | {"dynamic": False, "strategy": "tensor"},
            {},
            "input_activations.dynamic is False; only True can be read",
        ),
        ("int-quantized", DYNAMIC_BYTES | {"num_bits": 4}, {}, "input_activations.num_bits is 4; only 8"),
        ("int-quantized", DYNAMIC_BYTES | {"type": "float"}, {}, "input_activations.type is 'float'"),
        ("int-quantized", DYNAMIC_BYTES | {"strategy": "group"}, {}, "input_activations.strategy is 'group'"),
    ],
)
def test_what_is_not_read_is_refused_with_the_name_of_its_field(
    layout: str, inputs: dict[str, Any] | None, weights: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelError, match=re.escape(f"config_groups.group_0.{named}")):
        read(compressed_integers(layout, inputs=inputs, **weights))
