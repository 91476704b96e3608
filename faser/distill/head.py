"""TrainableHead: an EAGLE-3 head with gradients, unrolled over the drafts of every position at once.

    step 0   row p takes x_p and the target's states of p - 1, and predicts p + 1
    step s   row p takes x_{p+s} and its own output of step s - 1, and predicts p + s + 1

Row p of step s sees what it would see when served: the rows 1 … p of step 0, and its own steps 1 … s. It never
sees a state of the target from p on, which a drafter does not have yet. A head begins with a seeded layer and what
the target lends; its vocabulary is the tokens that the target says most often.

Source: Li et al., arXiv 2503.01840, section 3.2 ("training-time test").
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from faser.distill.arithmetic import linear_loss, rotate
from faser.distill.batch import TrainingBatch
from faser.distill.dataset import Dataset
from faser.distill.trainable import Keys, Learned, Trainable, attend
from faser.engine.checkpoints.heads import FeatureNorm, HeadSpec
from faser.engine.execution.drafting.heads import tensors

STEP_DECAY = 0.8
_LAYER = tensors.layer_prefix(0)
_INTO_STREAM = (_LAYER + "self_attn.o_proj.weight", _LAYER + "mlp.down_proj.weight")
_SMALLER = 0.25  # what a layer adds to the stream at first, against other products


class TrainableHead(Trainable):
    """weights: under the names of heads/tensors.py; see Trainable."""

    def __init__(
        self,
        spec: HeadSpec,
        weights: Mapping[str, Tensor],
        embedding: Tensor,
        *,
        positions: int,
        dtype: torch.dtype,
    ) -> None:
        assert spec.feature_norm is FeatureNorm.EACH, spec.feature_norm
        assert spec.norm_before_residual, "the stream begins with the normalised features"
        super().__init__(spec.decoder, weights, embedding, positions=positions, dtype=dtype)
        self.spec = spec

    def loss(self, batch: TrainingBatch, steps: int) -> Learned:
        outputs = self.outputs(batch, steps)
        scale = torch.tensor([STEP_DECAY**step for step in range(steps)], device=self.device)
        weights = batch.valid.float() * (scale / (scale.sum() * batch.valid.shape[1]))[:, None]
        loss, drafts, _ = linear_loss(
            self.logits_input(torch.cat(outputs)),
            self.head(),
            batch.wanted_ids.flatten(0, 1),
            batch.wanted_probs.flatten(0, 1),
            weights.flatten(),
        )
        return Learned(loss=loss, drafts=drafts.view(steps, -1))

    def logits(self, batch: TrainingBatch, steps: int) -> Iterator[Tensor]:
        head_rows = self.head()
        for output in self.outputs(batch, steps):
            yield (self.logits_input(output) @ head_rows.T).float()

    def outputs(self, batch: TrainingBatch, steps: int) -> list[Tensor]:
        """Return each step's output [N, H] for the drafting rows, before the norm of the logits."""
        cast = self._cast()
        features = self._features(batch.states, cast)
        normed = self._norm(features, tensors.HIDDEN_NORM)
        embedded = self._embedded(batch.token_ids)
        joined = torch.cat((embedded, normed), -1)
        known = self._keys(joined, self._angles[batch.positions], cast)
        rows = batch.drafting
        joined, stream = joined.index_select(0, rows), normed.index_select(0, rows)
        drafted: list[Keys] = []
        found: list[Tensor] = []
        for step in range(steps):
            angles = self._angles[batch.positions.index_select(0, rows) + step]
            if step:
                stream = self._norm(found[-1], tensors.HIDDEN_NORM)
                joined = torch.cat((self._embedded(batch.next_ids[step]), stream), -1)
                drafted.append(self._keys(joined, angles, cast))
            found.append(self._layer(joined, stream, angles, known, drafted, batch, cast))
        return found

    def logits_input(self, hidden: Tensor) -> Tensor:
        """Return the normed states [N, H] that are multiplied with the head."""
        return self._norm(hidden, tensors.NORM)

    def _embedded(self, token_ids: Tensor) -> Tensor:
        return self._norm(self._embedding[token_ids], _LAYER + "input_layernorm.weight")

    def _features(self, states: Tensor, cast: Mapping[str, Tensor]) -> Tensor:
        width = self.spec.target_hidden_size
        parts = [
            self._norm(states[:, index * width : (index + 1) * width].to(self.dtype), name)
            for index, name in enumerate(tensors.feature_norms(self.spec))
        ]
        return linear(torch.cat(parts, -1), cast[tensors.FC])

    def _keys(self, joined: Tensor, angles: Tensor, cast: Mapping[str, Tensor]) -> Keys:
        heads = (-1, self.decoder.num_kv_heads, self.decoder.head_dim)
        keys = linear(joined, cast[_LAYER + "self_attn.k_proj.weight"]).view(heads)
        values = linear(joined, cast[_LAYER + "self_attn.v_proj.weight"]).view(heads)
        return Keys(rotate(keys, angles), values)

    def _layer(
        self,
        joined: Tensor,
        stream: Tensor,
        angles: Tensor,
        known: Keys,
        drafted: list[Keys],
        batch: TrainingBatch,
        cast: Mapping[str, Tensor],
    ) -> Tensor:
        decoder = self.decoder
        queries = linear(joined, cast[_LAYER + "self_attn.q_proj.weight"])
        queries = rotate(queries.view(-1, decoder.attention.num_heads, decoder.head_dim), angles)
        own = None
        if drafted:
            own = Keys(*(torch.stack([getattr(each, name) for each in drafted], 1) for name in Keys.__slots__))
        mixed = attend(queries[:, None], known, own, batch)[:, 0]
        stream = stream + linear(mixed, cast[_LAYER + "self_attn.o_proj.weight"])
        normed = self._norm(stream, _LAYER + "post_attention_layernorm.weight")
        gate = linear(normed, cast[_LAYER + "mlp.gate_proj.weight"])
        up = linear(normed, cast[_LAYER + "mlp.up_proj.weight"])
        return stream + linear(silu(gate) * up, cast[_LAYER + "mlp.down_proj.weight"])


