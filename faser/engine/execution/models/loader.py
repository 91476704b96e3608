"""Builds a Decoder from a checkpoint: configuration, weights, rotary table, buffers.

Decides which products are quantised: those that the checkpoint stores quantised, a GGUF file included where that
is faster, all products of the layers if fp8 is requested, all matrices if int8 or int4 is, and none if none is.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from faser.engine.checkpoints.files import ModelConfig, gguf_file, read_model_config
from faser.engine.checkpoints.quantized import StoredFp8, StoredLowBit
from faser.engine.execution.models import tensors
from faser.engine.execution.models.decoder import Buffers, Decoder
from faser.engine.execution.models.rope import rotary_angles
from faser.engine.execution.models.sources import QUANTIZATIONS, BlockSource, Fp8Source, RoundedSource
from faser.engine.execution.models.stored_codes import CodeSource
from faser.engine.execution.models.weights import ByteProgress, DecoderWeights, WeightSource, pack_weights
from faser.errors import ConfigError
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.fp8 import quantise_weight

if TYPE_CHECKING:
    from faser.engine.checkpoints.gguf.checkpoint import GgufSource

_log = logging.getLogger("faser")
_LOW_BIT = ("gguf", *QUANTIZATIONS)


def load_decoder(
    directory: Path,
    backend: Backend,
    dtype: torch.dtype,
    *,
    max_model_len: int,
    max_rows: int,
    max_logit_rows: int | None = None,
    quantization: str | None = None,
    source: WeightSource | None = None,
    state_layers: tuple[int, ...] = (),
    progress: ByteProgress,
) -> Decoder:
    """Load a checkpoint directory, or a GGUF file.

    dtype: of weights and activations, except in 8-bit products. max_model_len: positions of the rotary table.
    max_rows: most rows of a step. max_logit_rows: most rows of one logits call; None: max_rows. quantization: fp8
    quantises the products of the layers, int8 and int4 all matrices; gguf computes with the blocks of a GGUF file
    as they are; none dequantises what is stored; None: weights stay as they are stored where the backend has
    products for them, those of a GGUF file where these are the faster ones. source: gives the tensors instead of
    the files in the directory, never in blocks; the directory still gives the configuration. state_layers: whose
    states the decoder can capture. progress: called with (bytes done, bytes in all) after every tensor.

    Raises ModelError that names the unusable file, field or tensor; ConfigError for an unknown quantization, or
    one that the backend has no products for.
    """
    _check_quantization(quantization, backend, directory)
    if quantization is None and source is None and backend.prefers_low_bit and gguf_file(directory) is not None:
        quantization = "gguf"
    config = read_model_config(directory)
    spec = config.spec
    source = source or open_source(directory)
    weights = _pack(directory, source, config, backend, dtype, quantization, progress)
    angles = rotary_angles(spec.rope, head_dim=spec.head_dim, num_positions=max_model_len)
    buffers = Buffers.allocate(
        spec,
        dtype,
        backend.device,
        max_rows=max_rows,
        max_logit_rows=max_rows if max_logit_rows is None else max_logit_rows,
        state_layers=state_layers,
    )
    return Decoder(spec, backend, weights, angles.to(backend.device), buffers)


def _check_quantization(quantization: str | None, backend: Backend, path: Path) -> None:
    if quantization not in (None, "none", "fp8", *_LOW_BIT):
        raise ConfigError(f"--quantization is {quantization}; only none, fp8, {', '.join(_LOW_BIT)} are known")
    if quantization == "gguf" and gguf_file(path) is None:
        raise ConfigError(f"--quantization is gguf; the weights of {path} are in no GGUF file")
    if quantization in _LOW_BIT and not backend.has_low_bit:
        raise ConfigError(
            f"--quantization is {quantization}; the {backend.name} backend has no low-bit products on "
            f"{backend.device}"
        )
    if quantization == "fp8" and not backend.has_fp8:
        raise ConfigError(
            f"--quantization is {quantization}; the {backend.name} backend has no fp8 products on {backend.device}"
        )


def _pack(
    directory: Path,
    source: WeightSource,
    config: ModelConfig,
    backend: Backend,
    dtype: torch.dtype,
    quantization: str | None,
    progress: ByteProgress,
) -> DecoderWeights:
    """Pack the weights. A quantised checkpoint stays quantised if the backend has products for it."""
    if quantization == "gguf":
        from faser.engine.checkpoints.gguf.checkpoint import GgufSource  # not every machine has the library

        if not isinstance(source, GgufSource):
            raise ConfigError(
                f"--quantization is gguf; the weights come from {type(source).__name__}, not from a file"
            )
        return _pack_blocks(directory, source, config, backend, dtype, progress)
    stored = config.quantization
    fits = quantization in (None, "none") or (quantization == "fp8" and isinstance(stored, StoredFp8))
    if stored is not None and not fits:
        raise ConfigError(f"--quantization is {quantization}; {directory} is quantised already ({stored.method})")
    if quantization == "none" and isinstance(stored, StoredLowBit):
        source = CodeSource(source, stored, tensors.tensor_shapes(config.spec))
    elif quantization == "none" and stored is not None:
        source = Fp8Source(source)
    if quantization == "none":
        return pack_weights(source, config.spec, backend, dtype, progress)
    if isinstance(stored, StoredLowBit):
        return _pack_codes(directory, source, stored, config, backend, dtype, progress)
    if quantization in QUANTIZATIONS:
        rounded = RoundedSource(source, quantization)
        return pack_weights(source, config.spec, backend, dtype, progress, blocks=rounded.rows)
    if stored is None:
        quantise = None if quantization is None else quantise_weight
        return pack_weights(source, config.spec, backend, dtype, progress, quantise=quantise)
    return _pack_fp8(directory, source, stored, config, backend, dtype, progress)


def _pack_fp8(
    directory: Path,
    source: WeightSource,
    stored: StoredFp8,
    config: ModelConfig,
    backend: Backend,
    dtype: torch.dtype,
    progress: ByteProgress,
) -> DecoderWeights:
    quantised = Fp8Source(source)
    if quantised.has_cache_scales:
        _log.info(
            "%s has scales of keys and values; they are not used, --kv-cache-dtype fp8 stores with one", directory
        )
    if not backend.has_fp8:
        _warn_of_dequantising(directory, stored.method, "fp8", backend, dtype)
        return pack_weights(quantised, config.spec, backend, dtype, progress)
    if stored.static_inputs:
        _log.info("%s fixes the scales of inputs; they are not used, each row gets its own", directory)
    return pack_weights(quantised, config.spec, backend, dtype, progress, stored=quantised.fp8)


def _pack_codes(
    directory: Path,
    source: WeightSource,
    stored: StoredLowBit,
    config: ModelConfig,
    backend: Backend,
    dtype: torch.dtype,
    progress: ByteProgress,
) -> DecoderWeights:
    codes = CodeSource(source, stored, tensors.tensor_shapes(config.spec))
    if not backend.has_low_bit:
        _warn_of_dequantising(directory, stored.method, "low-bit", backend, dtype)
        return pack_weights(codes, config.spec, backend, dtype, progress)
    _log.info(
        "%s: weights (%s, %s bits) are multiplied as they are stored, by activations in 8 bits",
        directory,
        stored.method,
        " and ".join(map(str, stored.bits)),
    )
    return pack_weights(codes, config.spec, backend, dtype, progress, blocks=codes.rows)


def _warn_of_dequantising(
    directory: Path, method: str, products: str, backend: Backend, dtype: torch.dtype
) -> None:
    _log.warning(
        "%s is quantised (%s) and the %s backend has no %s products on %s: weights are dequantised to %s, "
        "which takes the memory and the time of a checkpoint in that type",
        directory,
        method,
        backend.name,
        products,
        backend.device,
        str(dtype).removeprefix("torch."),
    )


def _pack_blocks(
    path: Path,
    source: "GgufSource",
    config: ModelConfig,
    backend: Backend,
    dtype: torch.dtype,
    progress: ByteProgress,
) -> DecoderWeights:
    blocks = BlockSource(source)
    packed = pack_weights(source, config.spec, backend, dtype, progress, blocks=blocks.rows)
    _log.info(
        "%s: weights in %s are multiplied as they are stored, by activations in 8 bits",
        path,
        blocks.described() or "no low-bit format",
    )
    return packed


def open_source(path: Path) -> WeightSource:
    """The tensors of a checkpoint: from its safetensors files, or dequantised from its GGUF file."""
    weights = gguf_file(path)
    if weights is not None:
        from faser.engine.checkpoints.gguf.checkpoint import open_gguf

        return open_gguf(weights)
    from faser.engine.execution.models.sources import SafetensorsSource

    return SafetensorsSource(path)
