"""Gemma 4's assistant: a head that attends to the target's keys and values, and stores none.

    position      … n - 2      n - 1          n
    token                                    x_n, which the next step computes
    target        keys, values of all        |
                               state ------> pass 1 --> x_{n+1};  pass 2 --> x_{n+2};  …   all of them at n

A pass joins the scaled embedding of a token with hidden values as wide as the target: first the target's state
behind its final norm, then the assistant's own output. All passes of a draft have the position n and see the
positions before it, so only queries are computed, and a draft leaves nothing that would have to be rolled back.

    token --> the target's embedding --.
                                       |--> pre_projection --> layers --> norm --> logits
    hidden ----------------------------'                                   `--> post_projection --> hidden

With centroids a row computes the logits of the tokens in its best groups alone; the others get one less than the
smallest of these.

Source: Gemma4AssistantForCausalLM of transformers. Its generation takes the key at n from the last verification
where there was one, and lets a window of W see W + 1 positions before n; here x_n has no key yet, and a window is
that of the target's layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from faser.engine.checkpoints.assistant import AssistantSpec
from faser.engine.contract.plan import DraftPlan, DraftRequest, SequenceStart
from faser.engine.execution.drafting.drafter import Proposals, by_slot
from faser.engine.execution.drafting.head_memory import HiddenStates
from faser.engine.execution.drafting.heads.head import HeadRunner
from faser.engine.execution.drafting.heads.vocabulary import WHOLE
from faser.engine.execution.drafting.loop import DraftInput, PassLoop, rows_of
from faser.engine.execution.drafting.samplers import DraftSampler
from faser.engine.execution.models.decoder import Buffers, Decoder
from faser.engine.execution.models.layers import decoder_layer
from faser.engine.execution.models.rope import RotaryTables
from faser.engine.execution.models.sources import SafetensorsSource, rounded_rows
from faser.engine.execution.models.tensors import EMBEDDING, FINAL_NORM, HEAD, Shape, layer_prefix, layer_shapes
from faser.engine.execution.models.weights import ByteProgress, Packer, check_names, no_rows
from faser.engine.execution.runner.batch import BlockTable, RowBatch
from faser.errors import ModelError
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.blocks import DecoderLayer, DecoderStack, DraftRoom
from faser.kernels.interface.shapes import AttentionPlan, AttentionShape, KvCache, PackedLinear, RowLayout
from faser.optional import present
from faser.types.arrays import Ints

_BEFORE, _BEHIND = "pre_projection.weight", "post_projection.weight"
_CENTROIDS, _ORDER = "masked_embedding.centroids.weight", "masked_embedding.token_ordering"


class CentroidHead:
    """The product of the logits, of the tokens in the best groups alone.

    centroids: packed, [C, d]. rows: [C, V / C, d], the tokens' rows by group. order: [C, V / C], their ids.
    """

    def __init__(self, backend: Backend, centroids: PackedLinear, rows: Tensor, order: Tensor, top_k: int) -> None:
        self._backend, self._centroids, self._rows, self._order, self._top_k = (
            backend, centroids, rows, order, top_k
        )  # fmt: skip

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Fill out, [N, V] float32, for hidden [N, d]."""
        scores = torch.empty((len(hidden), len(self._rows)), device=hidden.device)
        self._backend.linear(hidden, self._centroids, scores)
        best = scores.topk(self._top_k, dim=-1).indices
        rows = self._rows.index_select(0, best.view(-1)).view(len(hidden), -1, hidden.shape[1])
        found = torch.bmm(rows, hidden[:, :, None]).squeeze(-1).float()
        out.copy_((found.amin(dim=-1, keepdim=True) - 1).expand_as(out))
        return out.scatter_(1, self._order[best].flatten(1), found)


