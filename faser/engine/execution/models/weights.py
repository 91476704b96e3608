"""The weights of a decoder, packed for one backend, and how they are read from a checkpoint.

Products of the same input are fused into one. Tensors are read one at a time and dropped once they are packed, so
memory peaks at the packed weights and one fused product. A WeightSource gives the tensors.
"""

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from faser.engine.checkpoints.families.architecture import (
    AttentionSpec,
    DecoderSpec,
    DenseSpec,
    ExpertsSpec,
    LayerSpec,
    MixerSpec,
    TensorNames,
)
from faser.engine.execution.models import tensors
from faser.engine.execution.models.adapted import PackedProduct, ProductPart
from faser.engine.execution.models.mixers import mixer_kind
from faser.engine.execution.models.mixers.kind import MixerWeights
from faser.errors import ModelError
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.fp8 import FP8, Fp8Rows, stack_rows
from faser.kernels.interface.low_bit.rows import LowBitRows, can_stack, stack_low_bit
from faser.kernels.interface.shapes import PackedLinear
from faser.types.arrays import Ints

ByteProgress = Callable[[int, int], None]  # (bytes done, bytes in all), counted in the dtype of the activations
StoredRows = Callable[[str], Fp8Rows | None]  # a quantised tensor as it is stored; None: it is not quantised
StoredBlocks = Callable[[str], LowBitRows | None]  # a tensor in its blocks; None: it has none that are multiplied
Quantise = Callable[[Tensor], Fp8Rows]

_log = logging.getLogger("faser")
_MOST_NAMED = 3  # names of tensors in one error


def no_rows(_name: str) -> None:
    """Return None, as a checkpoint that stores no tensor quantised."""


