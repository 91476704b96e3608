"""The decoder: from token ids to logits, over the rows of one step, on one backend.

Owns the packed weights and the activation buffers, which every step overwrites; only sums with experts in single
operations, and those over ranks, take memory of their own (kernels/interface/forward.py). Calls only the backend.
Knows neither files nor model families, neither sequences nor sampling.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.execution.models import tensors
from faser.engine.execution.models.adapted import AdaptedProduct, AdapterSizes, adapted_layer
from faser.engine.execution.models.layers import decoder_layer, layer_shape
from faser.engine.execution.models.rope import RotaryTables
from faser.engine.execution.models.weights import DecoderWeights, TokenWeights
from faser.kernels.interface.adapters import AdaptedLinear, AdapterRows
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.blocks import (
    BlockBuffers,
    DecoderStack,
    LayerBuffers,
    NormedLinear,
    columns_of,
)
from faser.kernels.interface.collectives import Collectives
from faser.kernels.interface.forward import SeparateBlocks, SeparateLayers
from faser.kernels.interface.mixers import StateStep
from faser.kernels.interface.shapes import AttentionPlan, AttentionShape, KvCache, PackedLinear, RowLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """Activations of a step, on the backend's device; every step overwrites them. R: the most rows of a step.

    hidden, normed: [R, H]; qkv, mixed, rates: see LayerBuffers; gate_up: [R, 2 F]; inner: [R, F];
    logits: [max_logit_rows, V] float32. states: [R, K * H], of the K state_layers, ascending, side by side;
    state layer i is the residual stream before layer i, num_layers that after the last one. logits_part: the
    columns of a rank's own tokens; None: there are no other ranks. token_inputs: [R, L, 2 P], of each layer room
    for P channels, then what the row's token gives the layer; token_room: [R, L P]. None: tokens give nothing.
    """

    hidden: Tensor
    normed: Tensor
    qkv: Tensor
    mixed: Tensor
    gate_up: Tensor
    inner: Tensor
    logits: Tensor
    states: Tensor
    state_layers: tuple[int, ...] = ()
    logits_part: Tensor | None = None
    rates: Tensor | None = None
    token_inputs: Tensor | None = None
    token_room: Tensor | None = None

    def scratch(self, rows: int, adapted: AdapterRows | None = None) -> BlockBuffers:
        """The parts that hold numbers within a layer."""
        return BlockBuffers(
            normed=self.normed[:rows], gate_up=self.gate_up[:rows], inner=self.inner[:rows], adapted=adapted
        )

    def of_layers(self, rows: int, adapted: AdapterRows | None = None) -> LayerBuffers:
        """The parts that layers use. adapted: see BlockBuffers."""
        return LayerBuffers(
            qkv=self.qkv[:rows],
            mixed=self.mixed[:rows],
            block=self.scratch(rows, adapted),
            rates=None if self.rates is None else self.rates[:rows],
        )

    @classmethod
    def allocate(
        cls,
        spec: DecoderSpec,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_rows: int,
        max_logit_rows: int,
        state_layers: tuple[int, ...] = (),
        head_rows: int | None = None,
    ) -> "Buffers":
        """head_rows: the tokens that a rank's head knows; None: all, there are no other ranks."""

        def rows(width: int) -> Tensor:
            return torch.empty((max_rows, width), dtype=dtype, device=device)

        def logits(width: int) -> Tensor:
            return torch.empty((max_logit_rows, width), dtype=torch.float32, device=device)

        shapes = [layer_shape(each.attention, spec) for each in spec.layers]
        inner = spec.inner_size
        rates = max((each.rate_columns for each in shapes if not isinstance(each, AttentionShape)), default=0)
        width = 0 if spec.token_inputs is None else spec.num_layers * spec.token_inputs.size
        return cls(
            hidden=rows(spec.hidden_size),
            normed=rows(spec.hidden_size),
            qkv=rows(max(each.columns for each in shapes)),
            mixed=rows(max(each.q_size for each in shapes)),
            rates=torch.empty((max_rows, rates), dtype=torch.float32, device=device) if rates else None,
            gate_up=rows(2 * inner),
            inner=rows(inner),
            logits=logits(spec.vocab_size),
            logits_part=None if head_rows is None else logits(head_rows),
            states=rows(len(state_layers) * spec.hidden_size),
            state_layers=state_layers,
            token_inputs=rows(2 * width).view(max_rows, spec.num_layers, -1) if width else None,
            token_room=rows(width) if width else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderEnds:
    """Weights that a head may share with its target. final_norm: [H]. head: None: it is divided among ranks."""

    embedding: PackedLinear
    final_norm: Tensor
    head: PackedLinear | None


class Decoder:
    """A loaded model. It runs one step at a time: concurrent lanes need a Decoder each.

    rotary: on the backend's device; positions of a step are among its own. ranks: weights are one rank's part of
    the model's, and spec says how many heads and channels that is; None: they are all. adapters: to make room for;
    None: the model has none. Then, and in steps without them, its products are those of the model as it is.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        backend: Backend,
        weights: DecoderWeights,
        rotary: RotaryTables,
        buffers: Buffers,
        ranks: Collectives | None = None,
        adapters: AdapterSizes | None = None,
    ) -> None:
        self.spec = spec
        self.dtype = buffers.hidden.dtype
        self._backend = backend
        self._weights = weights
        self._buffers = buffers
        width = spec.hidden_size
        captured = {
            layer: buffers.states[:, i * width : (i + 1) * width] for i, layer in enumerate(buffers.state_layers)
        }
        self._last_states = captured.get(spec.num_layers)
        self._ranks = ranks
        self._blocks = backend.blocks if ranks is None else SeparateBlocks(backend, ranks)
        self._layers = backend.layers if ranks is None else SeparateLayers(backend, self._blocks)
        self._head = NormedLinear(norm=weights.final_norm, eps=spec.rms_norm_eps, linear=weights.head)
        self._stack = DecoderStack(
            layers=tuple(
                decoder_layer(
                    spec,
                    number,
                    weights.layers[number],
                    rotary,
                    states=captured.get(number),
                    inputs=None if buffers.token_inputs is None else buffers.token_inputs[:, number],
                )
                for number in range(spec.num_layers)
            ),
            head=self._head,
        )
        self.adapted: tuple[AdaptedProduct, ...] = ()
        self._adapted_stack: DecoderStack | None = None
        if adapters is not None:
            self._adapted_stack, self.adapted = self._with_adapters(adapters)
        # Rounded as the model's own code rounds it: to the type of the embeddings that it multiplies.
        self._embedding_scale = float(torch.tensor(spec.embedding_scale, dtype=self.dtype))
        self._embedding_norm: Tensor | None = None
        if spec.normed_embedding:
            self._embedding_norm = torch.ones(spec.hidden_size, device=backend.device)
        self._token_norm = None if weights.token_inputs is None else weights.token_inputs.norm * 0.5**0.5

    def _with_adapters(self, sizes: AdapterSizes) -> tuple[DecoderStack, tuple[AdaptedProduct, ...]]:
        """Return the layers with adapted products, and these in the order of the layers."""
        parts = {id(each.linear): each.parts for each in self._weights.products}
        found: list[AdaptedProduct] = []

        def adapt(linear: PackedLinear) -> AdaptedLinear:
            of = parts[id(linear)]
            first, last = of[0].columns or (0, of[0].shape[1])
            widths = tuple(each.num_rows for each in of)
            room = self._backend.adapters.room(
                widths, last - first, self.dtype, slots=sizes.slots, max_rank=sizes.max_rank
            )
            found.append(AdaptedProduct(parts=of, room=room))
            return AdaptedLinear(base=linear, room=room)

        layers = tuple(adapted_layer(each, adapt) for each in self._stack.layers)
        return DecoderStack(layers=layers, head=self._head), tuple(found)

    @property
    def num_parameters(self) -> int:
        return tensors.num_parameters(self.spec)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all packed weights."""
        return self._weights.num_bytes

    @property
    def separate_layers(self) -> int:
        """Return how many layers run in single operations on a backend that has one call for whole layers."""
        return len(self._layers.separate(self._stack))

    @property
    def ends(self) -> DecoderEnds:
        weights = self._weights
        head = weights.head if self._ranks is None else None
        return DecoderEnds(embedding=weights.embedding, final_norm=weights.final_norm, head=head)

    @property
    def hidden(self) -> Tensor:
        """Return the buffer [max_rows, H] whose first rows embed returns."""
        return self._buffers.hidden

    @property
    def states(self) -> Tensor:
        """Return the buffer [max_rows, K * H] of captured states; K is 0 where no head reads any."""
        return self._buffers.states

    @property
    def logit_rows(self) -> Tensor:
        """Return the buffer [max_logit_rows, V] float32 whose first rows logits returns."""
        return self._buffers.logits

    def embed(self, token_ids: Tensor) -> Tensor:
        """Start a step. token_ids: [R] int64. Returns hidden [R, H], valid until the next embed."""
        rows, hidden = token_ids.shape[0], self._buffers.hidden
        assert rows <= hidden.shape[0], "more rows than the buffers hold"
        embedded = self._backend.embed(token_ids, self._weights.embedding, hidden[:rows])
        if self._embedding_norm is not None:
            self._backend.rms_norm(embedded, self._embedding_norm, self.spec.rms_norm_eps, embedded)
        if self._embedding_scale != 1.0:
            embedded.mul_(self._embedding_scale)
        if self._weights.token_inputs is not None:
            self._give_inputs(token_ids, embedded, self._weights.token_inputs)
        return embedded

    def _give_inputs(self, token_ids: Tensor, embedded: Tensor, weights: TokenWeights) -> None:
        """Compute the layers' inputs by token: (norm(product(x) / √H) + √P embedding(token)) / √2, x [R, H]."""
        buffers, rows, hidden_size = self._buffers, token_ids.shape[0], self.spec.hidden_size
        assert buffers.token_inputs is not None, "a model whose tokens give inputs has room for them"
        assert buffers.token_room is not None, "a model whose tokens give inputs has room for them"
        assert self._token_norm is not None, "a model whose tokens give inputs normalises them"
        size = self._token_norm.shape[0]
        room = buffers.token_room[:rows]
        inputs = buffers.token_inputs[:rows].view(-1, 2 * size)[:, size:]
        self._backend.embed(token_ids, weights.embedding, room)
        torch.mul(room.view(-1, size), (size / 2) ** 0.5, out=inputs)
        self._backend.linear(embedded, weights.product, room)
        # The root of H goes into eps, that of 2 into the norm.
        eps = self.spec.rms_norm_eps * hidden_size
        self._backend.rms_norm(room.view(-1, size), self._token_norm, eps, inputs, residual=inputs)

    def keep_rows(self, rows: Tensor) -> None:
        """Between two layers: of what embed gave later layers only these rows are needed. rows: [N], ascending."""
        if (inputs := self._buffers.token_inputs) is not None:
            inputs[: len(rows)].copy_(inputs.index_select(0, rows))

    @property
    def adapts(self) -> bool:
        """Return whether rows may have adapters."""
        return self._adapted_stack is not None

    def adapter_rows(self, layout: RowLayout) -> AdapterRows | None:
        """Return whose rows have which adapter, for run_layers; None: no row has one, or the model has none."""
        if self._adapted_stack is None or layout.adapters is None:
            return None
        return self._backend.adapters.rows(layout)

    def run_layers(
        self,
        hidden: Tensor,
        first: int,
        last: int,
        cache: KvCache,
        plan: AttentionPlan,
        *,
        captures: bool = False,
        state_step: StateStep | None = None,
        adapted: AdapterRows | None = None,
    ) -> Tensor:
        """Run layers first … last - 1 over hidden [R, H], in place; their keys and values enter the cache.

        plan: of the layout of these rows. captures: copy the rows of those state layers that are reached to the
        first rows of states. state_step: where recurrent states go on, in a model that has any. adapted: of
        adapter_rows. Returns hidden.
        """
        rows, room = hidden.shape[0], self._buffers.of_layers(hidden.shape[0], adapted)
        stack = self._stack if adapted is None else self._adapted_stack
        assert stack is not None, "rows have adapters in a model that has room for them"
        if first < last:
            self._layers.run(
                stack, first, last, hidden, cache, plan, room, captures=captures, state_step=state_step
            )
        if captures and last == self.spec.num_layers and self._last_states is not None:
            self._last_states[:rows].copy_(hidden)
        return hidden

    def fill_cache(self, num_rows: int, cache: KvCache, plan: AttentionPlan) -> None:
        """Store random keys and values for the rows of a step in all layers. Computes nothing else."""
        qkv = self._buffers.qkv[:num_rows]
        qkv.normal_(generator=torch.Generator(qkv.device).manual_seed(num_rows))
        for number, layer in enumerate(self._stack.layers):
            if not isinstance(layer.shape, AttentionShape) or layer.shape.reads_other:
                continue
            self._backend.rope_append(
                columns_of(qkv, layer.shape.qkv_size),
                layer.angles,
                cache,
                number,
                layer.shape,
                plan,
                query_angles=layer.query_angles,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                v_norm=layer.v_norm,
                eps=layer.eps,
            )

    def normed(self, hidden: Tensor) -> Tensor:
        """Return hidden [N, H] behind the norm before the head, in new memory."""
        return self._backend.rms_norm(hidden, self._head.norm, self._head.eps, torch.empty_like(hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, V] float32 of any N rows of hidden, [N, H], unchanged; valid until the next call.

        On other ranks than the first one the numbers are arbitrary.
        """
        rows = hidden.shape[0]
        assert rows <= self._buffers.logits.shape[0], "more rows than the logits buffer holds"
        scratch, found = self._buffers.scratch(rows), self._buffers.logits[:rows]
        if self._ranks is None:
            self._blocks.normed_linear(hidden, self._head, found, scratch)
        else:
            self._gather_logits(hidden, found, scratch, self._ranks)
        cap = self.spec.logit_cap
        return found if cap is None else found.div_(cap).tanh_().mul_(cap)

    def _gather_logits(self, hidden: Tensor, whole: Tensor, scratch: BlockBuffers, ranks: Collectives) -> None:
        """Every rank has as many columns; the last ones may be the same as some before (Shard.tokens)."""
        room = self._buffers.logits_part
        assert room is not None, "a rank has room for its part of the logits"
        parts = ranks.gather(self._blocks.normed_linear(hidden, self._head, room[: len(hidden)], scratch))
        width, last = room.shape[1], whole.shape[1] - room.shape[1]
        for rank, part in enumerate(parts or ()):
            first = min(rank * width, last)
            whole[:, first : first + width] = part