class AssistantHead:
    """Head of Gemma 4's assistant. `run` returns the next pass's hidden values and the logits', side by side."""

    drafting_stack = None
    draft_ids = None
    vocabulary = WHOLE

    def __init__(
        self,
        spec: AssistantSpec,
        backend: Backend,
        target: Decoder,
        packer: Packer,
        head: PackedLinear | CentroidHead,
        rotary: RotaryTables,
        *,
        max_rows: int,
        max_logit_rows: int,
    ) -> None:
        decoder, width = spec.decoder, spec.target_hidden_size
        self.spec = spec
        self._backend, self._target, self._head = backend, target, head
        self._scale = float(torch.tensor(target.spec.embedding_scale, dtype=target.dtype))
        self._before, self._behind = packer.layer_product(_BEFORE), packer.layer_product(_BEHIND)
        self._norm = packer.norm(FINAL_NORM)
        layers = (packer.layer(layer_prefix(at), layer, decoder) for at, layer in enumerate(decoder.layers))
        self._stack = DecoderStack(
            layers=tuple(_one_ahead(decoder_layer(decoder, at, each, rotary)) for at, each in enumerate(layers)),
            head=None,
        )
        self.weight_bytes = packer.packed_bytes
        self._buffers = Buffers.allocate(
            decoder, target.dtype, backend.device, max_rows=max_rows, max_logit_rows=max_logit_rows
        )

        def rows(columns: int) -> Tensor:
            return torch.empty((max_rows, columns), dtype=target.dtype, device=backend.device)

        self._features, self._joined = rows(width), rows(2 * width)
        self._embedded, self._out = rows(width), rows(width + decoder.hidden_size)

    def read_from(self, cache: KvCache) -> None:
        """Attend to the keys and values in the target's cache. To be called before the first run."""
        layers = tuple(replace(each, lent=cache) for each in self._stack.layers)
        self._stack = replace(self._stack, layers=layers)

    def draft_room(self, rows: int) -> DraftRoom:
        raise AssertionError(f"no call drafts {rows} rows with an assistant")

    def features(self, states: Tensor) -> Tensor:
        target = self._target
        room = self._features[: len(states)]
        return self._backend.rms_norm(states, target.ends.final_norm, target.spec.rms_norm_eps, room)

    def run(self, token_ids: Tensor, features: Tensor, cache: KvCache, plan: AttentionPlan) -> Tensor:
        """See Head. plan: of a row at n - 1 for each sequence, which sees 0 … n - 1; of the target's blocks.

        features: what features returned, or rows of what run did.
        """
        backend, target, spec = self._backend, self._target, self.spec
        rows, width = len(token_ids), spec.target_hidden_size
        embedded = backend.embed(token_ids, target.ends.embedding, self._embedded[:rows])
        embedded.mul_(self._scale)
        joined, buffers = self._joined[:rows], self._buffers
        joined[:, width:].copy_(features[:, :width])
        joined[:, :width].copy_(embedded)
        hidden = backend.linear(joined, self._before, buffers.hidden[:rows])
        backend.layers.run(self._stack, 0, len(self._stack.layers), hidden, cache, plan, buffers.of_layers(rows))
        out = self._out[:rows]
        backend.rms_norm(hidden, self._norm, spec.decoder.rms_norm_eps, hidden)
        out[:, :width].copy_(backend.linear(hidden, self._behind, self._embedded[:rows]))
        out[:, width:].copy_(hidden)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        room = self._buffers.logits[: len(hidden)]
        own = hidden[:, self.spec.target_hidden_size :].contiguous()
        if isinstance(self._head, CentroidHead):
            return self._head.logits(own, room)
        return self._backend.linear(own, self._head, room)


def _one_ahead(layer: DecoderLayer) -> DecoderLayer:
    """The layer at the position behind the row's: the row at n - 1 sees what a query at n sees before itself."""
    assert layer.angles is not None, "layers of Gemma 4 rotate"
    assert isinstance(layer.shape, AttentionShape), "layers of Gemma 4 attend"
    window = layer.shape.window
    return replace(
        layer,
        angles=layer.angles[1:],
        query_angles=None if layer.query_angles is None else layer.query_angles[1:],
        shape=replace(layer.shape, window=None if window is None else window - 1),
    )


def load_assistant(
    directory: Path,
    spec: AssistantSpec,
    target: Decoder,
    backend: Backend,
    *,
    max_positions: int,
    max_rows: int,
    max_logit_rows: int,
    quantization: str | None = None,
    progress: ByteProgress = lambda *_: None,
) -> AssistantHead:
    """Load the assistant in a directory; arguments and errors as of load_head."""
    source = SafetensorsSource(directory)
    shapes = assistant_shapes(spec)
    unread = (*spec.decoder.names.not_read, HEAD, _ORDER)
    check_names(source, shapes, lambda name: name.startswith(unread) or (name == EMBEDDING))
    packer = Packer(
        source,
        shapes,
        backend,
        target.dtype,
        progress,
        blocks=no_rows if quantization is None else lambda name: rounded_rows(source, quantization, name),
    )
    head: PackedLinear | CentroidHead
    if (centroids := spec.centroids) is None:
        head = packer.product(EMBEDDING)
    else:
        size = spec.decoder.vocab_size
        order = source.get(_ORDER).to(torch.int64)
        if not torch.equal(order.sort().values, torch.arange(size)):
            raise ModelError(f"{directory}: {_ORDER} is no order of the {size} tokens")
        rows = source.get(EMBEDDING)[order].to(target.dtype).view(centroids.count, -1, spec.hidden_size)
        head = CentroidHead(
            backend,
            packer.product(_CENTROIDS),
            rows.to(backend.device),
            order.view(centroids.count, -1).to(backend.device),
            centroids.top_k,
        )
        packer.packed_bytes += rows.nbytes
    return AssistantHead(
        spec,
        backend,
        target,
        packer,
        head,
        RotaryTables(spec.decoder, num_positions=max_positions + 1, device=backend.device),
        max_rows=max_rows,
        max_logit_rows=max_logit_rows,
    )


