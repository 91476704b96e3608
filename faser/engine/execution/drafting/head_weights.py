"""Weights in a file of torch.save (`pytorch_model.bin`), as the authors of EAGLE and Medusa publish theirs.

The tensors of a head's directory under the names of tensors.py, and those that the target lends it.

HeadPacker: packs a head's tensors, and takes those from the target that the checkpoint lacks or repeats.

Builds a head from its directory, for a loaded target: configuration, vocabulary, weights, buffers.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from faser.engine.checkpoints.heads import HeadKind, HeadSpec, read_head_spec
from faser.engine.checkpoints.quantization.stored import StoredFp8, StoredLowBit
from faser.engine.checkpoints.weight_files import TORCH_WEIGHTS
from faser.engine.execution.drafting import head_tensors as tensors
from faser.engine.execution.drafting.eagle3 import Eagle3Head, Eagle3Weights, Head, HeadBuffers
from faser.engine.execution.drafting.head_tensors import draft_token_ids
from faser.engine.execution.heads.eagle import EagleHead, EagleWeights
from faser.engine.execution.heads.medusa import MedusaBlocks, MedusaHead, MedusaWeights
from faser.engine.execution.models.decoder import Decoder
from faser.engine.execution.models.rope import rotary_angles
from faser.engine.execution.models.rounded_source import QUANTIZATIONS, RoundedSource
from faser.engine.execution.models.safetensors_source import SafetensorsSource
from faser.engine.execution.models.stored_codes import CodeSource
from faser.engine.execution.models.stored_fp8 import Fp8Source
from faser.engine.execution.models.tensors import Shape
from faser.engine.execution.models.weights import (
    ByteProgress,
    LayerWeights,
    Packer,
    StoredBlocks,
    StoredRows,
    WeightSource,
    check_names,
)
from faser.errors import ConfigError, ModelError
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.shapes import PackedLinear


class TorchFileSource:
    """A WeightSource over one file. The file stays mapped as long as this object lives; no code in it is run.

    Raises ModelError that names a damaged file, or one that holds something other than tensors by name.
    """

    def __init__(self, path: Path) -> None:
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # of the disk, the archive, or its index: it cannot be read in any case
            reason = str(error).partition("\n")[0]
            raise ModelError(f"{path} cannot be read as a file of tensors: {reason}") from error
        if not isinstance(found, dict) or not all(isinstance(each, Tensor) for each in found.values()):
            raise ModelError(f"{path} holds something other than tensors by name")
        self._tensors: dict[str, Tensor] = found

    def names(self) -> list[str]:
        return list(self._tensors)

    def get(self, name: str) -> Tensor:
        return self._tensors[name]


_PREFIXES = (("model.", ""), ("midlayer.", "layers.0."), ("medusa_heads.", ""), ("medusa_head.", ""))
_MEDUSA_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")  # as the authors of Medusa call it
_MEDUSA_HEAD = re.compile(r"(\d+)\.\d+\.weight")


class RenamedSource:
    """A WeightSource over another: its names without `model.`, `midlayer.` as layer 0, Medusa's as vLLM's."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._stored: dict[str, str] = {}
        for stored in source.names():
            name = _renamed(stored)
            if name in self._stored:
                raise ModelError(
                    f"the checkpoint has the tensors {self._stored[name]} and {stored}, which are one"
                )
            self._stored[name] = stored

    def names(self) -> Sequence[str]:
        return list(self._stored)

    def get(self, name: str) -> Tensor:
        return self._source.get(self._stored[name])


class LendingSource:
    """A WeightSource over another, with tensors added. lent: by name; those of the source come first."""

    def __init__(self, source: WeightSource, lent: Mapping[str, Tensor]) -> None:
        self._source = source
        own = set(source.names())
        self._lent = {name: tensor for name, tensor in lent.items() if name not in own}

    def names(self) -> Sequence[str]:
        return [*self._source.names(), *self._lent]

    def get(self, name: str) -> Tensor:
        lent = self._lent.get(name)
        return self._source.get(name) if lent is None else lent


