"""Loads a head from its directory, for a loaded target: configuration, vocabulary, weights, buffers.

Tensors have the names of heads/tensors.py here, whatever the checkpoint calls them. Those that the checkpoint
lacks or repeats are the target's own.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from faser.engine.checkpoints.blocks import BlockSpec
from faser.engine.checkpoints.files import TORCH_WEIGHTS
from faser.engine.checkpoints.gguf_weights import GgufSource, open_gguf
from faser.engine.checkpoints.heads import HeadSpec, read_head_spec
from faser.engine.checkpoints.quantized import StoredFp8, StoredLowBit
from faser.engine.execution.drafting.heads import tensors
from faser.engine.execution.drafting.heads.eagle3 import Eagle3Head, Eagle3Weights, HeadBuffers
from faser.engine.execution.models.decoder import Decoder
from faser.engine.execution.models.rope import RotaryTables
from faser.engine.execution.models.sources import (
    QUANTIZATIONS,
    Fp8Source,
    SafetensorsSource,
    gguf_rows,
    int8_rows,
    rounded_rows,
    takes_fp8_as_int8,
)
from faser.engine.execution.models.stored_codes import CodeSource
from faser.engine.execution.models.tensors import Shape
from faser.engine.execution.models.weights import (
    ByteProgress,
    Packer,
    StoredBlocks,
    StoredRows,
    WeightSource,
    check_names,
    no_rows,
)
from faser.errors import ConfigError, ModelError
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.low_bit.rows import MULTIPLIED, LowBitRows
from faser.kernels.interface.shapes import PackedLinear
from faser.optional import maybe, or_else

_PREFIXES = (("model.", ""), ("midlayer.", "layers.0."))  # of names as the authors of EAGLE-3 write them
_ROWS_AT_ONCE = 4096  # of a vocabulary that is compared with the target's


def load_head(
    directory: Path,
    target: Decoder,
    backend: Backend,
    *,
    max_positions: int,
    max_rows: int,
    max_logit_rows: int | None = None,
    quantization: str | None = None,
    source: WeightSource | None = None,
    progress: ByteProgress = lambda *_: None,
) -> Eagle3Head:
    """Load the head in a directory.

    target: the model that it drafts for, on this backend or on another instance of it.
    max_positions: entries of the cache that a row may attend to. max_rows: most rows of a step. max_logit_rows: of
    one logits call; None: max_rows. quantization: int8 and int4 round all matrices that the head has for itself;
    None: they stay as they are stored where the backend has products for them. source: gives the tensors instead
    of the files. progress: called with (bytes done, bytes in all).

    Raises ModelError that names the file, field or tensor, or both values where head and target do not fit;
    ConfigError for a quantization that is unknown, or that the backend has no products for.
    """
    spec = read_head_spec(directory, target.spec)
    check_quantization(quantization, spec, backend, directory)
    source = source or open_head(directory)
    draft_ids = tensors.draft_token_ids(source, spec)
    weights = _packed(source, spec, draft_ids, target, backend, quantization, progress)
    rotary = RotaryTables(spec.decoder, num_positions=max_positions, device=backend.device)
    buffers = HeadBuffers.allocate(
        spec,
        target.dtype,
        backend.device,
        max_rows=max_rows,
        max_logit_rows=or_else(max_logit_rows, max_rows),
    )
    draft_ids = maybe(lambda ids: ids.to(backend.device), draft_ids)
    return Eagle3Head(spec, backend, weights, draft_ids, rotary, buffers)


def open_head(directory: Path) -> "RenamedSource":
    """The tensors of a GGUF file, or of a head's directory: from safetensors files, else a file of torch.save.

    Raises ModelError that names the missing or damaged file.
    """
    if directory.suffix == ".gguf":
        return RenamedSource(open_gguf(directory))
    pickled = directory / TORCH_WEIGHTS
    if pickled.is_file() and not any(directory.glob("*.safetensors")):
        return RenamedSource(TorchFileSource(pickled))
    return RenamedSource(SafetensorsSource(directory))


def check_quantization(
    quantization: str | None, spec: HeadSpec | BlockSpec, backend: Backend, directory: Path
) -> None:
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


def _packed(
    source: WeightSource,
    spec: HeadSpec,
    draft_ids: Tensor | None,
    target: Decoder,
    backend: Backend,
    quantization: str | None,
    progress: ByteProgress,
) -> Eagle3Weights:
    """draft_ids: the target's tokens of the rows of the logits; None: all of them.

    The embedding and the product of the logits are the target's own where the checkpoint has none, or the same.
    Raises ModelError that names tensors that are missing or unexpected, before anything is packed.
    """
    packer, shared = head_packer(
        source, tensors.eagle3_shapes(spec), spec, draft_ids, target, backend, quantization, progress
    )

    def product(name: str) -> PackedLinear:
        return shared[name] if name in shared else packer.product(name)

    return Eagle3Weights(
        embedding=product(tensors.EMBEDDING),
        feature_norms=tuple(packer.norm(name) for name in tensors.feature_norms(spec)),
        fc=packer.layer_product(tensors.FC),
        hidden_norm=packer.norm(tensors.HIDDEN_NORM),
        layers=tuple(
            packer.layer(tensors.layer_prefix(number), layer, spec.decoder)
            for number, layer in enumerate(spec.decoder.layers)
        ),
        norm=packer.norm(tensors.NORM),
        head=product(tensors.HEAD),
        num_bytes=packer.packed_bytes,
    )


def head_packer(
    source: WeightSource,
    shapes: Mapping[str, Shape],
    spec: HeadSpec | BlockSpec,
    draft_ids: Tensor | None,
    target: Decoder,
    backend: Backend,
    quantization: str | None,
    progress: ByteProgress,
) -> tuple[Packer, Mapping[str, PackedLinear]]:
    """Return what packs a head's tensors, and those products that are the target's own.

    shapes: of every tensor, the embedding and the product of the logits among them. The other arguments and what
    is raised: see _packed.
    """
    blocks: StoredBlocks = no_rows
    fp8: StoredRows = no_rows
    if isinstance(spec.quantization, StoredLowBit):
        source = codes = CodeSource(source, spec.quantization, shapes)
        blocks = codes.rows if backend.has_low_bit else no_rows
    elif isinstance(spec.quantization, StoredFp8):
        source = floats = Fp8Source(source, spec.quantization.block)
        fp8 = floats.fp8 if backend.has_fp8 else no_rows
        blocks = partial(int8_rows, floats) if takes_fp8_as_int8(backend) else no_rows
    elif isinstance(source, RenamedSource | RowsSource) and backend.prefers_low_bit:
        blocks = source.blocks
    own = set(source.names())
    for name in (tensors.EMBEDDING, tensors.HEAD):
        if name not in own:
            _check_width(name, spec, target)
    candidates, lent = {tensors.EMBEDDING: target.ends.embedding}, target.ends.head
    if lent is None:
        if tensors.HEAD not in own:
            raise ModelError(f"the head has no {tensors.HEAD}; the target has one that is divided among ranks")
    elif draft_ids is None:
        candidates[tensors.HEAD] = lent
    elif tensors.HEAD not in own:
        source = LendingSource(source, {tensors.HEAD: rows_of_target(lent, draft_ids, target, backend)})
    shared = {
        name: handle
        for name, handle in candidates.items()
        if name not in own or _repeats(source.get(name), handle, target, backend)
    }
    shapes = {name: shape for name, shape in shapes.items() if name not in shared}
    check_names(source, shapes, lambda name: name in shared or tensors.ignorable(name))
    if quantization is not None:
        scheme, packed = quantization, shapes

        def rounded(name: str) -> LowBitRows | None:
            return rounded_rows(source, scheme, name) if packed[name][-1] % MULTIPLIED == 0 else None

        blocks = rounded
    packer = Packer(source, shapes, backend, target.dtype, progress, stored=fp8, blocks=blocks)
    return packer, shared


def _check_width(name: str, spec: HeadSpec | BlockSpec, target: Decoder) -> None:
    """Raises ModelError unless the target's tensor of this name has the width of the head."""
    if spec.hidden_size != target.spec.hidden_size:
        raise ModelError(
            f"the head has no tensor {name} and is {spec.hidden_size} values wide; it cannot take that of the "
            f"model, which is {target.spec.hidden_size} wide"
        )


