"""TrainableBlock: a DSpark block drafter with gradients, over the blocks of every second position at once.

    context row p      fc of the target's states of p, normed: keys and values of every layer, and nothing else
    block row i        at position n + i, the anchor's: takes token n where i is 0, else a learnt vector, and
                       predicts token n + i + 1

A block row sees the context rows before its anchor and all rows of its own block: a pass drafts the whole block,
and no row takes what another has drafted. The Markov head corrects for that: the token before adds its own row of
logits. The confidence head says how likely a draft is accepted if those before it were.

Source: arXiv 2607.05147 (DSpark), whose loss weighs the L1 distance of distributions nine times cross-entropy.
"""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, linear, silu

from faser.distill.arithmetic import linear_loss, rotate
from faser.distill.batch import TrainingBatch
from faser.distill.trainable import Keys, Learned, Trainable, attend
from faser.engine.checkpoints.blocks import BlockSpec
from faser.engine.execution.drafting.heads import tensors
from faser.engine.execution.models.tensors import Shape

_STATE_SCALE = "state_scale"  # [K], logarithms: of the states of each layer, which fc multiplies; not in files
_DISTANCE = 0.9  # of the loss; the rest is cross-entropy
_FADE = 4.0  # positions in which the weight of a draft falls to 1/e
_SMALLER = 0.25  # what a layer adds to the stream at first, against other products


