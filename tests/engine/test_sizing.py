"""How many blocks a pool gets, one model or two, and what is refused."""

import pytest
import torch

from faser.config import EngineConfig
from faser.engine.models.families import decoder_spec
from faser.engine.sizing import CachedModel, kv_shapes, most_logit_rows
from faser.errors import ConfigError
from tests.checkpoints import tiny_llama_config

TARGET = CachedModel(spec=decoder_spec(tiny_llama_config()), dtype=torch.float32)
DRAFT = CachedModel(spec=decoder_spec(tiny_llama_config() | {"num_hidden_layers": 1}), dtype=torch.bfloat16)
BLOCK_BYTES = 2 * 2 * 16 * 2 * 16 * 4  # keys and values, layers, tokens, heads, channels, bytes
DRAFT_BLOCK_BYTES = BLOCK_BYTES // 4  # half the layers, half the bytes of a number
CONTEXT = 2048


def config(**options: object) -> EngineConfig:
    return EngineConfig(max_num_seqs=4, max_num_batched_tokens=32, **options)  # type: ignore[arg-type]


def test_a_draft_model_has_the_same_blocks_and_its_bytes_count() -> None:
    memory = 200 * (BLOCK_BYTES + DRAFT_BLOCK_BYTES) + 5
    target, draft = kv_shapes(config(kv_cache_memory=memory), [TARGET, DRAFT], CONTEXT)
    assert (target.num_blocks, draft.num_blocks) == (200, 200)
    assert target.block_size == draft.block_size == 16
    assert target.total_bytes + draft.total_bytes <= memory
    (alone,) = kv_shapes(config(kv_cache_memory=memory), [TARGET], CONTEXT)
    assert alone.num_blocks == 250


def test_without_a_limit_the_pool_is_no_more_than_all_sequences_can_fill() -> None:
    for models in ([TARGET], [TARGET, DRAFT]):
        assert kv_shapes(config(), models, CONTEXT)[0].num_blocks == 4 * CONTEXT // 16


def test_memory_for_less_than_one_context_is_refused_with_both_numbers() -> None:
    needed = 128 * (BLOCK_BYTES + DRAFT_BLOCK_BYTES)
    with pytest.raises(ConfigError, match=f"{needed - 1} bytes; one context of 2048 tokens needs {needed} bytes"):
        kv_shapes(config(kv_cache_memory=needed - 1), [TARGET, DRAFT], CONTEXT)


def test_logits_are_wanted_of_every_draft_as_far_as_rows_go() -> None:
    assert most_logit_rows(config(speculative_config={"policy": "off"})) == 4
    assert most_logit_rows(config(speculative_config={"method": "ngram", "num_speculative_tokens": 3})) == 16
    assert most_logit_rows(config(speculative_config={"method": "ngram", "num_speculative_tokens": 9})) == 32
