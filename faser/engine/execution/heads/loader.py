"""Builds a head from its directory, for a loaded target: configuration, vocabulary, weights, buffers.

What the checkpoint lacks the target lends: the embedding, and the rows of its head for the draft vocabulary.
"""

from pathlib import Path

import torch
from torch import Tensor

from faser.engine.checkpoints.heads.head_spec import HeadSpec
from faser.engine.checkpoints.heads.reader import read_head_spec
from faser.engine.checkpoints.quantization.stored import StoredFp8, StoredLowBit
from faser.engine.execution.heads import tensors
from faser.engine.execution.heads.eagle3 import Eagle3Head, Eagle3Weights
from faser.engine.execution.heads.head import Head
from faser.engine.execution.heads.layer_stack import HeadBuffers
from faser.engine.execution.heads.sources import LendingSource, open_head
from faser.engine.execution.heads.vocabulary import draft_token_ids
from faser.engine.execution.models.decoder import Decoder
from faser.engine.execution.models.rope import rotary_angles
from faser.engine.execution.models.rounded_source import QUANTIZATIONS, RoundedSource
from faser.engine.execution.models.stored_codes import CodeSource
from faser.engine.execution.models.stored_fp8 import Fp8Source
from faser.engine.execution.models.tensors import Shape
from faser.engine.execution.models.weights import (
    ByteProgress,
    Packer,
    StoredBlocks,
    StoredRows,
    WeightSource,
    check_names,
)
from faser.errors import ConfigError, ModelError
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.shapes import PackedLinear


def load_head(
    directory: Path,
    target: Decoder,
    backend: Backend,
    *,
    method: str | None = None,
    max_positions: int,
    max_rows: int,
    max_logit_rows: int | None = None,
    quantization: str | None = None,
    source: WeightSource | None = None,
    progress: ByteProgress = lambda *_: None,
) -> Head:
    """Load the head in a directory.

    target: the model that it drafts for, on this backend or on another instance of it. method: see read_head_spec.
    max_positions: entries of the cache that a row may attend to. max_rows: most rows of a step. max_logit_rows: of
    one logits call; None: max_rows. quantization: int8 and int4 round all matrices that the head has for itself;
    None: they stay as they are stored where the backend has products for them. source: gives the tensors instead
    of the files, under the names of tensors.py. progress: called with (bytes done, bytes in all).

    Raises ModelError that names the file, field or tensor, or both values where head and target do not fit;
    ConfigError for a quantization that is unknown, or that the backend has no products for.
    """
    spec = read_head_spec(directory, target.spec, method=method)
    _check_quantization(quantization, spec, backend, directory)
    source = source or open_head(directory)
    draft_ids = draft_token_ids(source, spec)
    shapes = tensors.eagle3_shapes(spec)
    weights = _pack(source, spec, shapes, draft_ids, target, backend, quantization, progress)
    angles = rotary_angles(spec.decoder.rope, head_dim=spec.decoder.head_dim, num_positions=max_positions)
    buffers = HeadBuffers.allocate(
        spec,
        target.dtype,
        backend.device,
        max_rows=max_rows,
        max_logit_rows=max_rows if max_logit_rows is None else max_logit_rows,
    )
    device = backend.device
    return Eagle3Head(
        spec, backend, weights, None if draft_ids is None else draft_ids.to(device), angles.to(device), buffers
    )


def _check_quantization(quantization: str | None, spec: HeadSpec, backend: Backend, directory: Path) -> None:
    if quantization is None:
        return
    if quantization not in QUANTIZATIONS:
        raise ConfigError(f"quantization of a head is {quantization}; only {', '.join(QUANTIZATIONS)} are known")
    if spec.quantization is not None:
        raise ConfigError(
            f"quantization of a head is {quantization}; {directory} is quantised already "
            f"({spec.quantization.method})"
        )
    if not backend.has_low_bit:
        raise ConfigError(
            f"quantization of a head is {quantization}; the {backend.name} backend has no low-bit products on "
            f"{backend.device}"
        )


def _pack(
    source: WeightSource,
    spec: HeadSpec,
    shapes: dict[str, Shape],
    draft_ids: Tensor | None,
    target: Decoder,
    backend: Backend,
    quantization: str | None,
    progress: ByteProgress,
) -> Eagle3Weights:
    """Pack an EAGLE-3 head. A tensor that it shares with the target is not packed again."""
    stored = spec.quantization
    blocks: StoredBlocks | None = None
    fp8: StoredRows | None = None
    if isinstance(stored, StoredLowBit):
        source = codes = CodeSource(source, stored, shapes)
        blocks = codes.rows if backend.has_low_bit else None
    elif isinstance(stored, StoredFp8):
        source = floats = Fp8Source(source)
        fp8 = floats.fp8 if backend.has_fp8 else None
    own = set(source.names())
    shared: dict[str, PackedLinear] = {}
    if tensors.EMBEDDING not in own:
        _refuse_other_width(tensors.EMBEDDING, spec, target)
        shared[tensors.EMBEDDING] = target.ends.embedding
    if tensors.HEAD not in own:
        _refuse_other_width(tensors.HEAD, spec, target)
        if draft_ids is None:
            shared[tensors.HEAD] = target.ends.head
        else:
            source = LendingSource(source, {tensors.HEAD: _rows_of_head(target, draft_ids, backend)})
    shapes = {name: shape for name, shape in shapes.items() if name not in shared}
    check_names(source, shapes, tensors.ignorable)
    if quantization is not None:
        blocks = RoundedSource(source, quantization).rows
    packer = Packer(source, shapes, backend, target.dtype, progress, stored=fp8, blocks=blocks)

    def product(name: str) -> PackedLinear:
        return shared[name] if name in shared else packer.product(name)

    return Eagle3Weights(
        embedding=product(tensors.EMBEDDING),
        feature_norms=tuple(packer.vector(name) for name in tensors.feature_norms(spec)),
        fc=packer.layer_product(tensors.FC),
        hidden_norm=packer.vector(tensors.HIDDEN_NORM),
        layers=tuple(packer.layer(tensors.layer_prefix(layer)) for layer in range(spec.decoder.num_layers)),
        norm=packer.vector(tensors.NORM),
        head=product(tensors.HEAD),
        num_bytes=packer.packed_bytes,
    )


def _refuse_other_width(name: str, spec: HeadSpec, target: Decoder) -> None:
    """Raises ModelError unless the target's tensor of this name has the width of the head."""
    if spec.hidden_size != target.spec.hidden_size:
        raise ModelError(
            f"the head has no tensor {name} and is {spec.hidden_size} values wide; it cannot take that of the "
            f"model, which is {target.spec.hidden_size} wide"
        )


def _rows_of_head(target: Decoder, draft_ids: Tensor, backend: Backend) -> Tensor:
    """[Vd, H]: the rows of the target's head for the draft vocabulary."""
    rows = torch.empty((len(draft_ids), target.spec.hidden_size), dtype=target.dtype, device=backend.device)
    return backend.embed(draft_ids.to(backend.device), target.ends.head, rows)
