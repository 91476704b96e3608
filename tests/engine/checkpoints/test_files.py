"""Configuration files: what is read, what is refused, and that no tensor library is needed for it."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from faser.engine.checkpoints.families import decoder_spec
from faser.engine.checkpoints.families.architecture import LinearScaling, RopeSpec, YarnScaling
from faser.engine.checkpoints.files import read_model_config
from faser.engine.execution.models.tensors import num_parameters
from faser.errors import ModelError
from tests.checkpoints import tiny_llama_config, write_json


def _directory(tmp_path: Path, generation: dict[str, Any] | None = None, **fields: Any) -> Path:
    write_json(tmp_path / "config.json", tiny_llama_config() | fields)
    if generation is not None:
        write_json(tmp_path / "generation_config.json", generation)
    return tmp_path


def test_reading_a_config_loads_neither_torch_nor_transformers(tiny_checkpoint: Path) -> None:
    program = (
        "import sys; from pathlib import Path; "
        "from faser.engine.checkpoints.files import read_model_config; "
        "read_model_config(Path(sys.argv[1])); print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tiny_checkpoint)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


def test_a_complete_checkpoint_is_described_by_its_files(tiny_checkpoint: Path) -> None:
    config = read_model_config(tiny_checkpoint)
    assert (config.dtype, config.eos_token_ids) == ("float32", (2,))
    assert (config.spec.num_layers, config.spec.head_dim, config.spec.num_kv_heads) == (2, 16, 2)


@pytest.mark.parametrize(
    "generation, in_config, expected",
    [
        ({"eos_token_id": [5, 2, 5]}, 7, (5, 2)),
        ({"eos_token_id": 3}, [7], (3,)),
        ({}, [7, 8], (7, 8)),
        ({"eos_token_id": None}, 7, (7,)),
        (None, 7, (7,)),
        (None, None, ()),
    ],
)
def test_end_tokens_come_from_generation_config_before_config(
    generation: dict[str, Any] | None, in_config: Any, expected: tuple[int, ...], tmp_path: Path
) -> None:
    directory = _directory(tmp_path, generation, eos_token_id=in_config)
    assert read_model_config(directory).eos_token_ids == expected


@pytest.mark.parametrize(
    "fields, named",
    [
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"eos_token_id": 512}, "512"),
        ({"eos_token_id": "</s>"}, "</s>"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config is 'bitsandbytes'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"num_local_experts": 8}, "num_local_experts is 8"),
        ({"is_causal": False}, "is_causal is False"),
        ({"partial_rotary_factor": 0.4375}, "7 channels of a head of 16 rotate"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.5}},
            "24 channels of a head of 16 rotate",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "short_factor is missing"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "it must be a list of 8 numbers"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "two"}}, "factor is 'two'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            "4.0",
        ),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"num_attention_heads": 3}, "hidden_size 64"),
        ({"num_key_value_heads": 3}, "3 key-value heads"),
        ({"head_dim": 15}, "head_dim is 15"),
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "GPT2LMHeadModel is not supported; supported are LlamaForCausalLM",
        ),
        ({"architectures": None, "model_type": "bert"}, "model_type bert"),
    ],
)
def test_what_is_not_implemented_or_wrong_is_refused_by_name(
    fields: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=re.escape(named)):
        read_model_config(_directory(tmp_path, **fields))


@pytest.mark.parametrize(
    "fields, named",
    [
        ({"layer_types": ["full_attention"]}, "one entry per layer, 2"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": None},
            "sliding_window is not set",
        ),
        ({"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers is -1"),
    ],
)
def test_windows_that_make_no_sense_are_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=re.escape(named)):
        decoder_spec(tiny_llama_config() | {"architectures": ["Qwen2ForCausalLM"]} | fields)


def test_the_model_type_decides_where_no_architecture_is_stated() -> None:
    assert decoder_spec(tiny_llama_config() | {"architectures": None, "model_type": "qwen3"}).attention.qk_norm


def test_rope_parameters_go_before_fields_next_to_them() -> None:
    config = tiny_llama_config() | {
        "rope_theta": 5.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 7.0},
    }
    assert decoder_spec(config).attention.rope == RopeSpec(theta=7.0)


def test_the_old_name_of_the_scaling_kind_is_understood() -> None:
    config = tiny_llama_config() | {"rope_scaling": {"type": "linear", "factor": 2}}
    assert decoder_spec(config).attention.rope == RopeSpec(theta=10000.0, scaling=LinearScaling(factor=2.0))


def test_a_yarn_factor_that_is_not_stated_is_the_growth_of_the_context() -> None:
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 512, "factor": None}
    rope = decoder_spec(tiny_llama_config() | {"rope_scaling": scaling}).attention.rope
    assert rope is not None
    assert isinstance(rope.scaling, YarnScaling)
    assert rope.scaling.factor == 4.0


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[1]"])
def test_a_damaged_config_names_the_file(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_model_config(tmp_path)


def test_a_directory_without_a_config_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        read_model_config(tmp_path)


def test_the_parameters_of_a_known_model_add_up() -> None:
    """SmolLM2-135M: 134,515,008 parameters, as its model card counts them."""
    published = {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    }
    assert num_parameters(decoder_spec(tiny_llama_config() | published)) == 134_515_008
