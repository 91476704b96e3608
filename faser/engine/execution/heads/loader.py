"""Builds a head from its directory, for a loaded target: configuration, vocabulary, weights, buffers."""

from pathlib import Path

from faser.engine.checkpoints.heads.head_spec import HeadKind, HeadSpec
from faser.engine.checkpoints.heads.reader import read_head_spec
from faser.engine.execution.heads import tensors
from faser.engine.execution.heads.eagle import EagleHead, EagleWeights
from faser.engine.execution.heads.eagle3 import Eagle3Head, Eagle3Weights
from faser.engine.execution.heads.head import Head
from faser.engine.execution.heads.layer_stack import HeadBuffers
from faser.engine.execution.heads.medusa import MedusaBlocks, MedusaHead, MedusaWeights
from faser.engine.execution.heads.packing import HeadPacker
from faser.engine.execution.heads.sources import open_head
from faser.engine.execution.heads.vocabulary import draft_token_ids
from faser.engine.execution.models.decoder import Decoder
from faser.engine.execution.models.rope import rotary_angles
from faser.engine.execution.models.sources import QUANTIZATIONS
from faser.engine.execution.models.tensors import Shape
from faser.engine.execution.models.weights import ByteProgress, LayerWeights, WeightSource
from faser.errors import ConfigError
from faser.kernels.interface.backend import Backend


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
    shapes = tensors.tensor_shapes(spec, source.names())
    rows = max_rows if max_logit_rows is None else max_logit_rows
    packer = HeadPacker(source, spec, shapes, draft_ids, target, backend, quantization, progress)
    draft_ids = None if draft_ids is None else draft_ids.to(backend.device)
    if spec.kind is HeadKind.MEDUSA:
        medusa = _medusa(packer, spec, shapes, target)
        return MedusaHead(spec, backend, medusa, target.dtype, max_rows=max_rows, max_logit_rows=rows)
    angles = rotary_angles(spec.decoder.rope, head_dim=spec.decoder.head_dim, num_positions=max_positions)
    buffers = HeadBuffers.allocate(
        spec,
        target.dtype,
        backend.device,
        max_rows=max_rows,
        max_logit_rows=rows,
    )
    angles = angles.to(backend.device)
    if spec.kind is HeadKind.EAGLE:
        return EagleHead(spec, backend, _eagle(packer, spec, target), angles, buffers)
    return Eagle3Head(spec, backend, _eagle3(packer, spec), draft_ids, angles, buffers)


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


def _eagle3(packer: HeadPacker, spec: HeadSpec) -> Eagle3Weights:
    return Eagle3Weights(
        embedding=packer.product(tensors.EMBEDDING),
        feature_norms=tuple(packer.vector(name) for name in tensors.feature_norms(spec)),
        fc=packer.layer_product(tensors.FC),
        hidden_norm=packer.vector(tensors.HIDDEN_NORM),
        layers=_layers(packer, spec),
        norm=packer.vector(tensors.NORM),
        head=packer.product(tensors.HEAD),
        num_bytes=packer.packed_bytes,
    )


def _eagle(packer: HeadPacker, spec: HeadSpec, target: Decoder) -> EagleWeights:
    return EagleWeights(
        embedding=packer.product(tensors.EMBEDDING),
        fc=packer.layer_product(tensors.FC),
        layers=_layers(packer, spec),
        head=packer.product(tensors.HEAD),
        target_norm=target.ends.final_norm,
        target_eps=target.spec.rms_norm_eps,
        num_bytes=packer.packed_bytes,
    )


def _medusa(packer: HeadPacker, spec: HeadSpec, shapes: dict[str, Shape], target: Decoder) -> MedusaWeights:
    assert spec.max_draft_tokens is not None, "as many as there are heads"
    common = packer.product(tensors.HEAD) if tensors.HEAD in shapes else None
    heads = tuple(
        MedusaBlocks(
            blocks=tuple(
                packer.layer_product(tensors.medusa_block(head, block)) for block in range(spec.medusa_blocks)
            ),
            head=packer.product(tensors.medusa_head(head)) if common is None else common,
        )
        for head in range(spec.max_draft_tokens)
    )
    return MedusaWeights(
        heads=heads,
        target_norm=target.ends.final_norm,
        target_eps=target.spec.rms_norm_eps,
        num_bytes=packer.packed_bytes,
    )


def _layers(packer: HeadPacker, spec: HeadSpec) -> tuple[LayerWeights, ...]:
    return tuple(packer.layer(tensors.layer_prefix(layer)) for layer in range(spec.decoder.num_layers))