def _repeats(weight: Tensor, handle: PackedLinear, target: Decoder, backend: Backend) -> bool:
    """Return whether a tensor [V, H] of the head repeats one of the target, in the target's type."""
    if weight.shape != (target.spec.vocab_size, target.spec.hidden_size):
        return False
    for first in range(0, len(weight), _ROWS_AT_ONCE):
        token_ids = torch.arange(first, min(first + _ROWS_AT_ONCE, len(weight)))
        rows = rows_of_target(handle, token_ids, target, backend)
        if not torch.equal(rows, weight[token_ids].to(rows)):
            return False
    return True


def rows_of_target(handle: PackedLinear, token_ids: Tensor, target: Decoder, backend: Backend) -> Tensor:
    """Return rows [N, H] of the embedding of the target, or of its product of the logits."""
    rows = torch.empty((len(token_ids), target.spec.hidden_size), dtype=target.dtype, device=backend.device)
    return backend.embed(token_ids.to(backend.device), handle, rows)


class RenamedSource:
    """A WeightSource over another, whose names are those of heads/tensors.py."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._stored: dict[str, str] = {}
        for stored in source.names():
            name = stored
            for prefix, instead in _PREFIXES:
                if name.startswith(prefix):
                    name = instead + name.removeprefix(prefix)
            if name in self._stored:
                raise ModelError(
                    f"the checkpoint has the tensors {self._stored[name]} and {stored}, which are one"
                )
            self._stored[name] = stored

    def names(self) -> Sequence[str]:
        return list(self._stored)

    def get(self, name: str) -> Tensor:
        return self._source.get(self._stored[name])

    def blocks(self, name: str) -> LowBitRows | None:
        """A weight of a GGUF file in its blocks; None: it has none that are multiplied."""
        if name not in self._stored or not isinstance(self._source, GgufSource):
            return None
        return gguf_rows(self._source, self._stored[name])


class RowsSource:
    """A WeightSource over another, some of whose matrices have these rows alone."""

    def __init__(self, source: RenamedSource, matrices: Sequence[str], rows: Tensor) -> None:
        self._source = source
        self._matrices = matrices
        self._rows = rows

    def names(self) -> Sequence[str]:
        return self._source.names()

    def get(self, name: str) -> Tensor:
        weight = self._source.get(name)
        return weight[self._rows] if name in self._matrices else weight

    def blocks(self, name: str) -> LowBitRows | None:
        """Return what RenamedSource.blocks does, of these rows."""
        found = self._source.blocks(name)
        return found.take(self._rows.numpy()) if found is not None and name in self._matrices else found


class LendingSource:
    """A WeightSource over another, with tensors added. lent: by name, none of them the source's."""

    def __init__(self, source: WeightSource, lent: Mapping[str, Tensor]) -> None:
        self._source = source
        self._lent = lent

    def names(self) -> Sequence[str]:
        return [*self._source.names(), *self._lent]

    def get(self, name: str) -> Tensor:
        return self._lent[name] if name in self._lent else self._source.get(name)


class TorchFileSource:
    """A WeightSource over one file of torch.save, which stays mapped as long as this lives. No code in it is run.

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
