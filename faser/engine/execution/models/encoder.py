"""Encoder: the forward of encoders, whose rows attend to all rows of their text, over one backend's operations.

A batch is the rows of several texts side by side, without padding. Keys and values lie in a cache with room for
one layer, which the layers use in turn; a row sees to the end of its text instead of to itself
(RowLayout.seen_to). The residual stream is float32; products and attention compute in dtype. Spec and names:
checkpoints/encoders/.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.checkpoints.encoders.spec import EncoderLayer, EncoderSpec
from faser.engine.execution.models.rope import rotary_angles
from faser.errors import ConfigError
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.encoders import EncoderKernels
from faser.kernels.interface.kv_cache import KvShape
from faser.kernels.interface.shapes import AttentionPlan, AttentionShape, PackedLinear, RowLayout

_BLOCK = 16  # rows of a block of the cache


@dataclass(frozen=True, slots=True)
class Norm:
    """A LayerNorm. weight, bias: [H] float32; bias: None: there is none."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderLayerWeights:
    """Products and norms of a layer. attention_norm: None: the layer has none."""

    qkv: PackedLinear
    attention_out: PackedLinear
    attention_norm: Norm | None
    up: PackedLinear
    down: PackedLinear
    network_norm: Norm


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderWeights:
    """word: [V, H] as stored. positions: [P, H] float32, that of token type 0 included; None: they are rotary.

    second_type: [H] float32, by how much type 1 differs from type 0; None: tokens have one type. first_type: [H]
    float32, of models without positions; None: it is in positions, or tokens have no type.
    """

    word: Tensor
    positions: Tensor | None
    first_type: Tensor | None
    second_type: Tensor | None
    embedding_norm: Norm
    layers: tuple[EncoderLayerWeights, ...]
    last_norm: Norm | None
    num_bytes: int


