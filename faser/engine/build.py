"""Puts an engine together: model, backend, KV cache, scheduler. The only place that knows all of them.

Sizes are decided here, and what does not fit is refused here with both numbers.
"""

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from faser.config import EngineConfig, available_memory, cache_dir
from faser.engine.batch import BlockTable
from faser.engine.clock import WallClock
from faser.engine.engine import Engine
from faser.engine.executor import ModelExecutor
from faser.engine.kv_cache import KvManager
from faser.engine.models.config_json import ModelConfig, read_model_config
from faser.engine.models.decoder import Decoder
from faser.engine.models.loader import load_decoder
from faser.engine.runner import Runner
from faser.engine.sampler import Sampler
from faser.engine.scheduler import Scheduler
from faser.errors import ConfigError
from faser.kernels.backend import Backend, KvShape
from faser.kernels.factory import make_backend
from faser.types import ModelInfo

_log = logging.getLogger("faser.engine")

ProgressCallback = Callable[[str, int, int], None]

# Without --kv-cache-memory a CPU gives the pool this share of the memory that is free, and no more than this:
# the pool is shared with everything else on the machine, and pages that are never used cost nothing.
_CPU_KV_SHARE = 0.25
_CPU_KV_MOST_BYTES = 4 << 30


def build_engine(config: EngineConfig, directory: Path, report: ProgressCallback) -> tuple[Engine, ModelInfo]:
    """Load the model in directory and make an engine of it.

    report: called with (stage, done, total) while weights are read.
    Raises ConfigError (or ModelError) naming what does not fit.
    """
    num_threads = config.threads
    torch.set_num_threads(num_threads)
    model = read_model_config(directory)
    max_model_len = _max_model_len(config, model)
    report("preparing kernels", 0, 0)
    backend = make_backend(config.backend, _device(config), num_threads=num_threads, cache_dir=cache_dir())
    decoder = load_decoder(
        directory,
        backend,
        _dtype(config, model),
        max_model_len=max_model_len,
        max_rows=config.max_num_batched_tokens,
        max_logit_rows=config.max_num_seqs,
        progress=lambda done, total: report("loading weights", done, total),
    )
    if backend.name == "native":
        # Its own threads are what computes. Torch's would only choose tokens, and wait for each other at barriers
        # while the front-end holds a core: 18 ms instead of 0.4 ms for a greedy step on two busy cores.
        torch.set_num_threads(1)
    kv = _kv_shape(config, decoder, max_model_len)
    report("warming up", 0, 1)
    engine = _assemble(config, decoder, backend, kv, model, max_model_len)
    report("warming up", 1, 1)
    return engine, ModelInfo(
        max_model_len=max_model_len,
        vocab_size=decoder.spec.vocab_size,
        eos_token_ids=model.eos_token_ids,
        dtype=str(decoder.dtype).removeprefix("torch."),
        device=str(backend.device),
        backend=backend.name,
        block_size=kv.block_size,
        num_blocks=kv.num_blocks,
        kv_cache_bytes=kv.total_bytes,
        weight_bytes=decoder.weight_bytes,
        num_parameters=decoder.num_parameters,
    )


def _assemble(
    config: EngineConfig,
    decoder: Decoder,
    backend: Backend,
    kv: KvShape,
    model: ModelConfig,
    max_model_len: int,
) -> Engine:
    executor = ModelExecutor(
        Runner(decoder, backend, kv),
        Sampler(config.max_num_seqs, decoder.spec.vocab_size, model.eos_token_ids, backend.device),
        BlockTable(config.max_num_seqs, -(-max_model_len // kv.block_size)),
        max_logit_rows=config.max_num_seqs,
    )
    scheduler = Scheduler(
        kv=KvManager(kv.num_blocks, kv.block_size, enable_prefix_caching=config.enable_prefix_caching),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        eos_token_ids=model.eos_token_ids,
        policy=config.scheduling_policy,
        seed=config.seed,
        clock=WallClock(),
    )
    return Engine(scheduler, executor)


def _device(config: EngineConfig) -> str:
    return "cpu" if config.device == "auto" else config.device


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    longest = model.spec.max_position_embeddings
    if config.max_model_len is None:
        return longest
    if config.max_model_len > longest:
        raise ConfigError(f"--max-model-len is {config.max_model_len}; this model has at most {longest} positions")
    return config.max_model_len


def _dtype(config: EngineConfig, model: ModelConfig) -> torch.dtype:
    """auto: the checkpoint's own, with float16 widened to bfloat16's place since no CPU product takes it."""
    if config.dtype != "auto":
        return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    return torch.float32 if model.dtype == "float32" else torch.bfloat16


def _kv_shape(config: EngineConfig, decoder: Decoder, max_model_len: int) -> KvShape:
    """A pool that holds at least one whole context, and no more than all sequences can ever fill."""
    spec = decoder.spec

    def shape(num_blocks: int) -> KvShape:
        return KvShape(
            num_layers=spec.num_layers,
            num_blocks=num_blocks,
            block_size=config.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=decoder.dtype,
        )

    block_bytes = shape(1).block_bytes
    one_context = -(-max_model_len // config.block_size)
    given = config.kv_cache_memory
    if given is None:
        share = min(int(available_memory() * _CPU_KV_SHARE), _CPU_KV_MOST_BYTES)
        return shape(max(one_context, min(share // block_bytes, one_context * config.max_num_seqs)))
    if given // block_bytes < one_context:
        raise ConfigError(
            f"--kv-cache-memory is {given} bytes; one context of {max_model_len} tokens needs "
            f"{one_context * block_bytes} bytes (or lower --max-model-len)"
        )
    return shape(given // block_bytes)
