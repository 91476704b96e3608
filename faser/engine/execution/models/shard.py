"""A shard: the part of a model that one of several ranks holds (tensor parallelism).

    q, k, v; gate, up      rows: whole heads, and channels of the feed-forward networks
    o; down                the columns that multiply what these rows give; so every rank has a part of each sum
    biases of o and down   the first rank's; zero on the others
    head                   rows: as many tokens on each rank
    all else               whole, on every rank

Key-value heads go to ranks whole, with the query heads that read them; where ranks are more than heads, several
ranks hold the same head and share its queries. Channels go in pieces of up to 256, so that no block of a low-bit
format is cut. Parts may differ in size by one head, or one piece. Knows no files and no backend.

Source: Shoeybi et al. (Megatron-LM), arXiv:1909.08053, section 3.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from faser.engine.checkpoints.families.architecture import AttentionSpec, DecoderSpec, ExpertsSpec, LayerSpec
from faser.engine.execution.models import tensors
from faser.engine.execution.models.adapted import PackedProduct, ProductPart
from faser.engine.execution.models.tensors import Shape
from faser.engine.execution.models.weights import WeightSource
from faser.errors import ConfigError, ModelError
from faser.kernels.interface.fp8 import Fp8Rows
from faser.kernels.interface.low_bit.rows import LowBitRows
from faser.types.arrays import Ints

QuantisedRows = TypeVar("QuantisedRows", Fp8Rows, LowBitRows)

_PIECE = 256  # channels of a network that stay together, if there are enough pieces for all ranks


@dataclass(frozen=True, slots=True)
class Span:
    """Places first … last - 1."""

    first: int
    last: int

    @property
    def size(self) -> int:
        return self.last - self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """rank: 0 … size - 1."""

    rank: int
    size: int

    def span(self, count: int, piece: int = 1) -> Span:
        """This rank's part of count places, in pieces; earlier ranks have the pieces that are left over."""
        pieces = count // piece
        each, more = divmod(pieces, self.size)
        first = self.rank * each + min(self.rank, more)
        return Span(piece * first, piece * (first + each + (self.rank < more)))

    def tokens(self, vocab_size: int) -> Span:
        """The head's rows of this rank: as many on each, so the last parts may overlap."""
        width = self.head_rows(vocab_size)
        first = min(self.rank * width, vocab_size - width)
        return Span(first, first + width)

    def head_rows(self, vocab_size: int) -> int:
        return -(-vocab_size // self.size)

    def heads(self, attention: AttentionSpec) -> tuple[Span, Span]:
        """Query heads and key-value heads. Raises ConfigError for heads that cannot be shared out."""
        num_heads, num_kv = attention.num_heads, attention.num_kv_heads
        group = num_heads // num_kv  # query heads that read one key-value head
        if self.size <= num_kv:
            kv = self.span(num_kv)
            return Span(kv.first * group, kv.last * group), kv
        if self.size % num_kv or group % (self.size // num_kv):
            raise ConfigError(
                f"tensor_parallel_size is {self.size}; the model has {num_heads} heads on {num_kv} key-value "
                f"heads, which go to at most {num_kv} ranks, or to a multiple of that which shares out the "
                f"{group} queries of each"
            )
        queries = self.span(num_heads)
        head = queries.first // group
        return queries, Span(head, head + 1)

    def channels(self, size: int) -> Span:
        """Return this rank's channels of a network of `size`. Raises ConfigError for more ranks than channels."""
        if self.size > size:
            raise ConfigError(f"tensor_parallel_size is {self.size}; a network of the model has {size} channels")
        piece = _PIECE
        while size % piece or size // piece < self.size:
            piece //= 2
        return self.span(size, piece)


def local_spec(spec: DecoderSpec, shard: Shard) -> DecoderSpec:
    """The decoder that this rank computes, but for its head. Raises ConfigError naming what cannot be split."""
    alone = f"tensor_parallel_size is {shard.size}, it must be 1"
    if spec.has_states:
        raise ConfigError(f"the model has recurrent states, which ranks cannot share; {alone}")
    if spec.normalises_values:
        raise ConfigError(
            f"the model normalises the values of attention, as Gemma 4 does; ranks cannot share it; {alone}"
        )
    if any(each.gated for each in spec.attentions):
        raise ConfigError(f"the model gates its attention, which ranks cannot share; {alone}")
    return replace(
        spec, layers=tuple(_local_layer(each, shard) for each in spec.layers), tie_word_embeddings=False
    )


def _local_layer(layer: LayerSpec, shard: Shard) -> LayerSpec:
    attention = _shared_out(layer)
    if attention.wide_qk_norm:
        raise ConfigError(
            f"tensor_parallel_size is {shard.size}; this model normalises all its query heads together, which "
            "ranks cannot do apart"
        )
    queries, keys = shard.heads(attention)
    network = layer.feed_forward
    return replace(
        layer,
        attention=replace(attention, num_heads=queries.size, num_kv_heads=keys.size),
        feed_forward=replace(network, size=shard.channels(network.size).size),
    )


def _shared_out(layer: LayerSpec) -> AttentionSpec:
    assert isinstance(layer.attention, AttentionSpec), "local_spec refuses mixers"
    return layer.attention


def local_shapes(spec: DecoderSpec, shard: Shard) -> dict[str, Shape]:
    """Return the shapes of this rank's parts, as tensors.tensor_shapes does. spec: of the whole model."""
    shapes = tensors.tensor_shapes(local_spec(spec, shard))
    return shapes | {tensors.HEAD: (shard.head_rows(spec.vocab_size), spec.hidden_size)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Part of a tensor. rows: which, in order; None: all. columns: None: all. of_first: zero but on rank 0."""

    rows: Ints | None = None
    columns: Span | None = None
    of_first: bool = False


_WHOLE = _Part()


class ShardedSource:
    """A WeightSource of one rank's parts. spec: of the whole model, whose tensors source gives."""

    def __init__(self, source: WeightSource, spec: DecoderSpec, shard: Shard) -> None:
        self._source = source
        self._shapes = tensors.tensor_shapes(spec)
        self._is_first = shard.rank == 0
        self._ties = spec.tie_word_embeddings
        self._parts = _parts(spec, shard)

    def names(self) -> Sequence[str]:
        names = list(self._source.names())
        return [*names, tensors.HEAD] if self._ties and tensors.HEAD not in names else names

    def get(self, name: str) -> Tensor:
        """Raises ModelError where the whole tensor has another shape than the spec's."""
        part, stored = self._parts.get(name, _WHOLE), self._stored(name)
        found = self._source.get(stored)
        self._check(stored, found.shape)
        if part.of_first and not self._is_first:
            return torch.zeros_like(found)
        if part.rows is not None:
            found = found[torch.from_numpy(part.rows)]
        return found if part.columns is None else found[:, part.columns.first : part.columns.last]

    def cut(self, give: Callable[[str], QuantisedRows | None]) -> Callable[[str], QuantisedRows | None]:
        """The same parts of the quantised tensors that `give` returns by name.

        The function raises ConfigError for columns that cut a block of a low-bit format.
        """

        def cut(name: str) -> QuantisedRows | None:
            part, stored = self._parts.get(name, _WHOLE), self._stored(name)
            found = give(stored)
            if found is None:
                return None
            self._check(stored, found.shape)
            if part.rows is not None:
                found = found.take(part.rows)
            if part.columns is None:
                return found
            try:
                return found.take_columns(part.columns.first, part.columns.last)
            except ConfigError as error:
                raise ConfigError(f"tensor_parallel_size does not fit {stored}: {error}") from None

        return cut

    def _stored(self, name: str) -> str:
        return tensors.EMBEDDING if self._ties and name == tensors.HEAD else name

    def _check(self, name: str, found: Sequence[int]) -> None:
        expected = self._shapes.get(name)
        if expected is not None and tuple(found) != expected:
            raise ModelError(f"tensor {name} has shape {list(found)}; the config asks for {list(expected)}")


def whole_products(
    products: Sequence[PackedProduct], spec: DecoderSpec, shard: Shard
) -> tuple[PackedProduct, ...]:
    """Return the products of this rank's part, with their rows and columns in the whole tensors.

    spec: of the whole model.
    """
    shapes, parts = tensors.tensor_shapes(spec), _parts(spec, shard)

    def whole(part: ProductPart) -> ProductPart:
        cut, (rows, columns) = parts.get(f"{part.name}.weight", _WHOLE), shapes[f"{part.name}.weight"]
        found = part.rows if cut.rows is None else cut.rows if part.rows is None else cut.rows[part.rows]
        span = None if cut.columns is None else (cut.columns.first, cut.columns.last)
        return ProductPart(name=part.name, shape=(rows, columns), rows=found, columns=span)

    return tuple(replace(each, parts=tuple(map(whole, each.parts))) for each in products)


def _parts(spec: DecoderSpec, shard: Shard) -> dict[str, _Part]:
    """Return this rank's part of each tensor that it does not have whole."""
    tokens = shard.tokens(spec.vocab_size)
    found = {tensors.HEAD: _Part(rows=_places(tokens))}
    for number, layer in enumerate(spec.layers):
        prefix = tensors.layer_prefix(number)
        found |= {prefix + name: part for name, part in _layer_parts(spec, layer, shard).items()}
    return found


def _layer_parts(spec: DecoderSpec, layer: LayerSpec, shard: Shard) -> dict[str, _Part]:
    attention, network, names = _shared_out(layer), layer.feed_forward, spec.names
    queries, keys = shard.heads(attention)
    width = attention.head_dim
    of_queries, of_keys = _places(queries, width), _places(keys, width)
    if names.fused_qkv:
        after = attention.q_size, attention.q_size + attention.kv_size
        rows = {"qkv_proj": np.concatenate((of_queries, after[0] + of_keys, after[1] + of_keys))}
    else:
        rows = {"q_proj": of_queries, "k_proj": of_keys, "v_proj": of_keys}
    parts = {f"self_attn.{name}": _Part(rows=each) for name, each in rows.items()}
    parts["self_attn.o_proj"] = _Part(columns=Span(queries.first * width, queries.last * width))
    channels = shard.channels(network.size)
    of_network, down = _Part(rows=_places(channels)), _Part(columns=channels)
    if isinstance(network, ExpertsSpec):
        gate, up, last = names.expert_parts
        for number in range(network.num_experts):
            expert = names.expert.format(number)
            parts |= {expert + gate: of_network, expert + up: of_network, expert + last: down}
    elif len(names.gate_up) == 1:
        both = np.concatenate((_places(channels), network.size + _places(channels)))
        parts |= {names.gate_up[0]: _Part(rows=both), names.down: down}
    else:
        parts |= dict.fromkeys(names.gate_up, of_network) | {names.down: down}
    found = {tensors.SINKS: _Part(rows=_places(queries))}
    for name, part in parts.items():
        found[f"{name}.weight"] = part
        found[f"{name}.bias"] = _Part(of_first=True) if part.columns else part
    return found


def _places(span: Span, width: int = 1) -> Ints:
    """The places of a span of heads of this width."""
    return np.arange(span.first * width, span.last * width, dtype=np.int64)