def initial_weights(spec: HeadSpec, *, head_rows: Tensor, final_norm: Tensor, seed: int) -> dict[str, Tensor]:
    """Every weight but the embedding, float32 with gradients, under the names of heads/tensors.py.

    head_rows: [Vd, H], of the target's head. final_norm: [H], the target's. At first features are the last state
    that the head reads, and its logits those that the target's own head gives it.
    """
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for name, shape in tensors.eagle3_shapes(spec).items():
        if name == tensors.EMBEDDING:
            continue
        if name == tensors.HEAD:
            weight = head_rows.float()
        elif name == tensors.NORM:
            weight = final_norm.float()
        elif len(shape) == 1:
            weight = torch.ones(shape)
        else:
            weight = torch.randn(shape, generator=generator) / math.sqrt(shape[1])
            weight *= _SMALLER if name in _INTO_STREAM else 1.0
        if name == tensors.FC:
            weight *= _SMALLER
            weight[:, -spec.target_hidden_size :] += torch.eye(*weight.shape[:1])[:, : spec.target_hidden_size]
        found[name] = weight.clone().contiguous().requires_grad_()
    return found


def frequent_tokens(dataset: Dataset, vocab_size: int, size: int, always: Sequence[int]) -> Tensor:
    """Return the most frequent tokens of the answers: [size] int64, ascending.

    Of equally frequent ones the lower ids are taken. always: tokens that are taken in any case. size: at most
    vocab_size.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for shard in dataset.shards():
        first = 0
        for prompt, answer in zip(shard.prompts.tolist(), shard.answers.tolist(), strict=True):
            np.add.at(counts, shard.tokens[first + prompt : first + prompt + answer], 1)
            first += prompt + answer
    counts[list(always)] = counts.sum() + 1
    chosen = np.argsort(-counts, kind="stable")[:size]
    return torch.from_numpy(np.sort(chosen))
