"""What Gemma 4 stores, and where it is refused. Its tokens: test_families_engine.py and test_families.py."""

from pathlib import Path

import pytest
import torch

from faser.engine.checkpoints.files import read_model_config
from faser.engine.execution.models.loader import load_decoder
from faser.engine.execution.models.shard import Shard
from faser.errors import ConfigError
from faser.kernels.torch_backend import TorchBackend
from tests.checkpoints import VOCAB_SIZE, write_tokenizer
from tests.engine.checkpoints.family_models import write_family_model
from tests.engine.losslessness.equality import build_with_parts

_NEAR, _FAR = "sliding_attention", "full_attention"
FIELDS = {
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 48,
    "layer_types": [_NEAR, _FAR, _NEAR, _NEAR, _NEAR, _FAR],
    "sliding_window": 13,
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 3,
    "pad_token_id": 0,
}
# Keys and values of 16 tokens in float32, of two local layers and a global one, with two heads each.
BLOCK_BYTES = 16 * 2 * 4 * (2 * 2 * 16 + 2 * 48)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gemma4")
    write_family_model(directory, "gemma4_text", FIELDS)
    write_tokenizer(directory)
    return directory


def test_layers_that_read_the_keys_of_others_cost_no_memory(model: Path) -> None:
    """Of the memory that was given, and as the engine reports it. Layers read the last of their kind with keys."""
    sources = [each.kv_layer for each in read_model_config(model).spec.attentions]
    assert sources == [None, None, None, 2, 2, 1]
    info = build_with_parts((model, model), None, max_model_len=224, kv_cache_memory=61 * BLOCK_BYTES - 1).info
    assert (info.num_blocks, info.kv_cache_bytes) == (60, 60 * BLOCK_BYTES)


def test_ranks_cannot_share_it(model: Path) -> None:
    with pytest.raises(ConfigError, match="ranks cannot share it; tensor_parallel_size is 2, it must be 1"):
        load_decoder(
            model,
            TorchBackend(),
            torch.float32,
            max_model_len=64,
            max_rows=8,
            progress=lambda *_: None,
            shard=Shard(rank=0, size=2),
        )
