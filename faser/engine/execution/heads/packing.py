"""HeadPacker: packs a head's tensors, and takes those from the target that the checkpoint lacks or repeats."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from faser.engine.checkpoints.heads.head_spec import HeadSpec
from faser.engine.checkpoints.quantized import StoredFp8, StoredLowBit
from faser.engine.execution.heads import tensors
from faser.engine.execution.heads.sources import LendingSource
from faser.engine.execution.models.decoder import Decoder
from faser.engine.execution.models.sources import Fp8Source, rounded_rows
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
from faser.errors import ModelError
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.shapes import PackedLinear

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
        blocks: StoredBlocks = no_rows
        fp8: StoredRows = no_rows
        if isinstance(stored, StoredLowBit):
            source = codes = CodeSource(source, stored, shapes)
            blocks = codes.rows if backend.has_low_bit else no_rows
        elif isinstance(stored, StoredFp8):
            source = floats = Fp8Source(source)
            fp8 = floats.fp8 if backend.has_fp8 else no_rows
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
            blocks = partial(rounded_rows, source, quantization)
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
