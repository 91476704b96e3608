"""Builds a Decoder from a checkpoint: configuration, weights, rotary table, buffers.

Decides which products are quantised: those that the checkpoint stores quantised, a GGUF file included where that
is faster, all products of the layers if fp8 is requested, all matrices if int8 or int4 is, and none if none is.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.checkpoints.files import gguf_file, read_model_config
from faser.engine.checkpoints.gguf_weights import GgufSource
from faser.engine.checkpoints.quantized import StoredFp8, StoredLowBit, StoredMxfp4
from faser.engine.execution.models import tensors
from faser.engine.execution.models.adapted import AdapterSizes
from faser.engine.execution.models.decoder import Buffers, Decoder
from faser.engine.execution.models.headers import check_sizes, open_tensors
from faser.engine.execution.models.layers import mixer_shapes
from faser.engine.execution.models.rope import RotaryTables
from faser.engine.execution.models.shard import Shard, ShardedSource, local_shapes, local_spec, whole_products
from faser.engine.execution.models.sources import (
    QUANTIZATIONS,
    Fp8Source,
    block_formats,
    gguf_rows,
    int8_rows,
    rounded_rows,
    takes_fp8_as_int8,
)
from faser.engine.execution.models.stacked_experts import StackedSource
from faser.engine.execution.models.stored_codes import CodeSource
from faser.engine.execution.models.weights import (
    ByteProgress,
    Quantise,
    StoredBlocks,
    StoredRows,
    WeightSource,
    no_rows,
    pack_weights,
)
from faser.errors import ConfigError
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.collectives import Collectives
from faser.kernels.interface.fp8 import quantise_weight
from faser.kernels.interface.low_bit.rows import INT8

_log = logging.getLogger("faser")
_LOW_BIT = ("gguf", *QUANTIZATIONS)
_STORED = ("awq", "gptq", "compressed-tensors", "mxfp4")  # of checkpoints, which say so themselves


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
    shard: Shard | None = None,
    ranks: Collectives | None = None,
    adapters: AdapterSizes | None = None,
) -> Decoder:
    """Load a checkpoint directory, or a GGUF file.

    dtype: of weights and activations, except in 8-bit products. max_model_len: positions of the rotary table.
    max_rows: most rows of a step. max_logit_rows: most rows of one logits call; None: max_rows. quantization: fp8
    quantises the products of the layers, int8 and int4 all matrices; gguf computes with the blocks of a GGUF file
    as they are; none dequantises what is stored; None: weights stay as they are stored where the backend has
    products for them, those of a GGUF file where these are the faster ones. source: gives the tensors instead of
    the files in the directory, never in blocks; the directory still gives the configuration. state_layers: whose
    states the decoder can capture. progress: called with (bytes done, bytes in all) after every tensor. shard: the
    part of the model to load, whose other parts the other ranks have; None: all of it. adapters: see Decoder.

    Raises ModelError that names the unusable file, field or tensor; ConfigError for an unknown quantization, or
    one that the backend has no products for.
    """
    config = read_model_config(directory)
    spec = config.spec
    if source is None:
        check_sizes(directory, config)
    if spec.has_experts and not backend.has_experts:
        raise ConfigError(
            f"{directory} is a mixture of experts; the {backend.name} backend computes none; "
            "--backend native, on a CPU, does"
        )
    for mixer in mixer_shapes(spec):
        if mixer is not None and not backend.mixes(mixer):
            raise ConfigError(
                f"{directory} has {mixer.kind}; the {backend.name} backend computes none; --device cpu does"
            )
    if config.wrapper is not None:
        _log.info("%s is a %s: its text half is loaded, images are not served", directory, config.wrapper)
    form = checkpoint_form(directory, backend, dtype, quantization=quantization, source=source)
    shapes = None
    if shard is not None:
        shapes = local_shapes(spec, shard)
        form, spec = _sharded(form, spec, shard), local_spec(spec, shard)
    weights = pack_weights(
        form.source,
        spec,
        backend,
        dtype,
        progress,
        stored=form.stored,
        quantise=form.quantise,
        blocks=form.blocks,
        shapes=shapes,
    )
    if shard is not None:
        weights = replace(weights, products=whole_products(weights.products, config.spec, shard))
    rotary = RotaryTables(spec, num_positions=max_model_len, device=backend.device)
    buffers = Buffers.allocate(
        spec,
        dtype,
        backend.device,
        max_rows=max_rows,
        max_logit_rows=max_rows if max_logit_rows is None else max_logit_rows,
        state_layers=state_layers,
        head_rows=None if shard is None else shard.head_rows(spec.vocab_size),
    )
    return Decoder(spec, backend, weights, rotary, buffers, ranks, adapters)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointForm:
    """Form in which weights are packed: the arguments of pack_weights."""

    source: WeightSource
    stored: StoredRows = no_rows
    quantise: Quantise | None = None
    blocks: StoredBlocks = no_rows


def _sharded(form: CheckpointForm, spec: DecoderSpec, shard: Shard) -> CheckpointForm:
    """The same weights, but for what other ranks have of them."""
    parts = ShardedSource(form.source, spec, shard)
    return replace(form, source=parts, stored=parts.cut(form.stored), blocks=parts.cut(form.blocks))


def checkpoint_form(
    directory: Path,
    backend: Backend,
    dtype: torch.dtype,
    *,
    quantization: str | None,
    source: WeightSource | None = None,
    shapes: Mapping[str, tensors.Shape] | None = None,
) -> CheckpointForm:
    """Choose how weights are packed: a quantised checkpoint stays quantised if the backend has products for it.

    shapes: of the tensors to read; None: those of the model. For the other arguments and errors see load_decoder.
    """
    config = read_model_config(directory)
    if quantization in _STORED:
        stored_as = "16 or 32 bits, or GGUF" if config.quantization is None else config.quantization.method
        if not stored_as.startswith(quantization):
            raise ConfigError(
                f"--quantization is {quantization}; {directory} is stored in {stored_as}; leave it out"
            )
        quantization = None
    _check_quantization(quantization, backend, directory)
    if quantization is None and source is None and backend.prefers_low_bit and gguf_file(directory) is not None:
        quantization = "gguf"
    source = source or open_source(directory)
    stored = config.quantization
    if quantization == "gguf":
        return _gguf_form(directory, source, backend)
    if stored is None:
        if quantization in QUANTIZATIONS:
            return CheckpointForm(source=source, blocks=partial(rounded_rows, source, quantization))
        return CheckpointForm(source=source, quantise=quantise_weight if quantization == "fp8" else None)
    if quantization not in (None, "none") and not (quantization == "fp8" and isinstance(stored, StoredFp8)):
        raise ConfigError(f"--quantization is {quantization}; {directory} is quantised already ({stored.method})")
    if isinstance(stored, StoredMxfp4):
        return _mxfp4_form(directory, source, backend, dtype, quantization)
    if isinstance(stored, StoredLowBit):
        codes = CodeSource(source, stored, shapes or tensors.tensor_shapes(config.spec))
        if quantization == "none":
            return CheckpointForm(source=codes)
        if not backend.has_low_bit:
            _warn_of_dequantising(directory, stored.method, "low-bit", backend, dtype)
            return CheckpointForm(source=codes)
        _log.info(
            "%s: using weights (%s, %s bits) as stored, with %s activations",
            directory,
            stored.method,
            " and ".join(map(str, stored.bits)),
            _activations(backend),
        )
        return CheckpointForm(source=codes, blocks=codes.rows)
    floats = Fp8Source(source, stored.block)
    if quantization == "none":
        return CheckpointForm(source=floats)
    if floats.has_cache_scales:
        _log.info(
            "%s: ignoring the scales of keys and values; --kv-cache-dtype fp8 uses a scale of one", directory
        )
    if takes_fp8_as_int8(backend):
        _log.info(
            "%s: using weights (%s) as int8, one scale for %d values, with 8-bit activations; --quantization none "
            "computes in %s",
            directory,
            stored.method,
            INT8.group_size,
            str(dtype).removeprefix("torch."),
        )
        return CheckpointForm(source=floats, blocks=partial(int8_rows, floats))
    if not backend.has_fp8:
        _warn_of_dequantising(directory, stored.method, "fp8", backend, dtype)
        return CheckpointForm(source=floats)
    if stored.static_inputs:
        _log.info("%s: ignoring static activation scales; using per-token scales", directory)
    return CheckpointForm(source=floats, stored=floats.fp8)


def _mxfp4_form(
    directory: Path, source: WeightSource, backend: Backend, dtype: torch.dtype, quantization: str | None
) -> CheckpointForm:
    """The experts as they are stored; all other products are floats."""
    if not isinstance(source, StackedSource):
        raise ConfigError(f"{directory} is quantised (mxfp4), which is supported for gpt-oss only")
    if quantization == "none":
        return CheckpointForm(source=source)
    if not backend.has_low_bit_experts:
        _warn_of_dequantising(directory, "mxfp4", "low-bit", backend, dtype)
        return CheckpointForm(source=source)
    _log.info("%s: using experts (mxfp4) as stored, with %s activations", directory, _activations(backend))
    return CheckpointForm(source=source, blocks=source.rows)


def _gguf_form(path: Path, source: WeightSource, backend: Backend) -> CheckpointForm:
    """The blocks of a GGUF file as they are."""
    if not isinstance(source, GgufSource):
        raise ConfigError(
            f"--quantization is gguf; the weights come from {type(source).__name__}, not from a file"
        )
    _log.info(
        "%s: using weights in %s as stored, with %s activations",
        path,
        block_formats(source) or "no low-bit format",
        _activations(backend),
    )
    return CheckpointForm(source=source, blocks=partial(gguf_rows, source))


def _activations(backend: Backend) -> str:
    """Describe the rows that are multiplied with low-bit weights."""
    return "16-bit" if backend.name == "flashinfer" else "8-bit"


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


def open_source(path: Path) -> WeightSource:
    """The tensors of a checkpoint: from its safetensors files, or dequantised from its GGUF file.

    Of a vision-language model: those of its text half.
    """
    config = read_model_config(path)
    source, stacked = open_tensors(path, config), config.spec.names.stacked_experts
    if stacked is None or isinstance(source, GgufSource):
        return source
    block = config.quantization.block if isinstance(config.quantization, StoredFp8) else None
    return StackedSource(source, stacked, 1 if block is None else block[0])