class TrainableBlock(Trainable):
    """weights: those of initial_block; see Trainable.

    The states of a late layer are ten times as large as those of an early one, and the optimiser's steps are not.
    So fc learns with states that are scaled alike, and stored_weights multiplies it by the scales.
    """

    every = 2

    def __init__(
        self,
        spec: BlockSpec,
        weights: Mapping[str, Tensor],
        embedding: Tensor,
        *,
        positions: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(spec.decoder, weights, embedding, positions=positions, dtype=dtype)
        self.spec = spec

    def loss(self, batch: TrainingBatch, steps: int) -> Learned:
        cast = self._cast()
        hidden = self._outputs(batch, steps, cast)
        markov = self._markov(batch, steps, cast)
        scale = torch.exp(-torch.arange(steps, device=self.device) / _FADE)
        weights = batch.valid.float() * (scale / (scale.sum() * batch.valid.shape[1]))[:, None]
        loss, drafts, overlap = linear_loss(
            torch.cat((hidden, markov), -1).flatten(0, 1),
            torch.cat((self.head(), cast[tensors.MARKOV_CANDIDATES]), -1),
            batch.wanted_ids.flatten(0, 1),
            batch.wanted_probs.flatten(0, 1),
            weights.flatten(),
            _DISTANCE,
        )
        said = self._confidence(hidden, markov).flatten()
        loss = loss + binary_cross_entropy_with_logits(said, overlap, weights.flatten(), reduction="sum")
        return Learned(loss=loss, drafts=drafts.view(steps, -1))

    def logits(self, batch: TrainingBatch, steps: int) -> Iterator[Tensor]:
        cast = self._cast()
        head = torch.cat((self.head(), cast[tensors.MARKOV_CANDIDATES]), -1)
        for row in torch.cat((self._outputs(batch, steps, cast), self._markov(batch, steps, cast)), -1):
            yield (row @ head.T).float()

    def confidence(self, batch: TrainingBatch, steps: int) -> Tensor:
        """Return the chance [S, N] float32 that each draft is accepted if those before it are."""
        cast = self._cast()
        return self._confidence(self._outputs(batch, steps, cast), self._markov(batch, steps, cast)).sigmoid()

    def _confidence(self, hidden: Tensor, markov: Tensor) -> Tensor:
        """Return the confidence logits [S, N]. They learn from the drafts, and the drafts do not from them."""
        known = torch.cat((hidden, markov), -1).detach().float()
        return linear(known, self.weights[tensors.CONFIDENCE], self.weights[tensors.CONFIDENCE_BIAS])[..., 0]

    def _markov(self, batch: TrainingBatch, steps: int, cast: Mapping[str, Tensor]) -> Tensor:
        """Return the Markov head's row of the token before each draft: [S, N, r]."""
        return cast[tensors.MARKOV_BEFORE][batch.next_ids[:steps]]

    def _outputs(self, batch: TrainingBatch, steps: int, cast: Mapping[str, Tensor]) -> Tensor:
        """Return the rows of every block behind the final norm: [S, N, H]."""
        scales = self.weights[_STATE_SCALE].exp().to(self.dtype).repeat_interleave(self.decoder.hidden_size)
        context = self._norm(
            linear(batch.states.to(self.dtype) * scales, cast[tensors.FC]), tensors.BLOCK_HIDDEN_NORM
        )
        known_angles = self._angles[batch.positions - 1]  # a row of the batch has the states of the token before
        anchors = batch.drafting
        masks = self.weights[tensors.MASK].to(self.dtype).expand(len(anchors), steps - 1, -1)
        stream = torch.cat((self._embedding[batch.next_ids[0]][:, None], masks), 1).flatten(0, 1)
        ahead = torch.arange(steps, device=self.device)
        angles = self._angles[(batch.positions[anchors][:, None] + ahead).flatten()]
        for number in range(self.decoder.num_layers):
            stream = self._layer(tensors.layer_prefix(number), stream, angles, context, known_angles, batch, cast)
        return self._norm(stream, tensors.NORM).view(-1, steps, stream.shape[-1]).transpose(0, 1)

    def _layer(
        self,
        layer: str,
        stream: Tensor,
        angles: Tensor,
        context: Tensor,
        known_angles: Tensor,
        batch: TrainingBatch,
        cast: Mapping[str, Tensor],
    ) -> Tensor:
        """stream: [N * S, H], the rows of each block together."""
        normed = self._norm(stream, f"{layer}input_layernorm.weight")
        known, own = (
            Keys(
                rotate(self._heads(layer, "k", rows, cast), turns),
                linear(rows, cast[f"{layer}self_attn.v_proj.weight"]).view(
                    -1, self.decoder.num_kv_heads, self.decoder.head_dim
                ),
            )
            for rows, turns in ((context, known_angles), (normed, angles))
        )
        queries = rotate(self._heads(layer, "q", normed, cast), angles)
        queries, *of_block = (
            each.view(len(batch.drafting), -1, *each.shape[1:]) for each in (queries, own.keys, own.values)
        )
        mixed = attend(queries, known, Keys(*of_block), batch).flatten(0, 1)
        stream = stream + linear(mixed, cast[f"{layer}self_attn.o_proj.weight"])
        normed = self._norm(stream, f"{layer}post_attention_layernorm.weight")
        gate, up = (linear(normed, cast[f"{layer}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        return stream + linear(silu(gate) * up, cast[f"{layer}mlp.down_proj.weight"])

    def _heads(self, layer: str, name: str, rows: Tensor, cast: Mapping[str, Tensor]) -> Tensor:
        """Return queries or keys of some rows, each head normed: [R, heads, D]."""
        found = linear(rows, cast[f"{layer}self_attn.{name}_proj.weight"])
        return self._norm(found.view(len(rows), -1, self.decoder.head_dim), f"{layer}self_attn.{name}_norm.weight")


def drafter_shapes(spec: BlockSpec) -> dict[str, Shape]:
    """Return the shape of every tensor but the embedding, which is the target's, and the map of the vocabulary."""
    shapes = tensors.block_shapes(spec, has_mask=True)
    return {name: shape for name, shape in shapes.items() if name != tensors.EMBEDDING}


def initial_block(
    spec: BlockSpec, *, head_rows: Tensor, final_norm: Tensor, mask: Tensor, states: Tensor, seed: int
) -> dict[str, Tensor]:
    """Return every weight, float32 with gradients, under the names of heads/tensors.py, and scales of the states.

    head_rows: [Vd, H], of the target's head. final_norm: [H], the target's. mask: [H], a mean of embeddings.
    states: [T, K * H], some of the target's. At first a context row is about the last state that the drafter
    reads, and the Markov head adds nothing.
    """
    by_layer = states.float().unflatten(1, (len(spec.state_layers), -1))  # type: ignore[no-untyped-call]
    sizes = by_layer.square().mean(-1).sqrt().median(0).values  # a first token's may be a hundred times as large
    generator = torch.Generator().manual_seed(seed)
    given = {tensors.HEAD: head_rows, tensors.NORM: final_norm, tensors.MASK: mask}
    found: dict[str, Tensor] = {}
    for name, shape in drafter_shapes(spec).items():
        if name in given:
            weight = given[name].float()
        elif name in (tensors.MARKOV_CANDIDATES, tensors.CONFIDENCE, tensors.CONFIDENCE_BIAS):
            weight = torch.zeros(shape)
        elif len(shape) == 1:
            weight = torch.ones(shape)
        else:
            weight = torch.randn(shape, generator=generator)
            weight /= 1.0 if name == tensors.MARKOV_BEFORE else math.sqrt(shape[1])
            weight *= _SMALLER if name.endswith((".o_proj.weight", ".down_proj.weight", tensors.FC)) else 1.0
        if name == tensors.FC:
            weight[:, -shape[0] :] += torch.eye(shape[0])
        assert weight.shape == shape, (name, weight.shape, shape)
        found[name] = weight.clone().contiguous().requires_grad_()
    return found | {_STATE_SCALE: (-sizes.log()).requires_grad_()}


def stored_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights under the names of heads/tensors.py: fc multiplies states as they are."""
    found = {name: weight.detach() for name, weight in weights.items()}
    scales = found.pop(_STATE_SCALE).exp()
    fc = found[tensors.FC]
    return found | {tensors.FC: fc * scales.repeat_interleave(fc.shape[1] // len(scales))}
