"""Loads an encoder and, of a cross-encoder, its head: tensors of the files, cast, stacked and packed.

The table of words stays as it is stored: its rows are looked up, and it is the larger half of small models.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from faser.engine.checkpoints.encoders import EncoderConfig, checked_names
from faser.engine.checkpoints.encoders.spec import EncoderSpec, tensor_shapes
from faser.engine.execution.models.encoder import Encoder, EncoderLayerWeights, EncoderWeights, Norm
from faser.engine.execution.models.sources import SafetensorsSource
from faser.engine.execution.models.weights import ByteProgress
from faser.errors import ConfigError
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.encoders import ONE_INPUT, EncoderKernels
from faser.kernels.interface.shapes import PackedLinear
from faser.types.pooling import PoolingKind


class Classifier:
    """Head of a cross-encoder, in float32: few rows pass it. kind: which states it reads."""

    def __init__(self, spec: EncoderSpec, reader: "_Reader", backend: Backend, kernels: EncoderKernels) -> None:
        head = spec.classifier
        assert head is not None
        self.kind: PoolingKind = head.kind
        self._spec, self._activation, self._backend, self._kernels = spec, head.activation, backend, kernels
        self._dense = reader.product((head.dense,), torch.float32, bias=head.dense_bias)
        self._out = reader.product((head.out,), torch.float32, bias=True)
        self._norm = None if head.norm is None else reader.norm(head.norm)

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:
        """Return the logits [N, 1] of pooled states [N, H] float32."""
        x = self._backend.linear(states, self._dense, torch.empty_like(states))
        x = x.tanh_() if self._activation is None else ONE_INPUT[self._activation](x)
        if (norm := self._norm) is not None:
            self._kernels.layer_norm(x, norm.weight, norm.bias, self._spec.norm_eps, wide=x, out=None)
        return self._backend.linear(x, self._out, torch.empty((len(x), 1), device=x.device))


def load_encoder(
    directory: Path,
    config: EncoderConfig,
    backend: Backend,
    dtype: torch.dtype,
    *,
    max_rows: int,
    max_texts: int,
    max_positions: int,
    progress: ByteProgress,
) -> tuple[Encoder, Classifier | None]:
    """Load the encoder in a directory. Arguments as in Encoder; progress: as in load_decoder.

    Raises ModelError that names the unusable file or tensor; ConfigError where the backend computes no encoders.
    """
    if (kernels := backend.encoder_kernels) is None:
        raise ConfigError(
            f"{directory} is an encoder; the {backend.name} backend computes none; --backend torch does"
        )
    spec, names = config.spec, config.spec.names
    reader = _Reader(directory, config, backend, progress)
    word = reader.tensor(f"{names.word}.weight")
    word = word.to(backend.device, torch.float32 if word.dtype is torch.float16 else word.dtype, copy=True)
    types = None if names.types is None else reader.wide(f"{names.types}.weight")
    positions = None if names.position is None else reader.wide(f"{names.position}.weight")[spec.first_position :]
    if positions is not None and types is not None:
        positions = positions + types[0]
    layers = tuple(
        EncoderLayerWeights(
            qkv=reader.product(tuple(at + each for each in names.qkv), dtype, bias=spec.qkv_bias),
            attention_out=reader.product((at + names.attention_out,), dtype, bias=spec.out_bias),
            attention_norm=reader.norm(at + names.attention_norm) if layer.has_norm else None,
            up=reader.product(
                tuple(at + each for each in names.up), dtype, bias=spec.up_bias, swaps_halves=names.gate_last
            ),
            down=reader.product((at + names.down,), dtype, bias=spec.down_bias),
            network_norm=reader.norm(at + names.network_norm),
        )
        for number, layer in enumerate(spec.layers)
        for at in (names.layer.format(number),)
    )
    weights = EncoderWeights(
        word=word,
        positions=positions,
        first_type=None if types is None or positions is not None else types[0],
        second_type=None if types is None or len(types) < 2 else types[1] - types[0],
        embedding_norm=reader.norm(names.embedding_norm),
        layers=layers,
        last_norm=None if names.last_norm is None else reader.norm(names.last_norm),
        num_bytes=reader.num_bytes,
    )
    encoder = Encoder(
        spec, backend, weights, dtype, max_rows=max_rows, max_texts=max_texts, max_positions=max_positions
    )
    return encoder, Classifier(spec, reader, backend, kernels) if config.is_classifier else None


class _Reader:
    """Reads tensors by their names in the spec. num_bytes: of what has been kept."""

    def __init__(self, directory: Path, config: EncoderConfig, backend: Backend, progress: ByteProgress) -> None:
        self._names = checked_names(directory, config)
        self._norm_bias = config.spec.norm_bias
        self._source, self._backend, self._progress = SafetensorsSource(directory), backend, progress
        self._total = len(tensor_shapes(config.spec))
        self._done = 0
        self.num_bytes = 0

    def tensor(self, name: str) -> Tensor:
        found = self._source.get(self._names[name])
        self._done += 1
        self._progress(self._done, self._total)
        self.num_bytes += found.nbytes
        return found

    def wide(self, name: str) -> Tensor:
        """Return a tensor in float32 on the device."""
        return self.tensor(name).to(self._backend.device, torch.float32, copy=True)

    def norm(self, name: str) -> Norm:
        return Norm(self.wide(f"{name}.weight"), self.wide(f"{name}.bias") if self._norm_bias else None)

    def product(
        self, names: Sequence[str], dtype: torch.dtype, *, bias: bool, swaps_halves: bool = False
    ) -> PackedLinear:
        """Pack the products of these names, stacked."""

        def stack(ending: str) -> Tensor:
            stacked = torch.cat([self.tensor(f"{name}.{ending}").to(dtype) for name in names])
            return torch.cat(stacked.chunk(2)[::-1]) if swaps_halves else stacked

        return self._backend.pack(stack("weight"), stack("bias") if bias else None)
