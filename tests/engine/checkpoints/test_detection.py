"""What a config says of quantised weights: what is read, and what is refused with the name of the field."""

import re
from typing import Any

import pytest

from faser.engine.checkpoints.quantized import StoredFp8, StoredMxfp4, StoredQuantization, stored_quantization
from faser.errors import ModelError
from tests.engine.checkpoints.fp8_checkpoints import (
    FP8_BLOCKS,
    FP8_DYNAMIC,
    FP8_STATIC,
    arguments,
    compressed_tensors,
)

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
    "quantization, block",
    [
        (FP8_BLOCKS, (128, 128)),
        (FP8_BLOCKS | {"weight_block_size": [1, 64], "scale_fmt": "ue8m0"}, (1, 64)),
    ],
)
def test_scales_of_blocks_are_read(quantization: dict[str, Any], block: tuple[int, int]) -> None:
    assert read(quantization) == StoredFp8(method="fp8", static_inputs=False, block=block)


@pytest.mark.parametrize(
    "weights, block",
    [
        (arguments(strategy="block", block_structure=[128, 64]), (128, 64)),
        (arguments(strategy="group", group_size=96), (1, 96)),
        (arguments(strategy=None, group_size=128), (1, 128)),
    ],
)
def test_scales_of_blocks_of_compressed_tensors_are_read(weights: dict[str, Any], block: tuple[int, int]) -> None:
    inputs = DYNAMIC_INPUTS | {"strategy": "group", "group_size": block[1]}
    stated = read(compressed_tensors(group={"weights": weights, "input_activations": inputs}))
    assert stated == StoredFp8(method="compressed-tensors", static_inputs=False, block=block)


@pytest.mark.parametrize(
    "quantization, static_inputs",
    [
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": []}, False),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, True),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, False),
    ],
)
def test_8_bit_floats_of_other_libraries_are_read(quantization: dict[str, Any], static_inputs: bool) -> None:
    assert read(quantization) == StoredFp8(method=quantization["quant_method"], static_inputs=static_inputs)


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


@pytest.mark.parametrize("method", ["bitsandbytes", "nvfp4", "quark", "torchao"])
def test_other_methods_are_refused_by_name_with_what_is_read(method: str) -> None:
    with pytest.raises(
        ModelError,
        match=f"quantization_config is '{method}'; supported are fp8, fbgemm_fp8, modelopt, awq, gptq, ",
    ):
        read({"quant_method": method, "bits": 4})


GROUP = "config_groups.group_0"


@pytest.mark.parametrize(
    "quantization, named",
    [
        ("fp8", "quantization_config is 'fp8'; it must be an object"),
        ({"bits": 4}, "quantization_config is {'bits': 4}"),
        (FP8_BLOCKS | {"weight_block_size": [128, 16]}, "weight_block_size is [128, 16]; only a pair of numbers"),
        (FP8_BLOCKS | {"weight_block_size": [128, 48]}, "weight_block_size is [128, 48]"),
        (FP8_BLOCKS | {"weight_block_size": [0, 128]}, "weight_block_size is [0, 128]"),
        (FP8_BLOCKS | {"weight_block_size": 128}, "weight_block_size is 128"),
        (FP8_BLOCKS | {"weight_block_size": [True, 128]}, "weight_block_size is [True, 128]"),
        (FP8_BLOCKS | {"scale_fmt": "e5m2"}, "scale_fmt is 'e5m2'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo is 'NVFP4'"),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, "quant_algo is 'FP8_PB_WO'"),
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
            f"{GROUP}.weights.block_structure is None; its strategy is 'block'",
        ),
        (
            compressed_tensors(group={"weights": arguments(strategy="group", group_size=48)}),
            f"{GROUP}.weights.group_size is 48",
        ),
        (
            compressed_tensors(group={"weights": arguments(strategy="tensor_group")}),
            f"{GROUP}.weights.strategy is 'tensor_group'",
        ),
        (compressed_tensors(group={"input_activations": None}), f"{GROUP}.input_activations is None"),
        (
            compressed_tensors(group={"input_activations": DYNAMIC_INPUTS | {"strategy": "channel"}}),
            f"{GROUP}.input_activations.strategy is 'channel'",
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


def test_groups_have_blocks_of_one_size() -> None:
    groups = compressed_tensors()["config_groups"]
    second = groups["group_0"] | {"weights": arguments(strategy="block", block_structure=[128, 128])}
    with pytest.raises(ModelError, match="config_groups have scales of 2 kinds; only one at a time can be read"):
        read(compressed_tensors(config_groups=groups | {"group_1": second}))


def test_every_group_is_looked_at() -> None:
    groups = compressed_tensors()["config_groups"]
    second = groups["group_0"] | {"weights": arguments(type="int")}
    quantization = compressed_tensors(config_groups=groups | {"group_1": second})
    with pytest.raises(ModelError, match=r"group_1\.weights\.type is 'int'"):
        read(quantization)
