"""Block drafters, DFlash and DSpark: from the target's hidden states and one token to a whole block of drafts.

    place        0 ............... n - 1 | n        n + 1    n + 2    ...
    rows         context: states of the  | anchor   mask     mask     ...    the block: all rows in one pass
                 target, one row each    |
    drafts       (DSpark)                | x_1      x_2      x_3             the row before the token predicts it
                 (DFlash)                |          x_1      x_2             the row at the token's own place does

A context row has no query: it gives each layer a key and a value, products of its features. The anchor is the
last token of the sequence, whose states there are not yet. Rows of the block see the whole context and each other;
in layers that are causal, only the rows before them. The keys and values of the block's rows stay in the cache
until context rows, or the next block, take their places.

    states of K layers --> fc --> hidden_norm --> features --> keys and values of every layer

    token or mask --> embedding --> layers --> norm --> hidden --> head --> the candidates: the best 16 tokens
    correction of a candidate (DSpark): markov_w2[candidate] · markov_w1[token before]
                            (DFlash 2): successor[candidate] · (predecessor[token before] x projection of hidden)
    confidence (DSpark): the log-odds that a token is accepted, a product of hidden and markov_w1[token before]

DFlash 2 has convolutions in its layers as well (dflash2.py). Sources: z-lab's DFlash and DFlash 2, deepseek-ai's
DSpark (arXiv 2607.05147).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from faser.engine.checkpoints.blocks import BlockSpec
from faser.engine.execution.drafting.blocks.dflash2 import LayerConvolutions
from faser.engine.execution.drafting.loop import on_host
from faser.engine.execution.models.decoder import Buffers
from faser.engine.execution.models.layers import decoder_layer
from faser.engine.execution.models.rope import RotaryTables
from faser.engine.execution.models.weights import LayerWeights
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.block_drafting import BlockRoom, BlockStack
from faser.kernels.interface.blocks import DecoderLayer, DecoderStack, FeedForward, NormedLinear
from faser.kernels.interface.shapes import AttentionPlan, AttentionShape, KvCache, PackedLinear, RowLayout
from faser.optional import maybe, present
from faser.types.arrays import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkovWeights:
    """before: [V, r], of the token before. candidates: [Vd, r], of each row of the logits.

    hidden: [r, H], a product that rows of `before` are multiplied by; None: they stay.
    """

    before: PackedLinear
    candidates: PackedLinear
    hidden: PackedLinear | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWeights:
    """embedding and head may be the target's. num_bytes: of what is not the target's.

    mask: [H], the embedding of the rows behind the anchor; None: that of a token. confidence: weights of hidden
    and of the token before, [H] and [r], and the bias; of a head that does not read the token before, [0].
    convolutions: of each layer; None: there are none.
    """

    embedding: PackedLinear
    fc: PackedLinear
    hidden_norm: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: PackedLinear
    num_bytes: int
    mask: Tensor | None = None
    markov: MarkovWeights | None = None
    confidence: tuple[Tensor, Tensor, Tensor] | None = None
    convolutions: tuple[LayerConvolutions, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRows:
    """Attention of some rows of a block. rows: their numbers in the block; None: all. distance: from their own
    place to the last one that they see."""

    rows: Tensor | None
    plan: AttentionPlan
    distance: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRows:
    """The rows of a pass: of each sequence its context rows, then those of its block.

    context_at, block_at: [C], [B] numbers of these rows. token_ids: [B]. depth: [B], how many rows of its block
    come before a row: none before an anchor. plan: of all rows. own: attention up to each row's own place. seen:
    up to the end of the block. windowed: the same for layers with windows, where a sequence is longer than these.
    """

    context_at: Tensor
    block_at: Tensor
    token_ids: Tensor
    depth: Tensor
    plan: AttentionPlan
    own: tuple[SeenRows, ...]
    seen: tuple[SeenRows, ...]
    windowed: tuple[SeenRows, ...]


def attention_of_blocks(
    backend: Backend, layout: RowLayout, block_size: int, *, causal: bool, apart: bool
) -> tuple[SeenRows, ...]:
    """Plan how the rows of blocks attend, in terms of causal attention. layout: of the rows of the blocks.

    A row that sees the rows behind it is a sequence of its own whose only row is the last one. apart: rows of
    equal distance from the end of their block share a plan, so that a window can begin at their own places.
    """
    if causal:
        return (SeenRows(rows=None, plan=backend.plan(layout, block_size)),)
    alone = rows_alone(layout)
    if not apart:
        return (SeenRows(rows=None, plan=backend.plan(alone, block_size)),)
    distance = alone.positions - layout.positions
    groups = [(each, (distance == each).nonzero()[:, 0]) for each in sorted(set(distance.tolist()))]
    return tuple(
        SeenRows(rows=rows.to(backend.device), plan=backend.plan(_among(alone, rows), block_size), distance=each)
        for each, rows in groups
    )


def rows_alone(layout: RowLayout) -> RowLayout:
    """Return the layout in which each row of these sequences is one of its own, and the last row of it."""
    counts = layout.query_start.diff()
    seq_len = layout.seq_len.repeat_interleave(counts)
    return RowLayout(
        query_start=torch.arange(len(seq_len) + 1, dtype=torch.int32),
        seq_len=seq_len,
        positions=seq_len - 1,
        block_table=layout.block_table.repeat_interleave(counts, dim=0),
    )


def _among(layout: RowLayout, rows: Tensor) -> RowLayout:
    """Return the layout of these sequences of one row each."""
    return RowLayout(
        query_start=layout.query_start[: len(rows) + 1],
        seq_len=layout.seq_len[rows],
        positions=layout.positions[rows],
        block_table=layout.block_table[rows],
    )


class BlockModel:
    """A loaded block drafter. Runs one pass at a time.

    Tensors are on the backend's device, activations in the type of the target's. draft_ids: [Vd] int64, the
    target's token of each row of the logits; None: the same. rotary: see Decoder; places of the cache are its
    positions.
    """

    def __init__(
        self,
        spec: BlockSpec,
        backend: Backend,
        weights: BlockWeights,
        draft_ids: Tensor | None,
        rotary: RotaryTables,
        buffers: Buffers,
    ) -> None:
        self.spec = spec
        self.draft_ids = draft_ids
        self._backend = backend
        self._weights = weights
        self._buffers = buffers
        self._eps = spec.decoder.rms_norm_eps
        self._embedding_scale = float(torch.tensor(spec.decoder.embedding_scale, dtype=buffers.hidden.dtype))
        self._layers = tuple(
            decoder_layer(spec.decoder, number, each, rotary) for number, each in enumerate(weights.layers)
        )
        self._room = BlockRoom(
            inputs=torch.empty_like(buffers.hidden),
            hidden=buffers.hidden,
            layers=buffers.of_layers(len(buffers.hidden)),
            logits=buffers.logits,
        )
        self._drafting_stack = self._stack() if spec.is_plain else None
        windows = present(spec.decoder.windows)
        self.shortest_window = min(windows, default=None)

    @property
    def weight_bytes(self) -> int:
        return self._weights.num_bytes

    @property
    def drafting_stack(self) -> BlockStack | None:
        """Return the weights that BlockDrafting takes; None: it has no steps for what this drafter computes."""
        return self._drafting_stack

    @property
    def draft_room(self) -> BlockRoom:
        """The buffers, which have all rows of a pass."""
        return self._room

    def _stack(self) -> BlockStack | None:
        spec, weights, decoder = self.spec, self._weights, self.spec.decoder
        markov, confidence = weights.markov, weights.confidence
        scales = decoder.embedding_scale != 1.0 or decoder.logit_scale != 1.0 or decoder.logit_cap is not None
        if scales or spec.conv_kernel_size or spec.selector:
            return None
        return BlockStack(
            embedding=weights.embedding,
            mask=weights.mask,
            mask_token=spec.mask_token_id or 0,
            fc=weights.fc,
            hidden_norm=weights.hidden_norm,
            eps=self._eps,
            layers=DecoderStack(layers=self._layers, head=None),
            causal=spec.causal,
            logits=NormedLinear(norm=weights.norm, eps=self._eps, linear=weights.head),
            num_candidates=min(spec.num_candidates, spec.draft_vocab_size),
            draft_ids=maybe(on_host, self.draft_ids),
            predicts_from_anchor=spec.predicts_from_anchor,
            markov=maybe(attrgetter("before", "candidates"), markov),
            confidence=maybe(lambda parts: (*parts[:2], float(parts[2])), confidence),
        )

    def run(self, states: Tensor, rows: BlockRows, cache: KvCache) -> Tensor:
        """Return hidden [B, H] of the rows of the blocks; the keys and values of all rows enter the cache.

        states: [C, K * H] of the context rows; unchanged.
        """
        backend, weights, eps, room = self._backend, self._weights, self._eps, self._buffers
        num_context, num_block = len(rows.context_at), len(rows.block_at)
        num_rows = num_context + num_block
        assert num_rows <= len(room.hidden), "more rows than the buffers hold"
        inputs = self._room.inputs[:num_rows]
        if num_context:
            features = backend.linear(states, weights.fc, room.hidden[:num_context])
            inputs[rows.context_at] = backend.rms_norm(
                features, weights.hidden_norm, eps, room.normed[:num_context]
            )
        hidden = backend.embed(rows.token_ids, weights.embedding, room.hidden[:num_block])
        if self._embedding_scale != 1.0:
            hidden.mul_(self._embedding_scale)
        if weights.mask is not None:
            torch.where((rows.depth > 0)[:, None], weights.mask, hidden, out=hidden)
        scratch, mixed = room.scratch(num_block), room.mixed[:num_block]
        for number, layer in enumerate(self._layers):
            assert layer.qkv is not None
            assert isinstance(layer.shape, AttentionShape)
            assert isinstance(layer.feed_forward, FeedForward)
            convolutions = None if weights.convolutions is None else weights.convolutions[number]
            if num_block:
                normed = backend.rms_norm(hidden, layer.qkv.norm, eps, scratch.normed)
                if convolutions is not None:
                    normed, kernels = convolutions.attention.begin(backend, normed, rows.depth)
                inputs[rows.block_at] = normed
            qkv = backend.linear(inputs, layer.qkv.linear, room.qkv[:num_rows])
            queries = backend.rope_append(
                qkv,
                layer.angles,
                cache,
                number,
                layer.shape,
                rows.plan,
                query_angles=layer.query_angles,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                v_norm=layer.v_norm,
                eps=layer.eps,
            )
            if num_block:
                self._attend(queries[rows.block_at], number, layer, layer.shape, rows, cache, mixed)
                block = layer.feed_forward
                if convolutions is None:
                    backend.blocks.feed_forward(mixed, hidden, block, None, room.qkv, scratch)
                else:
                    convolutions.feed_forward(backend, mixed, hidden, block, kernels, rows.depth, scratch)
        return backend.rms_norm(hidden, weights.norm, eps, hidden) if num_block else hidden

    def _attend(
        self,
        queries: Tensor,
        number: int,
        layer: DecoderLayer,
        shape: AttentionShape,
        rows: BlockRows,
        cache: KvCache,
        mixed: Tensor,
    ) -> None:
        backend, causal = self._backend, self.spec.causal[number]
        if shape.window is None or causal:
            (all_rows,) = rows.own if causal else rows.seen
            backend.attend(queries, cache, number, shape, all_rows.plan, mixed, sinks=layer.sinks)
            return
        whole = replace(shape, window=None)
        for each in rows.windowed:
            if each.rows is None:
                backend.attend(queries, cache, number, whole, each.plan, mixed, sinks=layer.sinks)
                continue
            part, found = queries[each.rows], mixed.new_empty((len(each.rows), mixed.shape[1]))
            near = replace(shape, window=shape.window + each.distance)
            backend.attend(part, cache, number, near, each.plan, found, sinks=layer.sinks)
            mixed[each.rows] = found

    def candidates(self, hidden: Tensor, anchors: Tensor) -> "Candidates":
        """The best tokens of each row. hidden: [N, H] of rows that predict, draft after draft.

        Corrections and confidences are summed in float64 and rounded to float32: so the order of the sums does not
        matter, and all kernels find the same.

        anchors: [N], the token before the first row of each draft; -1 for other rows.
        """
        room, weights = self._buffers.logits, self._weights
        best = []
        for first in range(0, len(hidden), len(room)):
            part = hidden[first : first + len(room)]
            logits = self._backend.linear(part, weights.head, room[: len(part)])
            best.append(logits.topk(min(self.spec.num_candidates, logits.shape[1]), dim=-1))
        scores, columns = torch.cat([each.values for each in best]), torch.cat([each.indices for each in best])
        if (scale := self.spec.decoder.logit_scale) != 1.0:
            scores.mul_(scale)
        if (cap := self.spec.decoder.logit_cap) is not None:
            scores.div_(cap).tanh_().mul_(cap)
        token_ids = columns if self.draft_ids is None else self.draft_ids.take(columns)
        pairs = confidences = given = None
        if weights.markov is not None:
            before = torch.where(anchors[:, None] < 0, token_ids.roll(1, 0), anchors[:, None])
            given = self._rows(weights.markov.before, before)
            if weights.markov.hidden is not None:
                out = hidden.new_empty((len(hidden), self.spec.markov_rank))
                given *= self._backend.linear(hidden, weights.markov.hidden, out).to(given)[:, None]
            pairs = torch.bmm(self._rows(weights.markov.candidates, columns), given.mT).float()
        if weights.confidence is not None:
            of_hidden, of_before, bias = weights.confidence
            found = (hidden.double() @ of_hidden.double() + bias)[:, None].expand(scores.shape)
            if given is not None and len(of_before):
                found = found + given @ of_before.double()
            confidences = found.float()
        return Candidates(scores=scores, token_ids=token_ids, pairs=pairs, confidences=confidences)

    def _rows(self, packed: PackedLinear, token_ids: Tensor) -> Tensor:
        """Return these rows of a matrix: [N, C, r] float64. token_ids: [N, C]."""
        rank, dtype = self.spec.markov_rank, self._buffers.hidden.dtype
        out = torch.empty((token_ids.numel(), rank), dtype=dtype, device=self._backend.device)
        self._backend.embed(token_ids.flatten().contiguous(), packed, out)
        return out.double().view(*token_ids.shape, rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The C best tokens of N rows. scores: [N, C] float32, falling. token_ids: [N, C], of the target.

    What comes before a row is one of the candidates of the row before, or an anchor, which stands for all of them.
    pairs: [N, C, C] float32, what to add to a candidate's score behind each of those; None: nothing. confidences:
    [N, C] float32, log-odds that the row's token is accepted behind each of those; None: the drafter does not
    estimate them.
    """

    scores: Tensor
    token_ids: Tensor
    pairs: Tensor | None
    confidences: Tensor | None


