"""What a config says of quantised weights: what is read, and what is refused with the name of the field."""

import re
from typing import Any

import pytest

from faser.engine.checkpoints.quantized import StoredFp8, StoredMxfp4, StoredQuantization, stored_quantization
from faser.errors import ModelError
from tests.engine.checkpoints.fp8_checkpoints import FP8_DYNAMIC, FP8_STATIC, arguments, compressed_tensors

DYNAMIC_INPUTS = arguments(dynamic=True, strategy="token")
STATIC_INPUTS = arguments(strategy="tensor")


def read(quantization: Any) -> StoredQuantization | None:
    return stored_quantization({"quantization_config": quantization})


@pytest.mark.parametrize("config", [{}, {"quantization_config": None}, {"compression_config": None}])
def test_a_config_that_says_nothing_is_of_plain_weights(config: dict[str, Any]) -> None:
    assert stored_quantization(config) is None


@pytest.mark.parametrize(
    "quantization, static_inputs",
    [
        (FP8_DYNAMIC, False),
        (FP8_STATIC, True),
        (FP8_DYNAMIC | {"weight_block_size": None, "fmt": "e4m3"}, False),
    ],
)
def test_fp8_is_read(quantization: dict[str, Any], static_inputs: bool) -> None:
    assert read(quantization) == StoredFp8(method="fp8", static_inputs=static_inputs)


@pytest.mark.parametrize(
    "quantization, static_inputs",
    [
        (compressed_tensors(), False),
        (compressed_tensors(format="naive-quantized"), False),
        (compressed_tensors(sparsity_config={}, transform_config={}), False),
        (compressed_tensors(sparsity_config={"format": "dense"}), False),
        (compressed_tensors(kv_cache_scheme=arguments(strategy="tensor")), False),
        (compressed_tensors(group={"format": "float-quantized"}, format="mixed-precision"), False),
        (compressed_tensors(group={"weights": arguments(strategy="tensor")}), False),
        (compressed_tensors(group={"weights": {"num_bits": 8, "type": "float"}}), False),
        (compressed_tensors(group={"weights": {"type": "float", "group_size": -1}}), False),
        (compressed_tensors(group={"input_activations": arguments(dynamic=True, strategy="tensor")}), False),
        (compressed_tensors(group={"input_activations": STATIC_INPUTS}), True),
    ],
)
def test_8_bit_floats_of_compressed_tensors_are_read(quantization: dict[str, Any], static_inputs: bool) -> None:
    assert read(quantization) == StoredFp8(method="compressed-tensors", static_inputs=static_inputs)


def test_the_old_name_of_the_field_is_understood() -> None:
    stated = stored_quantization({"compression_config": compressed_tensors()})
    assert stated == StoredFp8(method="compressed-tensors", static_inputs=False)


def test_mxfp4_is_read() -> None:
    assert read({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}) == StoredMxfp4()


@pytest.mark.parametrize("method", ["bitsandbytes", "nvfp4", "modelopt", "fbgemm_fp8", "quark", "torchao"])
def test_other_methods_are_refused_by_name_with_what_is_read(method: str) -> None:
    with pytest.raises(
        ModelError,
        match=f"quantization_config is '{method}'; supported are fp8, awq, gptq, compressed-tensors and mxfp4",
    ):
        read({"quant_method": method, "bits": 4})


GROUP = "config_groups.group_0"


@pytest.mark.parametrize(
    "quantization, named",
    [
        ("fp8", "quantization_config is 'fp8'; it must be an object"),
        ({"bits": 4}, "quantization_config is {'bits': 4}"),
        (FP8_DYNAMIC | {"weight_block_size": [128, 128]}, "weight_block_size is [128, 128]"),
        (FP8_DYNAMIC | {"fmt": "e5m2"}, "fmt is 'e5m2'"),
        (FP8_DYNAMIC | {"activation_scheme": None}, "activation_scheme is None"),
        (compressed_tensors(format="pack-quantized"), f"{GROUP}.weights.type is 'float'"),
        (compressed_tensors(format="int-quantized"), f"{GROUP}.weights.type is 'float'"),
        (compressed_tensors(format="marlin-24"), f"{GROUP}.format is 'marlin-24'"),
        (compressed_tensors(format="nvfp4-pack-quantized"), f"{GROUP}.format is 'nvfp4-pack-quantized'"),
        (
            compressed_tensors(group={"format": "mxfp4-pack-quantized"}),
            f"{GROUP}.format is 'mxfp4-pack-quantized'",
        ),
        (compressed_tensors(format=None), f"{GROUP}.format is None"),
        (compressed_tensors(config_groups={}), "config_groups is empty"),
        (compressed_tensors(config_groups={"FP8": ["Linear"]}), "config_groups.FP8 is ['Linear']"),
        (compressed_tensors(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config.format is"),
        (compressed_tensors(transform_config={"config_groups": {}}), "transform_config is not empty"),
        (compressed_tensors(group={"weights": None}), f"{GROUP}.weights is None"),
        (compressed_tensors(group={"weights": arguments(num_bits=4)}), f"{GROUP}.weights.num_bits is 4"),
        (compressed_tensors(group={"weights": arguments(type="int")}), f"{GROUP}.weights.type is 'int'"),
        (compressed_tensors(group={"weights": {"num_bits": 8}}), f"{GROUP}.weights.type is 'int'"),
        (compressed_tensors(group={"weights": arguments(symmetric=False)}), f"{GROUP}.weights.symmetric is False"),
        (compressed_tensors(group={"weights": arguments(dynamic=True)}), f"{GROUP}.weights.dynamic is True"),
        (
            compressed_tensors(group={"weights": arguments(strategy="block")}),
            f"{GROUP}.weights.strategy is 'block'",
        ),
        (
            compressed_tensors(group={"weights": arguments(strategy=None, group_size=128)}),
            f"{GROUP}.weights.strategy is 'group'",
        ),
        (compressed_tensors(group={"input_activations": None}), f"{GROUP}.input_activations is None"),
        (
            compressed_tensors(group={"input_activations": DYNAMIC_INPUTS | {"strategy": "group"}}),
            f"{GROUP}.input_activations.strategy is 'group'",
        ),
        (
            compressed_tensors(group={"input_activations": STATIC_INPUTS | {"strategy": "token"}}),
            f"{GROUP}.input_activations.strategy is 'token'",
        ),
        (
            compressed_tensors(group={"input_activations": DYNAMIC_INPUTS | {"dynamic": "local"}}),
            f"{GROUP}.input_activations.dynamic is 'local'",
        ),
        (
            compressed_tensors(group={"output_activations": STATIC_INPUTS}),
            f"{GROUP}.output_activations is",
        ),
    ],
)
def test_what_is_not_read_is_refused_with_the_name_of_its_field(quantization: Any, named: str) -> None:
    with pytest.raises(ModelError, match=re.escape(named)):
        read(quantization)


def test_every_group_is_looked_at() -> None:
    groups = compressed_tensors()["config_groups"]
    second = groups["group_0"] | {"weights": arguments(type="int")}
    quantization = compressed_tensors(config_groups=groups | {"group_1": second})
    with pytest.raises(ModelError, match=r"group_1\.weights\.type is 'int'"):
        read(quantization)
