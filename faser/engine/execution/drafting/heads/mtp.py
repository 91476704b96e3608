"""The layer of a target's own checkpoint that drafts: multi-token prediction (MTP), as Qwen3.5 has it.

    position           …        p - 1                p                  p + 1
    token                                          x_p                x_{p+1}
    target's states         states of p - 1
                                   \\  features()    |
    row of p                        `------------> run() --> output --> logits() of token p + 1
    row of p + 1                                        `----> run() with x_{p+1}, output as features

The rows are those of an EAGLE-3 head (eagle3.py), the arithmetic of a row is another:

    states --> the target's final norm --> features --> pre_fc_norm_hidden ---.
                                                                              |--> fc --> layer --> norm --> output
    token --> the target's embedding -----------------> pre_fc_norm_embedding-'

In the input of fc the embedding comes first. Logits are the product of the output and the target's head. The layer
attends to the rows before it, with keys and values of its own; it has no recurrent state.

Sources: DeepSeek-V3, arXiv 2412.19437, section 2.2, which takes the states before the final norm; vLLM's
qwen3_5_mtp.py and llama.cpp's qwen35.cpp take them behind it, for the target's and for the layer's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from faser.engine.checkpoints.families.architecture import DecoderSpec, ExpertsSpec
from faser.engine.checkpoints.heads import MTP_PREFIX, HeadSpec
from faser.engine.execution.drafting.heads.eagle3 import HeadBuffers
from faser.engine.execution.drafting.heads.vocabulary import WHOLE, DraftVocabulary, WholeVocabulary
from faser.engine.execution.drafting.heads.weights import rows_of_target
from faser.engine.execution.drafting.loop import on_host
from faser.engine.execution.models.decoder import Decoder
from faser.engine.execution.models.layers import decoder_layer
from faser.engine.execution.models.loader import CheckpointForm, checkpoint_form
from faser.engine.execution.models.rope import RotaryTables
from faser.engine.execution.models.tensors import EMBEDDING, HEAD, Shape, layer_shapes
from faser.engine.execution.models.weights import ByteProgress, LayerWeights, Packer, check_names
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.blocks import DecoderStack, DraftRoom, MtpStack, NormedLinear
from faser.kernels.interface.low_bit.rows import INT8, FloatRows, LowBitRows, stack_low_bit
from faser.kernels.interface.shapes import AttentionPlan, KvCache, PackedLinear
from faser.optional import maybe

_FC = f"{MTP_PREFIX}fc.weight"
_EMBEDDING_NORM = f"{MTP_PREFIX}pre_fc_norm_embedding.weight"
_HIDDEN_NORM = f"{MTP_PREFIX}pre_fc_norm_hidden.weight"
_LAYER = f"{MTP_PREFIX}layers.0."
_NORM = f"{MTP_PREFIX}norm.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpWeights:
    """embedding, final_norm and heads are the target's, heads perhaps only some of its rows.

    heads: the product of the logits, for each size of the vocabulary. num_bytes: of what is not the target's.
    """

    embedding: PackedLinear
    final_norm: Tensor
    embedding_norm: Tensor
    hidden_norm: Tensor
    fc: PackedLinear
    layer: LayerWeights
    norm: Tensor
    heads: tuple[PackedLinear, ...]
    num_bytes: int


class MtpHead:
    """Head that is the target's own layer. rotary: see Decoder; it has the positions of the cache's entries.

    vocabulary: how many of the draft_ids there are now.
    """

    def __init__(
        self,
        spec: HeadSpec,
        backend: Backend,
        weights: MtpWeights,
        draft_ids: Tensor | None,
        rotary: RotaryTables,
        buffers: HeadBuffers,
        vocabulary: WholeVocabulary = WHOLE,
    ) -> None:
        self.spec = spec
        self.draft_ids = draft_ids
        self.vocabulary = vocabulary
        self._backend = backend
        self._weights = weights
        self._buffers = buffers
        self._eps = spec.decoder.rms_norm_eps
        self._stack = DecoderStack(layers=(decoder_layer(spec.decoder, 0, weights.layer, rotary),), head=None)
        whole = MtpStack(
            embedding=weights.embedding,
            embedding_norm=weights.embedding_norm,
            feature_norm=weights.hidden_norm,
            eps=self._eps,
            layers=self._stack,
            logits=NormedLinear(norm=weights.norm, eps=self._eps, linear=weights.heads[-1]),
            norm_output=True,
            draft_ids=maybe(on_host, draft_ids),
            final_norm=weights.final_norm,
            fc=weights.fc,
        )
        self._stacks: tuple[MtpStack, ...] = (whole,)
        if vocabulary.sizes:
            assert draft_ids is not None, "sizes are of a part of the vocabulary"
            ids, self._num_ends = on_host(draft_ids), len(draft_ids) - vocabulary.sizes[-1]
            self._stacks = tuple(
                replace(
                    whole,
                    logits=replace(whole.logits, linear=head),
                    draft_ids=np.concatenate((ids[:size], ids[vocabulary.sizes[-1] :])),
                )
                for size, head in zip(vocabulary.sizes, weights.heads, strict=True)
            )

    @property
    def weight_bytes(self) -> int:
        return self._weights.num_bytes

    @property
    def drafting_stack(self) -> MtpStack:
        return self._stacks[self.vocabulary.chosen]

    def draft_room(self, rows: int) -> DraftRoom:
        return self._buffers.room(rows)

    def features(self, states: Tensor) -> Tensor:
        room = self.draft_room(len(states))
        return self._backend.rms_norm(states, self._weights.final_norm, self._eps, room.features)

    def run(self, token_ids: Tensor, features: Tensor, cache: KvCache, plan: AttentionPlan) -> Tensor:
        """See Head. What run returned is overwritten where it is given as features."""
        backend, weights, eps = self._backend, self._weights, self._eps
        rows, width = features.shape
        room = self.draft_room(rows)
        embedded = backend.embed(token_ids, weights.embedding, room.embedded)
        backend.rms_norm(embedded, weights.embedding_norm, eps, room.joined[:, :width])
        backend.rms_norm(features, weights.hidden_norm, eps, room.joined[:, width:])
        hidden = backend.linear(room.joined, weights.fc, room.hidden)
        backend.layers.run(self._stack, 0, 1, hidden, cache, plan, room.layers)
        return backend.rms_norm(hidden, weights.norm, eps, hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits of rows, as Head says: minus infinity for tokens that the vocabulary leaves out."""
        room = self._buffers.layers.logits
        assert len(hidden) <= len(room), "more rows than the logits buffer holds"
        found, head = room[: len(hidden)], self.drafting_stack.logits.linear
        if self.vocabulary.is_whole:
            return self._backend.linear(hidden, head, found)
        size, end = self.vocabulary.sizes[self.vocabulary.chosen], self.vocabulary.sizes[-1]
        some = self._backend.linear(hidden, head, found.new_empty(len(hidden), size + self._num_ends))
        found[:, :size], found[:, size:end], found[:, end:] = some[:, :size], -torch.inf, some[:, size:]
        return found


