"""AdapterStore: the LoRA adapters of a model, packed for its products, and the slots that rows find them in.

An adapter is loaded in any thread while steps run, and put into a slot between two steps. Knows neither which
requests want it nor when it may leave: the control plane does.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from faser.engine.checkpoints.adapter import open_adapter
from faser.engine.checkpoints.adapter_parts import AdapterFile
from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.checkpoints.families.qwen3_5 import TILED_FILES, DeltaNetSpec
from faser.engine.execution.models.adapted import AdaptedProduct, ProductPart
from faser.errors import FaserError, RequestError
from faser.kernels.interface.adapters import Adapters, LowRank, PackedAdapter
from faser.types.adapter import Adapter


class AdapterStore:
    """Adapters by their digests. Implements AdapterMemory. products: of the model.

    spec: of the whole model. dtype: of its activations. architectures: the names that GGUF files of its family
    have. max_rank: of an adapter.
    """

    def __init__(
        self,
        products: Sequence[AdaptedProduct],
        kernels: Adapters,
        *,
        spec: DecoderSpec,
        dtype: torch.dtype,
        architectures: Sequence[str],
        max_rank: int,
    ) -> None:
        self._products = tuple(products)
        self._kernels = kernels
        self._spec = spec
        self._dtype = dtype
        self._architectures = architectures
        self._max_rank = max_rank
        self._shapes = {part.name: part.shape for product in products for part in product.parts}
        self._packed: dict[str, tuple[PackedAdapter | None, ...]] = {}  # of each product; None: it stays as it is
        self._slots: dict[int, str] = {}

    def load_adapter(self, adapter: Adapter) -> None:
        """Read and pack an adapter; see AdapterMemory."""
        if self.holds(adapter.digest):
            return
        try:
            file = open_adapter(Path(adapter.path), max_rank=self._max_rank)
            self._check(adapter, file)
            self._packed[adapter.digest] = tuple(self._pack(product, file) for product in self._products)
            file.close()
        except FaserError as error:
            raise RequestError(f"the adapter {adapter.name} cannot be used: {error}", param="model") from None

    def holds(self, digest: str) -> bool:
        """Return whether an adapter is loaded."""
        return digest in self._packed

    def drop_adapter(self, digest: str) -> None:
        """Free an adapter, between two steps; its slots become empty."""
        for slot in [slot for slot, held in self._slots.items() if held == digest]:
            self._set(slot, (None,) * len(self._products))
            del self._slots[slot]
        self.forget(digest)

    def forget(self, digest: str) -> None:
        """Free an adapter that is in no slot, in any thread."""
        self._packed.pop(digest, None)

    def place(self, slot: int, digest: str) -> None:
        """Put a loaded adapter into a slot, between two steps."""
        self._set(slot, self._packed[digest])
        self._slots[slot] = digest

    def _set(self, slot: int, packed: Sequence[PackedAdapter | None]) -> None:
        for product, each in zip(self._products, packed, strict=True):
            self._kernels.set(product.room, slot, each)

    def _check(self, adapter: Adapter, file: AdapterFile) -> None:
        """Raise RequestError unless the file has what the front-end has read, for this model."""
        if file.digest != adapter.digest:
            raise RequestError(f"{file.path} has changed since it was loaded; load it again")
        if file.architecture is not None and file.architecture not in self._architectures:
            raise RequestError(
                f"{file.path} is for architecture {file.architecture}; the model's is "
                f"{' or '.join(self._architectures) or 'none of GGUF'}"
            )
        for module, part in file.parts.items():
            self._check_heads(module, file)
            shape = self._shapes.get(module)
            if shape is None:
                kinds = sorted({name.split(".", 3)[3] for name in self._shapes})
                raise RequestError(
                    f"{file.path} adapts {module}; of this model of {self._spec.num_layers} layers FASER adapts "
                    f"{', '.join(kinds)}"
                )
            if part.shape != shape:
                raise RequestError(
                    f"{file.path}: the adapter of {module} is for a weight of {list(part.shape)}; the model's has "
                    f"{list(shape)}"
                )

    def _check_heads(self, module: str, file: AdapterFile) -> None:
        """Raise RequestError where value heads of a delta net are in another order than the model's."""
        number = int(module.split(".")[2])
        net = self._spec.layers[number].attention if number < self._spec.num_layers else None
        if (
            ".linear_attn." not in module
            or not isinstance(net, DeltaNetSpec)
            or net.num_v_heads == net.num_k_heads
        ):
            return
        if net.tiled != (file.architecture in TILED_FILES):
            raise RequestError(
                f"{file.path} adapts {module}; GGUF files of Qwen3.5 have value heads in another order than "
                "checkpoints of the hub, so the adapter must have the form of the model: both GGUF, or neither"
            )

    def _pack(self, product: AdaptedProduct, file: AdapterFile) -> PackedAdapter | None:
        if not any(part.name in file.parts for part in product.parts):
            return None
        return self._kernels.pack(product.room, tuple(self._low_rank(part, file) for part in product.parts))

    def _low_rank(self, part: ProductPart, file: AdapterFile) -> LowRank | None:
        """Return what the adapter adds to a part; None: nothing. Raises RequestError for values that are none."""
        stated = file.parts.get(part.name)
        if stated is None:
            return None
        down, up = file.factors(part.name, self._spec)
        up = up.float() * stated.scale
        for name, factor in (("lora_A", down), ("lora_B", up)):
            if not bool(torch.isfinite(factor.to(self._dtype)).all()):
                raise RequestError(
                    f"{file.path}: {name} of {part.name} has values that are no finite numbers in "
                    f"{str(self._dtype).removeprefix('torch.')}"
                )
        return part.low_rank(down, up)
