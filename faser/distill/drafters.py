"""The kinds of drafters that `faser distill` makes: an EAGLE-3 head, and a block drafter.

Both have the target's width, its attention and its rotary embedding, and draft the most frequent tokens of its
answers. What they differ in is here: sizes, first weights, the module that learns, and the writer.
"""

from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from faser.config.speculation import DSPARK
from faser.distill.block import TrainableBlock, initial_block, stored_weights
from faser.distill.head import TrainableHead, initial_weights
from faser.distill.speculators_writer import write_block, write_speculators
from faser.distill.target import FrozenTarget
from faser.distill.trainable import Trainable
from faser.engine.checkpoints.blocks import BlockSpec
from faser.engine.checkpoints.families.architecture import (
    AttentionSpec,
    DecoderSpec,
    DenseSpec,
    LayerSpec,
    LongRopeScaling,
    ProportionalScaling,
    RopeScaling,
    RopeSpec,
)
from faser.engine.checkpoints.heads import EAGLE3, FeatureNorm, HeadSpec

_FEED_FORWARD = 3  # widths of a drafter: its feed-forward, at most
_THETA = 10_000.0  # of a drafter for a target without a rotary embedding
_DRAFT_TOKENS = 3  # that the config of a head advises
_BLOCK_LAYERS, _MARKOV_RANK = 2, 64


class DrafterKind(ABC):
    """One kind of drafter for one target. block_size: rows of a pass; None: each pass drafts one token."""

    name: str
    block_size: int | None = None

    @abstractmethod
    def initial_weights(self, draft_ids: Tensor, states: Tensor, seed: int) -> dict[str, Tensor]:
        """Return the weights that a training begins with. states: [T, K * H], some of the target's."""

    @abstractmethod
    def trainable(self, weights: dict[str, Tensor], positions: int, dtype: torch.dtype) -> Trainable:
        """Return the drafter with these weights."""

    @abstractmethod
    def write(self, folder: Path, weights: dict[str, Tensor], draft_ids: Tensor | None, *, int8: bool) -> None:
        """Write the drafter as a directory in the format of `speculators`."""


class Eagle3Kind(DrafterKind):
    """One layer, whose passes draft one token each."""

    name = EAGLE3

    def __init__(self, target: FrozenTarget, layers: tuple[int, ...], draft_vocab_size: int, name: str) -> None:
        self._target = target
        self._spec = head_spec(target.config.spec, layers, draft_vocab_size, name)

    def initial_weights(self, draft_ids: Tensor, states: Tensor, seed: int) -> dict[str, Tensor]:
        del states  # the head norms them
        return initial_weights(
            self._spec,
            head_rows=self._target.head_rows(draft_ids).cpu(),
            final_norm=self._target.final_norm().cpu(),
            seed=seed,
        )

    def trainable(self, weights: dict[str, Tensor], positions: int, dtype: torch.dtype) -> Trainable:
        return TrainableHead(self._spec, weights, self._target.embedding(), positions=positions, dtype=dtype)

    def write(self, folder: Path, weights: dict[str, Tensor], draft_ids: Tensor | None, *, int8: bool) -> None:
        architectures = self._target.architectures
        write_speculators(
            folder, self._spec, weights, draft_ids=draft_ids, target_architectures=architectures, int8=int8
        )


class BlockKind(DrafterKind):
    """Two layers, whose one pass drafts a block of tokens."""

    name = DSPARK

    def __init__(
        self, target: FrozenTarget, layers: tuple[int, ...], draft_vocab_size: int, name: str, block_size: int
    ) -> None:
        self._target = target
        self.block_size = block_size
        self._spec = block_spec(target.config.spec, layers, draft_vocab_size, block_size)
        self._target_name = name

    def initial_weights(self, draft_ids: Tensor, states: Tensor, seed: int) -> dict[str, Tensor]:
        return initial_block(
            self._spec,
            head_rows=self._target.head_rows(draft_ids).cpu(),
            final_norm=self._target.final_norm().cpu(),
            mask=self._target.embedding()[draft_ids].float().mean(0).cpu(),
            states=states,
            seed=seed,
        )

    def trainable(self, weights: dict[str, Tensor], positions: int, dtype: torch.dtype) -> Trainable:
        return TrainableBlock(self._spec, weights, self._target.embedding(), positions=positions, dtype=dtype)

    def write(self, folder: Path, weights: dict[str, Tensor], draft_ids: Tensor | None, *, int8: bool) -> None:
        write_block(
            folder,
            self._spec,
            stored_weights(weights),
            draft_ids=draft_ids,
            target_name=self._target_name,
            target_architectures=self._target.architectures,
            int8=int8,
        )


def head_spec(target: DecoderSpec, layers: tuple[int, ...], draft_vocab_size: int, name: str) -> HeadSpec:
    """Return a head as wide as its target."""
    return HeadSpec(
        decoder=_decoder(target, 1),
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target.hidden_size,
        state_layers=layers,
        feature_norm=FeatureNorm.EACH,
        norm_before_residual=True,
        num_draft_tokens=_DRAFT_TOKENS,
        target_name=name,
    )


def block_spec(target: DecoderSpec, layers: tuple[int, ...], draft_vocab_size: int, block_size: int) -> BlockSpec:
    """Return a block drafter as wide as its target."""
    decoder = _decoder(target, _BLOCK_LAYERS)
    normed = replace(decoder.layers[0], attention=replace(decoder.attention, qk_norm=True))
    return BlockSpec(
        decoder=replace(decoder, layers=(normed,) * _BLOCK_LAYERS),
        draft_vocab_size=draft_vocab_size,
        state_layers=layers,
        block_size=block_size,
        markov_rank=_MARKOV_RANK,
        method=DSPARK,
        target_hidden_size=target.hidden_size,
        mask_token_id=None,
        predicts_from_anchor=True,
        causal=(False,) * _BLOCK_LAYERS,
        confidence=True,
        confidence_reads_markov=True,
    )


def _decoder(target: DecoderSpec, num_layers: int) -> DecoderSpec:
    """Return Llama layers of the target's sizes, but for their feed-forward (_FEED_FORWARD).

    Every pass reads them, and every step of the training multiplies with them: wider ones would cost more of both.
    """
    size = min(target.feed_forward.size, _FEED_FORWARD * target.hidden_size)
    rope = next((each.rope for each in target.attentions if each.rope is not None), None)
    attention = AttentionSpec(
        num_heads=target.attention.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rope=RopeSpec(theta=_THETA) if rope is None else RopeSpec(theta=rope.theta, scaling=_known(rope.scaling)),
    )
    return DecoderSpec(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        layers=(LayerSpec(attention=attention, feed_forward=DenseSpec(size=size)),) * num_layers,
        rms_norm_eps=target.rms_norm_eps,
        max_position_embeddings=target.max_position_embeddings,
        tie_word_embeddings=False,
    )


def _known(scaling: RopeScaling | None) -> RopeScaling | None:
    """Other than longrope and proportional, which heads have no fields for: they attend to little."""
    return None if isinstance(scaling, LongRopeScaling | ProportionalScaling) else scaling