def load_mtp(
    path: Path,
    spec: HeadSpec,
    target: Decoder,
    backend: Backend,
    *,
    max_positions: int,
    max_rows: int,
    max_logit_rows: int,
    quantization: str | None = None,
    draft_ids: Tensor | None = None,
    sizes: Sequence[int] = (),
    start: int = 0,
    progress: ByteProgress = lambda *_: None,
) -> MtpHead:
    """Load the layer from the checkpoint of the target.

    target: as it was loaded from there, on this backend. quantization: as of load_decoder. max_positions,
    max_rows, max_logit_rows: as of load_head. draft_ids: [Vd] int64, ascending: the tokens of the logits; None:
    all. sizes: ascending; the layer drafts one of these numbers of the first draft_ids, and all that come after
    the largest, as it chooses while it serves, beginning with `start`; empty: always all. progress: called with
    (bytes done, bytes in all).

    Raises ModelError that names tensors that are missing, unexpected or of another shape.
    """
    if draft_ids is not None:
        spec = replace(spec, draft_vocab_size=len(draft_ids))
    shapes = mtp_shapes(spec.decoder)
    form = checkpoint_form(path, backend, target.dtype, quantization=quantization, shapes=shapes)
    check_names(form.source, shapes, lambda name: not name.startswith(MTP_PREFIX))
    packer = Packer(
        form.source,
        shapes,
        backend,
        target.dtype,
        progress,
        stored=form.stored,
        quantise=form.quantise,
        blocks=form.blocks,
    )
    decoder, ends = spec.decoder, target.ends
    assert ends.head is not None, "ranks serve no target with an MTP layer"

    def norm(name: str) -> Tensor:
        return packer.norm(name, plus_one=decoder.plus_one)

    weights = MtpWeights(
        embedding=ends.embedding,
        final_norm=ends.final_norm,
        embedding_norm=norm(_EMBEDDING_NORM),
        hidden_norm=norm(_HIDDEN_NORM),
        fc=packer.layer_product(_FC),
        layer=packer.layer(_LAYER, decoder.layers[0], decoder),
        norm=norm(_NORM),
        heads=(),
        num_bytes=packer.packed_bytes,
    )
    layer_bytes = packer.packed_bytes
    if draft_ids is None:
        heads: tuple[PackedLinear, ...] = (ends.head,)
    elif not sizes:
        heads = (packer.pack(_rows_of_head(form, draft_ids, target, backend)),)
    else:
        heads = _heads_of_sizes(form, draft_ids, sizes, target, backend, packer)
    weights = replace(weights, heads=heads, num_bytes=packer.packed_bytes)
    vocabulary = WHOLE
    if sizes:
        assert draft_ids is not None, "sizes are of a part of the vocabulary"
        row_bytes = (packer.packed_bytes - layer_bytes) / len(draft_ids)
        vocabulary = DraftVocabulary(
            sizes,
            pass_prices=[(layer_bytes + size * row_bytes) / _bytes_read(target) for size in sizes],
            vocab_size=decoder.vocab_size,
            ends=draft_ids[sizes[-1] :].tolist(),
            start=start,
        )
    draft_ids = maybe(lambda ids: ids.to(backend.device), draft_ids)
    rotary = RotaryTables(decoder, num_positions=max_positions, device=backend.device)
    buffers = HeadBuffers.allocate(
        spec, target.dtype, backend.device, max_rows=max_rows, max_logit_rows=max_logit_rows
    )
    return MtpHead(spec, backend, weights, draft_ids, rotary, buffers, vocabulary)


