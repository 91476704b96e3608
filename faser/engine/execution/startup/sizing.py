"""How large things may be: the context, the KV pool, the rows. What does not fit is refused with both numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from faser.config.declaration import show_bytes
from faser.config.engine import EngineConfig
from faser.engine.checkpoints.config_json import ModelConfig
from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.execution.startup.memory_budget import MemoryBudget
from faser.errors import ConfigError
from faser.kernels.interface.fp8 import FP8
from faser.kernels.interface.shapes import KvShape
from faser.machine import available_memory

# Without --kv-cache-memory a CPU gives the pool this share of the memory that is free, and no more than this:
# the pool is shared with everything else on the machine, and pages that are never used cost nothing.
_CPU_KV_SHARE = 0.25
_CPU_KV_MOST_BYTES = 4 << 30

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModel:
    """A model that holds keys and values of every token: the target, or a draft model beside it.

    dtype: of activations. kv_dtype: of keys and values as they are stored; see kv_cache_dtype.
    """

    spec: DecoderSpec
    dtype: torch.dtype
    kv_dtype: torch.dtype


def context_len(config: EngineConfig, model: ModelConfig) -> int:
    """Positions of a context. Raises ConfigError for more than the model has."""
    longest = model.spec.max_position_embeddings
    if config.max_model_len is None:
        return longest
    if config.max_model_len > longest:
        raise ConfigError(f"--max-model-len is {config.max_model_len}; this model has at most {longest} positions")
    return config.max_model_len


def compute_dtype(config: EngineConfig, model: ModelConfig) -> torch.dtype:
    """auto: the checkpoint's own, or bfloat16 in its place.

    In place of float16, which no CPU product takes and for which no GPU kernels are compiled ahead; and of float32
    under flashinfer, which computes in 16 bits.
    """
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    wide = model.dtype == "float32" and config.backend != "flashinfer"
    return torch.float32 if wide else torch.bfloat16


def kv_cache_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """What a model that computes in dtype keeps keys and values in; a draft model as the target."""
    return FP8 if config.kv_cache_dtype == "fp8" else dtype


def most_logit_rows(config: EngineConfig) -> int:
    """Rows of one step whose logits are wanted: one a sequence, and in an engine that speculates one a draft."""
    if config.speculation.policy == "off":
        return config.max_num_seqs
    return min(config.max_num_batched_tokens, config.max_num_seqs * (config.speculation.cap + 1))


def kv_shapes(
    config: EngineConfig, models: Sequence[CachedModel], max_model_len: int, budget: MemoryBudget | None = None
) -> list[KvShape]:
    """One pool, a cache per model: all have the same blocks, so a block costs what it costs in all of them.

    It holds at least one whole context, and no more than all sequences can ever fill. budget: how a GPU's memory
    is divided; None on a CPU. Raises ConfigError where what was asked for is less, or what a GPU has is.
    """
    block_bytes = sum(each.block_bytes for each in _shapes(config, models, 1))
    one_context = -(-max_model_len // config.block_size)
    most = one_context * config.max_num_seqs
    if config.kv_cache_memory is not None:
        _check_given(config.kv_cache_memory, one_context * block_bytes, max_model_len, budget)
        num_blocks = config.kv_cache_memory // block_bytes
    elif budget is not None:
        num_blocks = min(budget.left_bytes // block_bytes, most)
        if num_blocks < one_context:
            fitting = num_blocks * config.block_size
            raise ConfigError(_too_little(budget, one_context * block_bytes, max_model_len, fitting))
    else:
        share = min(int(available_memory() * _CPU_KV_SHARE), _CPU_KV_MOST_BYTES)
        num_blocks = max(one_context, min(share // block_bytes, most))
    return _shapes(config, models, num_blocks)


def _check_given(given: int, needed: int, max_model_len: int, budget: MemoryBudget | None) -> None:
    """given, needed: bytes; what was asked for, and what one context takes."""
    if given < needed:
        raise ConfigError(
            f"--kv-cache-memory is {given} bytes; one context of {max_model_len} tokens needs "
            f"{needed} bytes (or lower --max-model-len)"
        )
    if budget is not None and given > budget.most_bytes:
        raise ConfigError(
            f"--kv-cache-memory is {show_bytes(given)}; at most {show_bytes(budget.most_bytes)} can be had: "
            f"{budget.told()}"
        )


def _too_little(budget: MemoryBudget, needed: int, max_model_len: int, fitting: int) -> str:
    """fitting: tokens for which there is room."""
    shorter = f"lower --max-model-len to {fitting}, " if fitting else ""
    return (
        f"one context of {max_model_len} tokens needs {show_bytes(needed)} of KV cache, and "
        f"{show_bytes(budget.left_bytes)} are left: {budget.told()}; {shorter}lower --max-num-batched-tokens or "
        "--max-num-seqs, or raise --gpu-memory-utilization"
    )


def _shapes(config: EngineConfig, models: Sequence[CachedModel], num_blocks: int) -> list[KvShape]:
    return [
        KvShape(
            num_layers=each.spec.num_layers,
            num_blocks=num_blocks,
            block_size=config.block_size,
            num_kv_heads=each.spec.num_kv_heads,
            head_dim=each.spec.head_dim,
            dtype=each.kv_dtype,
        )
        for each in models
    ]