def open_head(directory: Path) -> WeightSource:
    """The tensors of a head's directory, from safetensors files or else from a file of torch.save.

    Raises ModelError that names the missing or damaged file.
    """
    if not any(directory.glob("*.safetensors")):
        for pickled in (directory / name for name in TORCH_WEIGHTS):
            if pickled.is_file():
                return RenamedSource(TorchFileSource(pickled))
    return RenamedSource(SafetensorsSource(directory))


def _renamed(name: str) -> str:
    for prefix, instead in _PREFIXES:
        if name.startswith(prefix):
            name = instead + name.removeprefix(prefix)
    if found := _MEDUSA_BLOCK.fullmatch(name):
        return f"blocks.{found[1]}.layers.{found[2]}.{found[3]}"
    if found := _MEDUSA_HEAD.fullmatch(name):
        return f"lm_heads.{found[1]}.weight"
    return name


_ROWS_AT_ONCE = 4096  # of a vocabulary that is compared with the target's


class HeadPacker:
    """Packs what the caller asks for, in the order of the calls.

    shapes: every tensor of the head. draft_ids: the target's tokens of the rows of its logits; None: all. The
    embedding and the head's output product are the target's own where the checkpoint has none, or the same.

    Raises ModelError that names tensors that are missing or unexpected, before anything is packed.
    """

    def __init__(
        self,
        source: WeightSource,
        spec: HeadSpec,
        shapes: Mapping[str, Shape],
        draft_ids: Tensor | None,
        target: Decoder,
        backend: Backend,
        quantization: str | None,
        progress: ByteProgress,
    ) -> None:
        self._spec, self._target, self._backend = spec, target, backend
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
        handles = {tensors.EMBEDDING: target.ends.embedding}
        if draft_ids is None:
            handles[tensors.HEAD] = target.ends.head
        elif tensors.HEAD in shapes and tensors.HEAD not in own:
            self._check_width(tensors.HEAD)
            source = LendingSource(source, {tensors.HEAD: self._rows(target.ends.head, draft_ids)})
        self._shared: dict[str, PackedLinear] = {}
        for name, handle in handles.items():
            if name not in shapes:
                continue
            if name not in own:
                self._check_width(name)
            if name not in own or self._same(source.get(name), handle):
                self._shared[name] = handle
        shapes = {name: shape for name, shape in shapes.items() if name not in self._shared}
        check_names(source, shapes, lambda name: name in self._shared or tensors.ignorable(name))
        if quantization is not None:
            blocks = RoundedSource(source, quantization).rows
        self._packer = Packer(source, shapes, backend, target.dtype, progress, stored=fp8, blocks=blocks)
        self.layer_product = self._packer.layer_product
        self.layer = self._packer.layer
        self.vector = self._packer.vector

    @property
    def packed_bytes(self) -> int:
        """Of what was packed so far; what the target shares is not counted."""
        return self._packer.packed_bytes

    def product(self, name: str) -> PackedLinear:
        """The embedding, or the product of the logits."""
        return self._shared[name] if name in self._shared else self._packer.product(name)

    def _check_width(self, name: str) -> None:
        """Raises ModelError unless the target's tensor of this name has the width of the head."""
        if self._spec.hidden_size != self._target.spec.hidden_size:
            raise ModelError(
                f"the head has no tensor {name} and is {self._spec.hidden_size} values wide; it cannot take that "
                f"of the model, which is {self._target.spec.hidden_size} wide"
            )

    def _same(self, weight: Tensor, handle: PackedLinear) -> bool:
        """Whether a tensor [V, H] of the head repeats one of the target, in the target's type."""
        if weight.shape != (self._target.spec.vocab_size, self._target.spec.hidden_size):
            return False
        for first in range(0, len(weight), _ROWS_AT_ONCE):
            token_ids = torch.arange(first, min(first + _ROWS_AT_ONCE, len(weight)))
            rows = self._rows(handle, token_ids)
            if not torch.equal(rows, weight[token_ids].to(rows)):
                return False
        return True

    def _rows(self, handle: PackedLinear, token_ids: Tensor) -> Tensor:
        """[N, H]: rows of a tensor of the target."""
        device, width = self._backend.device, self._target.spec.hidden_size
        rows = torch.empty((len(token_ids), width), dtype=self._target.dtype, device=device)
        return self._backend.embed(token_ids.to(device), handle, rows)


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
