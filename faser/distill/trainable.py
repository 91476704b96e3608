"""Trainable: a drafter with gradients over a batch, and the attention that all of them share.

    head.py    an EAGLE-3 head, unrolled: one pass for each drafted token
    block.py   a block drafter: one pass for all drafted tokens

Trainer and measurement know this class alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from faser.distill.arithmetic import rms_norm
from faser.distill.batch import TrainingBatch
from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.execution.drafting.heads import tensors
from faser.engine.execution.models.rope import rotary_angles


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys and values, [R, Hkv, D] of some rows, or [N, M, Hkv, D] of M rows for each drafting row."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """loss: scalar with a gradient, the mean over drafting rows. drafts: [S, N] int64, the drafter's best rows."""

    loss: Tensor
    drafts: Tensor


class Trainable(ABC):
    """weights: float32 with gradients, without the embedding. embedding: [V, H], the target's; frozen.

    positions: most positions that rows have. dtype: of activations and products.
    """

    every = 1  # answer position that is learned from; the first one always is

    def __init__(
        self,
        decoder: DecoderSpec,
        weights: Mapping[str, Tensor],
        embedding: Tensor,
        *,
        positions: int,
        dtype: torch.dtype,
    ) -> None:
        self.decoder = decoder
        self.weights = dict(weights)
        self.dtype = dtype
        self._embedding = embedding.to(dtype)
        rope = decoder.attention.rope
        assert rope is not None, "the layers have a rotary embedding"
        angles = rotary_angles(rope, head_dim=decoder.head_dim, num_positions=positions)
        self._angles = angles.to(embedding.device)

    @abstractmethod
    def loss(self, batch: TrainingBatch, steps: int) -> Learned: ...

    @abstractmethod
    def logits(self, batch: TrainingBatch, steps: int) -> Iterator[Tensor]:
        """Yield [N, Vd] float32 for every drafted token, given that the answer's tokens before it were drafted."""

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    def head(self) -> Tensor:
        """Return the head [Vd, H] in the type of the activations."""
        return self.weights[tensors.HEAD].to(self.dtype)

    def _cast(self) -> dict[str, Tensor]:
        """Return the matrices but the head's, in the type of the activations."""
        return {
            name: weight.to(self.dtype)
            for name, weight in self.weights.items()
            if weight.dim() == 2 and name != tensors.HEAD
        }

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.weights[name], self.decoder.rms_norm_eps)


def attend(queries: Tensor, known: Keys, own: Keys | None, batch: TrainingBatch) -> Tensor:
    """Return [N, S, Hq * D] for S queries of each drafting row, [N, S, Hq, D].

    own: what only the queries of the same drafting row see. Of the known rows they see those that it does.
    Conversations are padded to the longest one here. C: conversations, Q: most drafting rows, L: most rows of one,
    G: query heads of a key-value head.
    """
    size, num_heads, width = queries.shape[1:]
    num_kv = known.keys.shape[1]
    group = num_heads // num_kv
    count, longest = batch.padded_drafting.shape
    keys = known.keys[batch.padded_rows].permute(0, 2, 3, 1)  # [C, Hkv, D, L]
    values = known.values[batch.padded_rows].permute(0, 2, 1, 3)  # [C, Hkv, L, D]
    grouped = queries.view(-1, size, num_kv, group, width).permute(0, 2, 3, 1, 4) * width**-0.5
    grouped = grouped.reshape(-1, num_kv, group * size, width)  # [N, Hkv, G * S, D]
    padded = grouped[batch.padded_drafting].transpose(1, 2).reshape(count, num_kv, -1, width)
    scores = (padded @ keys).view(count, num_kv, longest, group * size, -1).float()
    scores = scores + batch.mask[:, None, :, None]
    length = scores.shape[-1]
    if own is not None:
        own_scores = grouped @ own.keys.permute(0, 2, 3, 1)  # [N, Hkv, G * S, M]
        scores = torch.cat((scores, own_scores.float()[batch.padded_drafting].transpose(1, 2)), -1)
    shares = scores.softmax(-1).to(queries.dtype)
    mixed = shares[..., :length].reshape(count, num_kv, -1, length) @ values
    mixed = _unpadded(mixed.view(count, num_kv, longest, group * size, width), batch)
    if own is not None:
        mixed = mixed + _unpadded(shares[..., length:], batch) @ own.values.transpose(1, 2)
    mixed = mixed.view(-1, num_kv, group, size, width).permute(0, 3, 1, 2, 4)
    return mixed.reshape(-1, size, num_heads * width)


def _unpadded(x: Tensor, batch: TrainingBatch) -> Tensor:
    """Return the rows without padding: [N, Hkv, …] of [C, Hkv, Q, …]."""
    return x.transpose(1, 2).flatten(0, 1)[batch.unpadded]
