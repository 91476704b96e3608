"""TrainableHead: an EAGLE-3 head with gradients, unrolled over the drafts of every position at once.

    step 0   row p takes x_p and the target's states of p - 1, and predicts p + 1
    step s   row p takes x_{p+s} and its own output of step s - 1, and predicts p + s + 1

Row p of step s sees what it would see when served: the rows 1 … p of step 0, and its own steps 1 … s. It never
sees a state of the target from p on, which a drafter does not have yet. A head begins with a seeded layer and what
the target lends; its vocabulary is the tokens that the target says most often.

Source: Li et al., arXiv 2503.01840, section 3.2 ("training-time test").
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from faser.distill.arithmetic import rms_norm, rotate
from faser.distill.batch import TrainingBatch
from faser.distill.dataset import Dataset
from faser.engine.checkpoints.heads import FeatureNorm, HeadSpec
from faser.engine.execution.drafting import head_tensors as tensors
from faser.engine.execution.models.rope import rotary_angles

_LAYER = tensors.layer_prefix(0)
_INTO_STREAM = (_LAYER + "self_attn.o_proj.weight", _LAYER + "mlp.down_proj.weight")
_SMALLER = 0.25  # what a layer adds to the stream at first, against other products


@dataclass(frozen=True, slots=True)
class _Keys:
    """Keys and values of some rows. keys, values: [R, Hkv, D]."""

    keys: Tensor
    values: Tensor


class TrainableHead:
    """weights: float32 with gradients, under the names of head_tensors.py, without the embedding.

    embedding: [V, H], the target's; frozen. dtype: of activations and products.
    """

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
        self.spec = spec
        self.weights = dict(weights)
        self.dtype = dtype
        self._embedding = embedding.to(dtype)
        decoder, rope = spec.decoder, spec.decoder.attention.rope
        assert rope is not None, "the layer has a rotary embedding"
        angles = rotary_angles(rope, head_dim=decoder.head_dim, num_positions=positions)
        self._angles = angles.to(embedding.device)

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    def outputs(self, batch: TrainingBatch, steps: int) -> list[Tensor]:
        """What each step gives for the drafting rows: [N, H] each, before the norm of the logits."""
        cast = self._cast()
        features = self._features(batch.states, cast)
        normed = self._norm(features, tensors.HIDDEN_NORM)
        embedded = self._embedded(batch.token_ids)
        joined = torch.cat((embedded, normed), -1)
        known = self._keys(joined, self._angles[batch.positions], cast)
        rows = batch.drafting
        joined, stream = joined.index_select(0, rows), normed.index_select(0, rows)
        drafted: list[_Keys] = []
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
        """What is multiplied with the head: [N, H]."""
        return self._norm(hidden, tensors.NORM)

    def head(self) -> Tensor:
        """[Vd, H] in the type of the activations."""
        return self.weights[tensors.HEAD].to(self.dtype)

    def _cast(self) -> dict[str, Tensor]:
        """The matrices but the head's, in the type of the activations."""
        return {
            name: weight.to(self.dtype)
            for name, weight in self.weights.items()
            if weight.dim() == 2 and name != tensors.HEAD
        }

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.weights[name], self.spec.decoder.rms_norm_eps)

    def _embedded(self, token_ids: Tensor) -> Tensor:
        return self._norm(self._embedding[token_ids], _LAYER + "input_layernorm.weight")

    def _features(self, states: Tensor, cast: Mapping[str, Tensor]) -> Tensor:
        width = self.spec.target_hidden_size
        parts = [
            self._norm(states[:, index * width : (index + 1) * width].to(self.dtype), name)
            for index, name in enumerate(tensors.feature_norms(self.spec))
        ]
        return linear(torch.cat(parts, -1), cast[tensors.FC])

    def _keys(self, joined: Tensor, angles: Tensor, cast: Mapping[str, Tensor]) -> _Keys:
        heads = (-1, self.spec.decoder.num_kv_heads, self.spec.decoder.head_dim)
        keys = linear(joined, cast[_LAYER + "self_attn.k_proj.weight"]).view(heads)
        values = linear(joined, cast[_LAYER + "self_attn.v_proj.weight"]).view(heads)
        return _Keys(rotate(keys, angles), values)

    def _layer(
        self,
        joined: Tensor,
        stream: Tensor,
        angles: Tensor,
        known: _Keys,
        drafted: list[_Keys],
        batch: TrainingBatch,
        cast: Mapping[str, Tensor],
    ) -> Tensor:
        decoder = self.spec.decoder
        queries = linear(joined, cast[_LAYER + "self_attn.q_proj.weight"])
        queries = rotate(queries.view(-1, decoder.attention.num_heads, decoder.head_dim), angles)
        mixed = _attend(queries, known, drafted, batch)
        stream = stream + linear(mixed, cast[_LAYER + "self_attn.o_proj.weight"])
        normed = self._norm(stream, _LAYER + "post_attention_layernorm.weight")
        gate = linear(normed, cast[_LAYER + "mlp.gate_proj.weight"])
        up = linear(normed, cast[_LAYER + "mlp.up_proj.weight"])
        return stream + linear(silu(gate) * up, cast[_LAYER + "mlp.down_proj.weight"])


def _attend(queries: Tensor, known: _Keys, drafted: list[_Keys], batch: TrainingBatch) -> Tensor:
    """[N, Hq * D]. queries: [N, Hq, D] of the drafting rows. Conversations are padded to the longest one here.

    C: conversations, Q: most drafting rows, L: most rows of one, G: query heads of a key-value head.
    """
    num_heads, width = queries.shape[1:]
    num_kv = known.keys.shape[1]
    group = num_heads // num_kv
    count, longest = batch.padded_drafting.shape
    keys = known.keys[batch.padded_rows].permute(0, 2, 3, 1)  # [C, Hkv, D, L]
    values = known.values[batch.padded_rows].permute(0, 2, 1, 3)  # [C, Hkv, L, D]
    padded = queries[batch.padded_drafting].view(count, longest, num_kv, group, width).permute(0, 2, 3, 1, 4)
    padded = padded.reshape(count, num_kv, group * longest, width) * width**-0.5
    scores = (padded @ keys).view(count, num_kv, group, longest, -1).float() + batch.mask[:, None, None]
    own = [
        (
            (queries.view(-1, num_kv, group, width) * each.keys[:, :, None]).sum(-1, dtype=torch.float32)
            * width**-0.5
        )[batch.padded_drafting].permute(0, 2, 3, 1)[..., None]
        for each in drafted
    ]  # [C, Hkv, G, Q, 1] each
    shares = torch.cat((scores, *own), -1).softmax(-1).to(queries.dtype)
    over_known = shares[..., : keys.shape[-1]].reshape(count, num_kv, group * longest, -1)
    mixed = (over_known @ values).view(count, num_kv, group, longest, width)
    mixed = mixed.permute(0, 3, 1, 2, 4).reshape(count * longest, num_kv, group, width)[batch.unpadded]
    for at, each in enumerate(drafted):
        share = shares[..., keys.shape[-1] + at].permute(0, 3, 1, 2).reshape(count * longest, num_kv, group)
        mixed = mixed + share[batch.unpadded][..., None] * each.values[:, :, None]
    return mixed.reshape(-1, num_heads * width)


def initial_weights(spec: HeadSpec, *, head_rows: Tensor, final_norm: Tensor, seed: int) -> dict[str, Tensor]:
    """Every weight but the embedding, float32 with gradients, under the names of head_tensors.py.

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
    """[size] int64, ascending: the most frequent tokens of the answers.

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
