"""A tiny seeded Qwen2 with eight layers and biases, on disk: a second family next to the tiny Llama."""

from pathlib import Path

from faser.config.engine import EngineConfig
from faser.distill.target import FrozenTarget, load_target
from faser.engine.checkpoints.files import read_model_config
from faser.engine.execution.models.tensors import tensor_shapes
from tests.checkpoints import random_weights, tiny_llama_config, write_checkpoint, write_json, write_tokenizer


def write_small_target(directory: Path) -> Path:
    config = tiny_llama_config() | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
    directory.mkdir(parents=True)
    write_json(directory / "config.json", config)
    shapes = tensor_shapes(read_model_config(directory).spec)
    write_checkpoint(directory, config, random_weights(shapes, seed=4))
    write_tokenizer(directory)
    return directory


def load_small_target(directory: Path) -> FrozenTarget:
    config = EngineConfig(model=str(directory), backend="torch", num_threads=1)
    return load_target(config, directory, lambda *_: None)