class WeightSource(Protocol):
    """The tensors of a checkpoint, under the names of tensors.py."""

    def names(self) -> Sequence[str]: ...

    def get(self, name: str) -> Tensor:
        """One tensor: any float dtype, on the CPU or on the backend's device. The caller must not write to it.

        Raises ModelError if it cannot be read.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkWeights:
    """gate_up: gate, then up."""

    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsWeights:
    """router: in the type of the activations, whatever other weights have. experts: in their order.

    shared: which every row passes, and then the last row of the router is its gate; None: there is none.
    choice_bias: float32 [E]; None: there is none.
    """

    router: PackedLinear
    experts: tuple[NetworkWeights, ...]
    shared: NetworkWeights | None
    choice_bias: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsBesideWeights:
    """A mixture beside a dense network. Norms and router_scale: float32 [H]; scales: float32 [E]."""

    experts: ExpertsWeights
    router_scale: Tensor
    scales: Tensor
    norm: Tensor
    norm_after: Tensor
    norm_after_network: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLayerWeights:
    """Weights by which a layer takes its part of the inputs that tokens give. norm: float32 [H]."""

    gate: PackedLinear
    out: PackedLinear
    norm: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWeights:
    """Weights of the inputs that tokens give to all layers. norm: float32 [P]."""

    embedding: PackedLinear
    product: PackedLinear
    norm: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """qkv: queries, keys, values stacked, and behind them the gates of gated attention; or the mixer's product.

    Norms: float32 [H]; q_norm and k_norm [D], or of all heads together. mixer: None: the layer has attention.

    input_norm: None in the first layer of some heads, never in a decoder. Another norm that is None is absent.
    sinks: float32 [Hq]; None: there are none. scale: what the layer's results are multiplied by.
    """

    input_norm: Tensor | None
    qkv: PackedLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    sinks: Tensor | None
    attention_out: PackedLinear
    norm_after_attention: Tensor | None
    post_norm: Tensor
    network: NetworkWeights | ExpertsWeights
    norm_after: Tensor | None
    mixer: MixerWeights | None = None
    beside: ExpertsBesideWeights | None = None
    token_inputs: TokenLayerWeights | None = None
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """embedding and head are one object if the model ties them. num_bytes: of all packed weights.

    products: those of the layers, experts and inputs of tokens included.
    """

    embedding: PackedLinear
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: PackedLinear
    num_bytes: int
    products: tuple[PackedProduct, ...]
    token_inputs: TokenWeights | None = None


def pack_weights(
    source: WeightSource,
    spec: DecoderSpec,
    backend: Backend,
    dtype: torch.dtype,
    progress: ByteProgress,
    *,
    stored: StoredRows = no_rows,
    quantise: Quantise | None = None,
    blocks: StoredBlocks = no_rows,
    shapes: Mapping[str, tensors.Shape] | None = None,
) -> DecoderWeights:
    """Read every tensor of the spec, cast it to dtype and pack it.

    stored: gives those products of the layers that are packed as they are stored. quantise: quantises the other
    products of the layers, on the backend's device; None: they keep the dtype. Embedding and head are never
    quantised here: their rows are looked up, and an error of the head goes into the tokens directly. blocks: gives
    low-bit weights, embedding and head included, which are packed as they are; a product of which one part is
    none, or whose parts have different act-order permutations, is dequantised. shapes: of the tensors that source
    gives; None: those of the spec.

    Raises ModelError that names tensors that are missing, unexpected or of another shape; names are checked before
    anything is packed.
    """
    shapes = shapes or tensors.tensor_shapes(spec)
    check_names(source, shapes, lambda name: tensors.ignorable(name, spec))
    packer = Packer(source, shapes, backend, dtype, progress, stored=stored, quantise=quantise, blocks=blocks)
    embedding = packer.product(tensors.EMBEDDING)
    token_inputs = None if spec.token_inputs is None else packer.token_inputs()
    layers = tuple(
        packer.layer(tensors.layer_prefix(number), layer, spec) for number, layer in enumerate(spec.layers)
    )
    plus_one = spec.plus_one and spec.plus_one_last
    final_norm = packer.norm(spec.names.final_norm, plus_one=plus_one) * spec.logit_scale
    head = embedding if spec.tie_word_embeddings else packer.product(tensors.HEAD)
    return DecoderWeights(
        embedding=embedding,
        layers=layers,
        final_norm=final_norm,
        head=head,
        num_bytes=packer.packed_bytes,
        products=tuple(packer.products),
        token_inputs=token_inputs,
    )


class Packer:
    """Reads and packs tensors in the order of the calls. packed_bytes: of the weights packed so far.

    products: of the layers so far. shapes: of every tensor that may be asked for. The other arguments: see
    pack_weights.
    """

    def __init__(
        self,
        source: WeightSource,
        shapes: Mapping[str, tensors.Shape],
        backend: Backend,
        dtype: torch.dtype,
        progress: ByteProgress,
        *,
        stored: StoredRows = no_rows,
        quantise: Quantise | None = None,
        blocks: StoredBlocks = no_rows,
    ) -> None:
        self.packed_bytes = 0
        self.products: list[PackedProduct] = []
        self._source = source
        self._shapes = shapes
        self._backend = backend
        self._dtype = dtype
        self._progress = progress
        self._stored = stored
        self._quantise = quantise
        self._blocks = blocks
        self._done_bytes = 0
        self._total_bytes = sum(map(math.prod, shapes.values())) * dtype.itemsize

    def layer(self, prefix: str, layer: LayerSpec, spec: DecoderSpec) -> LayerWeights:
        """A layer of the spec; channels of query and key heads in the order of tensors.head_order."""
        names, attention = spec.names, layer.attention

        def stack(*names: str, orders: Sequence[Ints | None] = ()) -> PackedLinear:
            return self.layer_product(*(f"{prefix}{name}.weight" for name in names), orders=orders)

        def norm(name: str, order: Ints | None = None) -> Tensor | None:
            name = f"{prefix}{name}.weight"
            return self.norm(name, plus_one=spec.plus_one, order=order) if name in self._shapes else None

        def network(spec: DenseSpec | ExpertsSpec) -> NetworkWeights | ExpertsWeights:
            if isinstance(spec, DenseSpec):
                return NetworkWeights(gate_up=stack(*names.gate_up), down=stack(names.down))
            return mixture(spec)

        def mixture(spec: ExpertsSpec) -> ExpertsWeights:
            has_shared = spec.shared_size > 0
            gates = (names.router, names.shared_gate) if has_shared else (names.router,)
            return ExpertsWeights(
                router=self.floats(*(f"{prefix}{name}" for name in gates)),
                experts=tuple(expert(names.expert.format(number)) for number in range(spec.num_experts)),
                shared=expert(names.shared_expert) if has_shared else None,
                choice_bias=self.norm(f"{prefix}{names.choice_bias}") if spec.choice_bias else None,
            )

        def expert(of: str) -> NetworkWeights:
            gate, up, down = (f"{prefix}{of}{part}.weight" for part in names.expert_parts)
            low_bit = self._backend.has_low_bit_experts
            return NetworkWeights(
                gate_up=self.layer_product(gate, up, low_bit=low_bit),
                down=self.layer_product(down, low_bit=low_bit),
            )

        def beside(spec: ExpertsSpec) -> ExpertsBesideWeights:
            norms = (tensors.NORM_BEFORE_EXPERTS, tensors.NORM_AFTER_EXPERTS, tensors.NORM_AFTER_NETWORK)
            before, after, after_network = (self.norm(f"{prefix}{name}.weight") for name in norms)
            return ExpertsBesideWeights(
                experts=mixture(spec),
                router_scale=self.norm(f"{prefix}{tensors.ROUTER_SCALE}"),
                scales=self.norm(f"{prefix}{tensors.EXPERT_SCALES}"),
                norm=before,
                norm_after=after,
                norm_after_network=after_network,
            )

        def of_tokens() -> TokenLayerWeights:
            gate, out = (self.layer_product(f"{prefix}{name}") for name in (tensors.TOKEN_GATE, tensors.TOKEN_OUT))
            return TokenLayerWeights(
                gate=gate, out=out, norm=self.norm(f"{prefix}{tensors.NORM_AFTER_TOKEN}.weight")
            )

        post_norm = norm(names.norm_before_feed_forward)
        assert post_norm is not None, "every layer normalises before its feed-forward network"
        of_norms: list[Ints | None] = [None, None]
        mixer, sinks, out = None, None, names.attention_out
        if isinstance(attention, MixerSpec):
            kind = mixer_kind(attention)
            mixer, out = kind.pack(attention, spec, prefix, self), kind.out
            qkv = mixer.product
        else:
            order = tensors.head_order(attention)
            turning = (attention.num_heads, attention.num_kv_heads)
            of_norms = [_rows_of_heads(order, heads) if attention.wide_qk_norm else order for heads in turning]
            qkv = self._qkv(prefix, attention, order, names)
            sinks = self.norm(f"{prefix}{tensors.SINKS}") if attention.sinks else None
        return LayerWeights(
            input_norm=norm(names.norm_before_attention),
            qkv=qkv,
            q_norm=norm(names.q_norm, of_norms[0]),
            k_norm=norm(names.k_norm, of_norms[1]),
            sinks=sinks,
            attention_out=stack(out),
            norm_after_attention=norm(names.norm_after_attention) if layer.norms_after else None,
            post_norm=post_norm,
            network=network(layer.feed_forward),
            norm_after=norm(names.norm_after_feed_forward) if layer.norms_after else None,
            mixer=mixer,
            beside=None if layer.experts is None else beside(layer.experts),
            token_inputs=None if spec.token_inputs is None else of_tokens(),
            scale=float(self.norm(f"{prefix}{tensors.SCALE}")) if layer.scaled else 1.0,
        )

    def _qkv(
        self, prefix: str, attention: AttentionSpec, order: Ints | None, tensor_names: TensorNames
    ) -> PackedLinear:
        """order: of the channels of query and key heads; see tensors.head_order."""
        heads = (attention.num_heads, attention.num_kv_heads)
        gate, prefix = f"{prefix}{tensor_names.attention_gate}.weight", f"{prefix}self_attn."
        if tensor_names.fused_qkv:
            orders = (_rows_of_heads(order, *heads, others=attention.kv_size),)
            return self.layer_product(f"{prefix}qkv_proj.weight", orders=orders)
        names = [f"{prefix}{each}_proj.weight" for each in "q" + tensors.kv_products(attention)]
        queries, keys = (_rows_of_heads(order, count) for count in heads)
        if not attention.gated:
            return self.layer_product(*names, orders=(queries, keys, None)[: len(names)])
        if tensor_names.attention_gate:
            return self.layer_product(*names, gate, orders=(queries, keys, None, None))
        of_heads = np.arange(2 * attention.q_size).reshape(heads[0], 2, -1)  # rows of q_proj: a query, its gate
        of_queries, gates = of_heads[:, 0], of_heads[:, 1].reshape(-1)
        queries = (of_queries if order is None else of_queries[:, order]).reshape(-1)
        return self.layer_product(*names, names[0], orders=(queries, keys, None, gates))

    def convolution(self, name: str) -> Tensor:
        """The weights of a causal convolution of each channel, [kernel, channels] float32."""
        stored = self._stacked((name,), dtype=torch.float32).to(self._backend.device)
        self.packed_bytes += stored.nbytes
        return stored[:, 0].t().contiguous()

    def token_inputs(self) -> TokenWeights:
        return TokenWeights(
            embedding=self.product(tensors.TOKEN_EMBEDDING),
            product=self.product(tensors.TOKEN_PRODUCT),
            norm=self.norm(tensors.TOKEN_NORM),
        )

    def floats(self, *names: str, orders: Sequence[Ints | None] = ()) -> PackedLinear:
        """A product of the named weights, stacked, that no setting quantises; with biases if the spec has them."""
        orders = orders or (None,) * len(names)
        biases = [f"{name}.bias" for name in names]
        bias = self._stacked(biases, orders) if biases[0] in self._shapes else None
        packed = self.pack(self._stacked([f"{name}.weight" for name in names], orders), bias)
        return self._noted(packed, names, orders)

    def product(self, name: str) -> PackedLinear:
        """The product of a weight outside the layers: without a bias, never quantised to fp8 here."""
        return self.pack(self._low_bit((name,)) or self._stacked((name,)), None)

    def layer_product(self, *names: str, orders: Sequence[Ints | None] = (), low_bit: bool = True) -> PackedLinear:
        """One product of the named weights, stacked, with their biases if the spec has them.

        orders: of the rows of each, of which some may be left out; None, as all are where there are none: as they
        are stored. low_bit: weights in blocks stay so; False: they are dequantised.
        """
        orders = orders or (None,) * len(names)
        packed = self._layer_product(names, orders, low_bit=low_bit)
        return self._noted(packed, [name.removesuffix(".weight") for name in names], orders)

    def _noted(self, packed: PackedLinear, names: Sequence[str], orders: Sequence[Ints | None]) -> PackedLinear:
        """Return a product after noting what it is stacked from. names: without `.weight`."""
        parts = tuple(
            ProductPart(name=name, shape=_matrix(self._shapes[f"{name}.weight"]), rows=order)
            for name, order in zip(names, orders, strict=True)
        )
        self.products.append(PackedProduct(linear=packed, parts=parts))
        return packed

    def _layer_product(
        self, names: Sequence[str], orders: Sequence[Ints | None], *, low_bit: bool
    ) -> PackedLinear:
        biases = tuple(f"{name.removesuffix('.weight')}.bias" for name in names)
        bias = self._stacked(biases, orders) if biases[0] in self._shapes else None
        quantised = self._stored_rows(names, orders) or (self._low_bit(names, orders) if low_bit else None)
        if quantised is not None:
            return self.pack(quantised, bias)
        weight = self._stacked(names, orders)
        if self._quantise is not None:
            return self.pack(self._quantise(weight.to(self._backend.device)), bias)
        return self.pack(weight, bias)

    def norm(self, name: str, *, plus_one: bool = False, order: Ints | None = None) -> Tensor:
        """A vector, such as the weight of a norm, float32. plus_one: one is added. order: of its values."""
        norm = self._stacked((name,), (order,), torch.float32).to(self._backend.device)
        self.packed_bytes += norm.nbytes
        return norm + 1 if plus_one else norm

    def pack(self, weight: Tensor | Fp8Rows | LowBitRows, bias: Tensor | None = None) -> PackedLinear:
        """A weight that need not be of the source."""
        packed = self._backend.pack(weight, bias)
        if isinstance(weight, LowBitRows):
            self.packed_bytes += packed.num_bytes  # packed codes may be wider than those of the file
        else:
            self.packed_bytes += weight.nbytes if isinstance(weight, Tensor) else weight.num_bytes
            self.packed_bytes += 0 if bias is None else bias.nbytes
        return packed

    def _stored_rows(self, names: Sequence[str], orders: Sequence[Ints | None]) -> Fp8Rows | None:
        """The named weights as they are stored, stacked; None: they are not quantised.

        Raises ModelError if some of them are quantised and others are not.
        """
        found = [self._stored(name) for name in names]
        parts = [part for part in found if part is not None]
        if not parts:
            return None
        for name, part, order in zip(names, found, orders, strict=True):
            if part is None:
                others = ", ".join(other for other in names if other != name)
                raise ModelError(
                    f"tensor {name} is not quantised, and of one product with {others}; it must be too"
                )
            self._read(name, part.values.shape, order)
        return stack_rows(
            [part if order is None else part.take(order) for part, order in zip(parts, orders, strict=True)]
        )

    def _low_bit(self, names: Sequence[str], orders: Sequence[Ints | None] = (None,)) -> LowBitRows | None:
        """The named weights in their blocks, stacked; None: one of them has none."""
        found = [self._blocks(name) for name in names]
        parts = [part for part in found if part is not None]
        if len(parts) < len(found):
            return None
        if not can_stack(parts):
            _log.warning(
                "%s use different act-order permutations and cannot be fused; dequantising them", ", ".join(names)
            )
            return None
        for name, part, order in zip(names, parts, orders, strict=True):
            self._read(name, part.shape, order)
        return stack_low_bit(
            [part if order is None else part.take(order) for part, order in zip(parts, orders, strict=True)]
        )

    def _stacked(
        self,
        names: Sequence[str],
        orders: Sequence[Ints | None] = (None,),
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """A new tensor of the named ones, stacked, on the device of the first one. dtype: None: the target's."""
        shapes = [self._shapes[name] for name in names]
        counts = [shape[0] if order is None else len(order) for shape, order in zip(shapes, orders, strict=True)]
        size = (sum(counts), *shapes[0][1:])
        stacked: Tensor | None = None
        first = 0
        for name, count, order in zip(names, counts, orders, strict=True):
            found = self._source.get(name)
            if found.dtype is FP8 or not found.dtype.is_floating_point:
                stored = str(found.dtype).removeprefix("torch.")
                raise ModelError(f"tensor {name} is {stored}; it has no scales, or the config does not say so")
            self._read(name, found.shape, order)
            if stacked is None:
                stacked = torch.empty(size, dtype=dtype or self._dtype, device=found.device)
            stacked[first : first + count].copy_(found if order is None else found[torch.from_numpy(order)])
            first += count
        assert stacked is not None, "no tensors to stack"
        return stacked

    def _read(self, name: str, found: Sequence[int], order: Ints | None = None) -> None:
        """Count a tensor's rows as done. found: its shape. Raises ModelError if that is not the spec's."""
        shape = self._shapes[name]
        if tuple(found) != shape:
            raise ModelError(f"tensor {name} has shape {list(found)}; the config asks for {list(shape)}")
        rows = found[0] if order is None else len(order)
        self._done_bytes += rows * math.prod(found[1:]) * self._dtype.itemsize
        # Keys are read once more where they are the values too.
        self._progress(min(self._done_bytes, self._total_bytes), self._total_bytes)


def _rows_of_heads(order: Ints | None, *heads: int, others: int = 0) -> Ints | None:
    """The order of a weight's rows: those of `heads` heads, each in that order, then `others` as they are."""
    if order is None:
        return None
    rows = (np.arange(sum(heads))[:, None] * len(order) + order).reshape(-1)
    return np.concatenate((rows, len(rows) + np.arange(others)))


def _matrix(shape: tensors.Shape) -> tuple[int, int]:
    rows, columns = shape
    return rows, columns


def check_names(source: WeightSource, expected: Collection[str], ignorable: Callable[[str], bool]) -> None:
    """Raises ModelError unless the checkpoint has exactly the expected tensors, apart from ignorable ones."""
    found = set(source.names())
    if missing := [name for name in expected if name not in found]:
        raise ModelError(f"the checkpoint lacks {_listed('tensor', missing)}")
    unexpected = sorted(name for name in found if name not in expected and not ignorable(name))
    if unexpected:
        raise ModelError(f"the checkpoint has {_listed('tensor', unexpected)}, which its config does not describe")


def _listed(noun: str, names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMED])
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{noun}{'s' if len(names) > 1 else ''} {shown}{more}"