def assistant_shapes(spec: AssistantSpec) -> dict[str, Shape]:
    """Every tensor that is packed; products are [out, in]."""
    decoder, width = spec.decoder, spec.target_hidden_size
    size = decoder.hidden_size
    shapes: dict[str, Shape] = {_BEFORE: (size, 2 * width), _BEHIND: (width, size), FINAL_NORM: (size,)}
    for at, layer in enumerate(decoder.layers):
        shapes |= {layer_prefix(at) + name: shape for name, shape in layer_shapes(decoder, layer).items()}
    if spec.centroids is None:
        return shapes | {EMBEDDING: (decoder.vocab_size, size)}
    return shapes | {_CENTROIDS: (spec.centroids.count, size)}


class AssistantDrafter:
    """Drafter that runs Gemma 4's assistant on the target's KV cache. table: the target's blocks."""

    drafts_overlapped = False  # it needs the states of the tokens that it continues

    def __init__(
        self, runner: HeadRunner, table: BlockTable, states: HiddenStates, sampler: DraftSampler, method: str
    ) -> None:
        self._loop = PassLoop(_AssistantPasses(runner, table, states), sampler)
        self._states = states
        self._method = method
        self._known: dict[int, tuple[int, int]] = {}  # of each slot: how many tokens, and the last one

    def start(self, start: SequenceStart) -> None:
        self._known[start.slot] = len(start.token_ids), start.token_ids[-1]
        self._states.start(start.slot)

    def propose(self, plan: DraftPlan, until: Callable[[], bool] | None = None, /) -> Proposals:
        found = [self._input(each) for each in plan.requests]
        drafting = [at for at, each in enumerate(found) if each is not None]
        batch = self._loop.draft(present(found), plan.stop, until)
        return Proposals(table=batch.table(plan, self._method, drafting), passes=batch.passes, probs=batch.probs)

    def commit(self, slots: Sequence[int], counts: Sequence[int], token_ids: Sequence[int]) -> None:
        for slot, tokens in by_slot(slots, counts, token_ids):
            self._known[slot] = self._known[slot][0] + len(tokens), tokens[-1]

    def release(self, slot: int) -> None:
        self._known.pop(slot, None)
        self._states.release(slot)

    def _input(self, request: DraftRequest) -> DraftInput | None:
        """None: the state of the last computed token is not there."""
        assert not request.unverified, f"slot {request.slot}: an assistant continues no unverified tokens"
        num_known, token_id = self._known[request.slot]
        last = num_known - 2  # position of the last computed token
        pieces = self._states.pieces(request.slot, last)
        if len(pieces) != 1 or pieces[0].end != last + 1:
            return None
        return DraftInput(
            slot=request.slot,
            start=last,
            token_ids=[token_id],
            max_tokens=request.max_tokens,
            shift=1,
            states=pieces,
        )


class _AssistantPasses:
    """The Passes of an assistant: every further one has the rows of the first."""

    def __init__(self, runner: HeadRunner, table: BlockTable, states: HiddenStates) -> None:
        self.table = table
        self._runner = runner
        self._states = states
        self._layout: RowLayout  # of the pass before
        self._hidden = torch.empty(0)

    def first(self, inputs: Sequence[DraftInput]) -> tuple[Tensor, int]:
        batch = rows_of(inputs, self.table)
        states = self._states.gather([piece for each in inputs for piece in each.states])
        self._layout, self._hidden = batch.layout, self._runner.read(batch, states)
        return self._runner.logits_of(self._hidden), 1

    def further(self, batch: RowBatch, sources: Ints) -> Tensor:
        layout, rows = self._layout, torch.from_numpy(sources)
        if len(sources) < len(self._hidden):
            layout = self._layout = RowLayout(
                query_start=torch.arange(len(sources) + 1, dtype=torch.int32),
                seq_len=layout.seq_len[rows],
                positions=layout.positions[rows],
                block_table=layout.block_table[rows],
                slots=np.array(layout.slots)[sources].tolist(),
            )
            self._hidden = self._hidden.index_select(0, rows.to(self._hidden.device))
        self._hidden = self._runner.draft(replace(batch, layout=layout), self._hidden)
        return self._runner.logits_of(self._hidden)
