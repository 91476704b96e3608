"""Loads the data plane of an encoder's engine, and refuses settings that an encoder has no use for."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from faser.config.declaration import flag_label
from faser.config.engine import EngineConfig
from faser.engine.checkpoints.embedder import read_encoder_embedder
from faser.engine.checkpoints.encoders import EncoderConfig
from faser.engine.checkpoints.encoders.spec import tensor_shapes
from faser.engine.execution.models.encoder_loader import load_encoder
from faser.engine.execution.pooling import EncoderExecutor
from faser.engine.execution.startup.device import resolve_device
from faser.engine.execution.startup.executor import engine_backend
from faser.engine.execution.startup.memory import DTYPES
from faser.errors import ConfigError
from faser.types.engine import ModelInfo, ProgressCallback

_BLOCK = 16  # tokens; of a cache that the front-end is told to be empty


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderParts:
    """Parts of an encoder's engine after loading."""

    config: EngineConfig
    executor: EncoderExecutor
    info: ModelInfo


def load_encoder_parts(
    config: EngineConfig, directory: Path, encoder: EncoderConfig, report: ProgressCallback
) -> EncoderParts:
    """Load the encoder in a directory.

    Raises ConfigError for settings that do not fit, and ModelError as load_encoder does.
    """
    _refuse(config, directory)
    embedder = read_encoder_embedder(directory, judges_pairs=encoder.is_classifier, raw_scores=encoder.raw_scores)
    config = _on_device(config)
    max_tokens = text_len(config, encoder)
    backend = engine_backend(config, report)
    dtype = encoder_dtype(config, encoder)
    model, classifier = load_encoder(
        directory,
        encoder,
        backend,
        dtype,
        max_rows=max(config.max_num_batched_tokens, max_tokens),
        max_texts=config.max_num_seqs,
        max_positions=max_tokens,
        progress=lambda done, total: report("loading weights", done, total),
    )
    info = ModelInfo(
        max_model_len=max_tokens,
        vocab_size=encoder.spec.vocab_size,
        eos_token_ids=(),
        dtype=str(dtype).removeprefix("torch."),
        device=str(backend.device),
        backend=backend.name,
        block_size=_BLOCK,
        num_blocks=0,
        kv_cache_bytes=0,
        kv_cache_dtype=str(dtype).removeprefix("torch."),
        weight_bytes=model.weights.num_bytes,
        num_parameters=sum(map(math.prod, tensor_shapes(encoder.spec).values())),
        hidden_size=encoder.spec.hidden_size,
        embedder=embedder,
    )
    return EncoderParts(config=config, executor=EncoderExecutor(model, classifier), info=info)


def text_len(config: EngineConfig, encoder: EncoderConfig) -> int:
    """Tokens of the longest text. Raises ConfigError for more than the model has positions."""
    if config.max_model_len is None:
        return encoder.max_tokens
    if config.max_model_len > (most := encoder.spec.max_position_embeddings):
        raise ConfigError(f"--max-model-len is {config.max_model_len}; this model has at most {most} positions")
    return config.max_model_len


def encoder_dtype(config: EngineConfig, encoder: EncoderConfig) -> torch.dtype:
    """The type of products and attention. auto: float32 unless the checkpoint is stored in bfloat16.

    bfloat16 moves the numbers of unit vectors by up to 1.3e-3 (benchmarks/results/encoders/), which is for the
    operator to choose.
    """
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    return torch.bfloat16 if encoder.dtype == "bfloat16" else torch.float32


def _on_device(config: EngineConfig) -> EngineConfig:
    """Return the config for the device that is found; on a GPU encoders compute with torch."""
    resolved = resolve_device(config)
    if resolved.on_gpu and config.backend == "auto":
        return replace(resolved, backend="torch")
    return resolved


def _refuse(config: EngineConfig, directory: Path) -> None:
    """Raise ConfigError for a setting that asks for what an encoder does not have."""
    asked = {
        "tensor_parallel_size": config.tensor_parallel_size > 1,
        "quantization": config.quantization not in (None, "none"),
        "kv_cache_dtype": config.kv_cache_dtype != "auto",
        "kv_cache_dir": config.kv_cache_dir is not None,
        "kv_events_config": config.kv_events is not None,
        "speculative_config": config.speculative_config is not None and config.speculation.policy != "off",
        "audit_speculation": config.audit_speculation > 0,
        "trace_steps": config.trace_steps is not None,
        "slo_ttft_ms": config.slo_ttft_ms is not None,
        "slo_tpot_ms": config.slo_tpot_ms is not None,
    }
    if found := [flag_label(name) for name, is_asked in asked.items() if is_asked]:
        raise ConfigError(
            f"{directory} is an encoder: it has one device, weights as they are stored, no KV cache, no drafts "
            f"and no targets for tokens; leave out {', '.join(found)}"
        )
