"""How large things may be: the context, the KV pool, the rows. What does not fit is refused with both numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from faser.config import EngineConfig, available_memory
from faser.engine.models.config_json import ModelConfig
from faser.engine.models.spec import DecoderSpec
from faser.errors import ConfigError
from faser.kernels.backend import KvShape

# Without --kv-cache-memory a CPU gives the pool this share of the memory that is free, and no more than this:
# the pool is shared with everything else on the machine, and pages that are never used cost nothing.
_CPU_KV_SHARE = 0.25
_CPU_KV_MOST_BYTES = 4 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModel:
    """A model that holds keys and values of every token: the target, or a draft model beside it."""

    spec: DecoderSpec
    dtype: torch.dtype


def context_len(config: EngineConfig, model: ModelConfig) -> int:
    """Positions of a context. Raises ConfigError for more than the model has."""
    longest = model.spec.max_position_embeddings
    if config.max_model_len is None:
        return longest
    if config.max_model_len > longest:
        raise ConfigError(f"--max-model-len is {config.max_model_len}; this model has at most {longest} positions")
    return config.max_model_len


def compute_dtype(config: EngineConfig, model: ModelConfig) -> torch.dtype:
    """auto: the checkpoint's own, with float16 widened to bfloat16's place since no CPU product takes it."""
    if config.dtype != "auto":
        return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    return torch.float32 if model.dtype == "float32" else torch.bfloat16


def most_logit_rows(config: EngineConfig) -> int:
    """Rows of one step whose logits are wanted: one a sequence, and in an engine that speculates one a draft."""
    if config.speculation.policy == "off":
        return config.max_num_seqs
    return min(config.max_num_batched_tokens, config.max_num_seqs * (config.speculation.cap + 1))


def kv_shapes(config: EngineConfig, models: Sequence[CachedModel], max_model_len: int) -> list[KvShape]:
    """One pool, a cache per model: all have the same blocks, so a block costs what it costs in all of them.

    It holds at least one whole context, and no more than all sequences can ever fill. Raises ConfigError where
    the memory that was asked for is less.
    """
    num_blocks = _num_blocks(config, sum(each.block_bytes for each in _shapes(config, models, 1)), max_model_len)
    return _shapes(config, models, num_blocks)


def _shapes(config: EngineConfig, models: Sequence[CachedModel], num_blocks: int) -> list[KvShape]:
    return [
        KvShape(
            num_layers=each.spec.num_layers,
            num_blocks=num_blocks,
            block_size=config.block_size,
            num_kv_heads=each.spec.num_kv_heads,
            head_dim=each.spec.head_dim,
            dtype=each.dtype,
        )
        for each in models
    ]


def _num_blocks(config: EngineConfig, block_bytes: int, max_model_len: int) -> int:
    one_context = -(-max_model_len // config.block_size)
    given = config.kv_cache_memory
    if given is None:
        share = min(int(available_memory() * _CPU_KV_SHARE), _CPU_KV_MOST_BYTES)
        return max(one_context, min(share // block_bytes, one_context * config.max_num_seqs))
    if given // block_bytes < one_context:
        raise ConfigError(
            f"--kv-cache-memory is {given} bytes; one context of {max_model_len} tokens needs "
            f"{one_context * block_bytes} bytes (or lower --max-model-len)"
        )
    return given // block_bytes