class TextRows:
    """The rows of a batch of texts. token_ids: [R]. counts: [N] rows of each text. seconds: [N], see Pooling."""

    def __init__(self, token_ids: Sequence[int], counts: Sequence[int], seconds: Sequence[int | None]) -> None:
        self.token_ids = torch.tensor(token_ids, dtype=torch.int64)
        self.counts = np.array(counts, dtype=np.int32)
        self.starts = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(self.counts, out=self.starts[1:])
        self.positions = np.arange(len(token_ids), dtype=np.int32) - self.starts[:-1].repeat(self.counts)
        self.seconds = seconds

    def layout(self, reach: int | None) -> RowLayout:
        """Lay the rows out for attention that reaches so far in both directions; None: over the whole text."""
        last = (self.counts - 1).repeat(self.counts)
        seen_to = last if reach is None else np.minimum(self.positions + reach, last)
        blocks = -(-self.counts // _BLOCK)
        firsts = np.cumsum(blocks, dtype=np.int32) - blocks
        table = firsts[:, None] + np.arange(blocks.max(), dtype=np.int32)
        arrays = (self.starts, self.counts, self.positions, table.astype(np.int32), seen_to.astype(np.int32))
        starts, lengths, positions, block_table, seen = map(torch.from_numpy, arrays)
        return RowLayout(
            query_start=starts, seq_len=lengths, positions=positions, block_table=block_table, seen_to=seen
        )

    def second_rows(self) -> NDArray[np.int64]:
        """Return the rows whose tokens have type 1: those of the second texts of pairs."""
        found = [
            np.arange(start + second, end)
            for start, end, second in zip(self.starts, self.starts[1:], self.seconds, strict=False)
            if second is not None
        ]
        return np.concatenate(found).astype(np.int64) if found else np.zeros(0, np.int64)


class Encoder:
    """An encoder with buffers for max_rows rows of at most max_texts texts, each of at most max_positions tokens.

    Raises ConfigError as allocate_kv does.
    """

    def __init__(
        self,
        spec: EncoderSpec,
        backend: Backend,
        weights: EncoderWeights,
        dtype: torch.dtype,
        *,
        max_rows: int,
        max_texts: int,
        max_positions: int,
    ) -> None:
        self.spec, self.backend, self.weights, self.dtype = spec, backend, weights, dtype
        self._kernels = _kernels_of(backend)
        heads, width, size = spec.num_heads, spec.head_dim, spec.hidden_size
        cache = KvShape(
            heads=((heads, width),),
            num_blocks=-(-max_rows // _BLOCK) + max_texts,
            block_size=_BLOCK,
            dtype=dtype,
        )
        self._cache = backend.allocate_kv(cache)
        self._shape = AttentionShape(num_heads=heads, num_kv_heads=heads, head_dim=width, scale=width**-0.5)
        self._angles = {
            rope: rotary_angles(rope, head_dim=width, num_positions=max_positions).to(backend.device)
            for rope in {each.rope for each in spec.layers}
            if rope is not None
        }

        def room(columns: int, of: torch.dtype = dtype) -> Tensor:
            return torch.empty((max_rows, columns), dtype=of, device=backend.device)

        self._hidden = room(size, torch.float32)
        is_wide = dtype is torch.float32 and not spec.pre_norm
        self._x = self._hidden if is_wide else room(size)  # what products read
        self._qkv, self._mixed, self._inner = room(3 * size), room(size), room(spec.intermediate_size)
        self._gate_up = room(2 * spec.intermediate_size) if spec.gated else self._inner

    @torch.inference_mode()
    def forward(self, texts: TextRows) -> Tensor:
        """Return the states of all rows after the last layer, [R, H] float32; valid until the next call."""
        rows, spec, weights = len(texts.token_ids), self.spec, self.weights
        hidden, x = self._hidden[:rows], self._x[:rows]
        self._embed(texts, hidden)
        self._norm(weights.embedding_norm, hidden, wide=hidden, out=x)
        plans = {
            reach: self.backend.plan(texts.layout(reach), _BLOCK) for reach in {each.reach for each in spec.layers}
        }
        for layer, of_layer in zip(weights.layers, spec.layers, strict=True):
            if spec.pre_norm:
                if layer.attention_norm is not None:
                    self._norm(layer.attention_norm, hidden, wide=None, out=x)
                self._attend(layer, of_layer, plans[of_layer.reach], x, hidden)
                self._norm(layer.network_norm, hidden, wide=None, out=x)
                self._network(layer, x, hidden)
            else:
                self._attend(layer, of_layer, plans[of_layer.reach], x, hidden)
                assert layer.attention_norm is not None, "every layer has a norm behind attention"
                self._norm(layer.attention_norm, hidden, wide=hidden, out=x)
                self._network(layer, x, hidden)
                self._norm(layer.network_norm, hidden, wide=hidden, out=x)
        if weights.last_norm is not None:
            self._norm(weights.last_norm, hidden, wide=hidden, out=None)
        return hidden

    def _embed(self, texts: TextRows, hidden: Tensor) -> None:
        """Write the sum of what a token, its position and its type give, [R, H]."""
        weights, device = self.weights, self.backend.device
        hidden.copy_(weights.word[texts.token_ids.to(device)])
        if weights.positions is not None:
            hidden += weights.positions[torch.from_numpy(texts.positions).to(device)]
        if weights.first_type is not None:
            hidden += weights.first_type
        if weights.second_type is not None and len(second := texts.second_rows()):
            hidden[torch.from_numpy(second).to(device)] += weights.second_type

    def _attend(
        self, layer: EncoderLayerWeights, spec: EncoderLayer, plan: AttentionPlan, x: Tensor, hidden: Tensor
    ) -> None:
        """Add attention of x to the stream."""
        rows, backend = len(x), self.backend
        shape = self._shape if spec.reach is None else replace(self._shape, window=spec.reach + 1)
        qkv = backend.linear(x, layer.qkv, self._qkv[:rows])
        angles = None if spec.rope is None else self._angles[spec.rope]
        queries = backend.rope_append(qkv, angles, self._cache, 0, shape, plan)
        mixed = backend.attend(queries, self._cache, 0, shape, plan, self._mixed[:rows])
        backend.linear(mixed, layer.attention_out, hidden, residual=hidden)

    def _network(self, layer: EncoderLayerWeights, x: Tensor, hidden: Tensor) -> None:
        """Add the feed-forward network of x to the stream."""
        rows, inner = len(x), self._inner[: len(x)]
        up = self.backend.linear(x, layer.up, self._gate_up[:rows])
        if self.spec.gated:
            self.backend.gate(up, inner, self.spec.activation)
        else:
            self._kernels.activate(inner, self.spec.activation)
        self.backend.linear(inner, layer.down, hidden, residual=hidden)

    def _norm(self, norm: Norm, x: Tensor, *, wide: Tensor | None, out: Tensor | None) -> None:
        if out is not None and wide is not None and out.data_ptr() == wide.data_ptr():
            out = None
        self._kernels.layer_norm(x, norm.weight, norm.bias, self.spec.norm_eps, wide=wide, out=out)


def _kernels_of(backend: Backend) -> EncoderKernels:
    if (kernels := backend.encoder_kernels) is None:
        raise ConfigError(f"the {backend.name} backend computes no encoders; --backend torch does")
    return kernels