def block_rows(
    backend: Backend,
    model: BlockModel,
    layout: RowLayout,
    context: Sequence[int],
    token_ids: Ints,
    block_size: int,
) -> BlockRows:
    """The rows of a pass. layout: of all of them. context: how many of each sequence are context rows.

    token_ids: [B] of the rows of the blocks.
    """
    starts = layout.query_start.numpy()
    counts = np.diff(starts)
    place = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)  # of a row among those of its sequence
    behind = place - np.repeat(np.asarray(context, dtype=np.int64), counts)
    at = np.flatnonzero(behind >= 0)
    block_at = torch.from_numpy(at)
    blocks = torch.from_numpy(counts - np.asarray(context))
    own = RowLayout(
        query_start=torch.cat((torch.zeros(1, dtype=torch.int32), blocks.cumsum(0).int())),
        seq_len=layout.seq_len,
        positions=layout.positions[block_at],
        block_table=layout.block_table,
    )

    def attention(*, causal: bool = False, apart: bool = False) -> tuple[SeenRows, ...]:
        return attention_of_blocks(backend, own, block_size, causal=causal, apart=apart) if len(at) else ()

    window, causal = model.shortest_window, model.spec.causal
    longest = int(layout.seq_len.max())
    seen = () if all(causal) else attention()
    return BlockRows(
        context_at=torch.from_numpy(np.flatnonzero(behind < 0)).to(backend.device),
        block_at=block_at.to(backend.device),
        token_ids=torch.from_numpy(token_ids).to(backend.device),
        depth=torch.from_numpy(behind[at]).to(backend.device),
        plan=backend.plan(layout, block_size),
        own=attention(causal=True) if any(causal) else (),
        seen=seen,
        windowed=attention(apart=True) if window is not None and longest > window and seen else seen,
    )
