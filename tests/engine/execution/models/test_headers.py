"""Sizes that a config.json states against the headers of the weights: the error names field, value and tensor.

Planted bugs that these tests have caught: no tensor is compared; room for quantised products is not counted; a
missing norm goes unnoticed; the shapes of files of the other kind are taken as they are stored.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from faser.engine.checkpoints.files import read_model_config
from faser.engine.execution.models.headers import check_sizes, open_tensors
from faser.errors import ModelError
from tests.checkpoints import write_json, write_tiny_checkpoint
from tests.engine.checkpoints.gguf.gguf_files import write_gguf
from tests.engine.checkpoints.gguf.test_families import DELTA_NETS, converted
from tests.engine.checkpoints.low_bit_checkpoints import KINDS, write_pair


def check(directory: Path, **changes: Any) -> None:
    """With fields of the config changed."""
    config = json.loads((directory / "config.json").read_text())
    write_json(directory / "config.json", config | changes)
    check_sizes(directory, read_model_config(directory))


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"vocab_size": 49_152_000},
            r"embed_tokens\.weight has shape \[512, 64\]; the config asks for \[49152000, 64\] "
            r"\(hidden_size is 64, vocab_size is 49152000\)",
        ),
        ({"hidden_size": 1 << 40}, r"hidden_size is 1099511627776"),
        ({"num_attention_heads": 8, "head_dim": 16}, r"q_proj\.weight .* num_attention_heads is 8"),
        ({"num_key_value_heads": 4}, r"k_proj\.weight .* num_key_value_heads is 4"),
        ({"intermediate_size": 1 << 31}, r"gate_proj\.weight .* intermediate_size is 2147483648"),
        (
            {"num_hidden_layers": 4096},
            r"lacks tensor model\.layers\.2\.input_layernorm.*num_hidden_layers is 4096",
        ),
    ],
)
def test_the_error_names_the_field_and_the_tensor_that_contradicts_it(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    directory = write_tiny_checkpoint(tmp_path)
    check(directory)
    with pytest.raises(ModelError, match=words):
        check(directory, **changes)


def test_quantised_products_have_no_room_for_sizes_beyond_the_files(tmp_path: Path) -> None:
    """The shapes of their tensors are other ones; the exact size is compared when they are read."""
    directory, _ = write_pair(tmp_path, KINDS["awq"])
    check(directory)
    with pytest.raises(ModelError, match=r"no room for it \(hidden_size is 64, intermediate_size is 10995116"):
        check(directory, intermediate_size=1 << 40)


def test_experts_without_number_are_refused_by_the_router_or_at_once(tmp_path: Path) -> None:
    config = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 16}
    directory = write_tiny_checkpoint(tmp_path)
    with pytest.raises(ModelError, match=r"num_experts is 1099511627776; at most 4096 are supported"):
        check(directory, **config, num_experts=1 << 40)
    with pytest.raises(ModelError, match=r"num_hidden_layers is 2\)|q_norm"):
        check(directory, num_experts=4096)


@pytest.mark.parametrize("field", ["context_length", "block_count", "feed_forward_length", "attention.head_count"])
def test_fields_of_gguf_files_are_compared_too(field: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    check_sizes(path, read_model_config(path))
    write_gguf(path, metadata={f"llama.{field}": 14})
    if field == "context_length":  # which no tensor has
        check_sizes(path, read_model_config(path))
        return
    with pytest.raises(ModelError):
        check_sizes(path, read_model_config(path))


@pytest.mark.parametrize("name, architecture", DELTA_NETS)
def test_shapes_of_gguf_files_are_those_of_the_arrays(name: str, architecture: str, tmp_path: Path) -> None:
    """Also of convolutions and of gates of shared experts, which are stored with a dimension less."""
    converted(name, architecture, tmp_path)
    path = tmp_path / "model.gguf"
    config = read_model_config(path)
    check_sizes(path, config)
    stored = open_tensors(path, config)
    for each in stored.names():
        assert stored.shape(each) == tuple(stored.get(each).shape), each