def mtp_shapes(decoder: DecoderSpec) -> dict[str, Shape]:
    """Every tensor of the layer; products are [out, in]."""
    hidden = decoder.hidden_size
    shapes: dict[str, Shape] = {_EMBEDDING_NORM: (hidden,), _HIDDEN_NORM: (hidden,), _FC: (hidden, 2 * hidden)}
    of_layer = layer_shapes(decoder, decoder.layers[0])
    return shapes | {_LAYER + name: shape for name, shape in of_layer.items()} | {_NORM: (hidden,)}


def _rows_of_head(
    form: CheckpointForm, draft_ids: Tensor, target: Decoder, backend: Backend
) -> Tensor | LowBitRows:
    """Rows of the target's product of the logits, as they are stored if the backend multiplies them so."""
    blocks = form.blocks(HEAD if HEAD in form.source.names() else EMBEDDING)
    if blocks is not None:
        return blocks.take(draft_ids.numpy())
    assert target.ends.head is not None, "ranks serve no target with an MTP layer"
    return rows_of_target(target.ends.head, draft_ids, target, backend)


def _heads_of_sizes(
    form: CheckpointForm,
    draft_ids: Tensor,
    sizes: Sequence[int],
    target: Decoder,
    backend: Backend,
    packer: Packer,
) -> tuple[PackedLinear, ...]:
    """The product of the logits for each size, all in the memory of the largest. Floats are rounded to 8 bits."""
    drafting = backend.head_drafting
    assert drafting is not None, f"the {backend.name} backend shares no rows of logits"
    parts = []
    for ids in (draft_ids[: sizes[-1]], draft_ids[sizes[-1] :]):
        rows = _rows_of_head(form, ids, target, backend)
        parts.append(
            rows if isinstance(rows, LowBitRows) else LowBitRows(parts=(FloatRows(weight=rows, scheme=INT8),))
        )
    whole = packer.pack(stack_low_bit(parts if len(draft_ids) > sizes[-1] else parts[:1]))
    return (*(drafting.without_middle(whole, size) for size in sizes[:-1]), whole)


def _bytes_read(target: Decoder) -> float:
    """Bytes of weights that a step of one row reads: of a mixture only the experts that the row passes."""
    idle, hidden = 0, target.spec.hidden_size
    for layer in target.spec.layers:
        for network in (layer.feed_forward, layer.experts):
            if isinstance(network, ExpertsSpec):
                idle += 3 * hidden * network.size * (network.num_experts - network.top_k)
    return target.weight_bytes * (1 - idle / target.num_parameters)
