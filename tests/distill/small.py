"""A small head and a small block drafter with seeded weights, and samples for them."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from faser.distill.batch import TrainingSample
from faser.distill.block import TrainableBlock, initial_block
from faser.distill.head import TrainableHead, initial_weights
from faser.engine.checkpoints.blocks import BlockSpec
from faser.engine.checkpoints.families.architecture import (
    AttentionSpec,
    DecoderSpec,
    DenseSpec,
    LayerSpec,
    RopeSpec,
)
from faser.engine.checkpoints.heads import FeatureNorm, HeadSpec

VOCAB, HIDDEN, DRAFTS, STEPS = 40, 16, 12, 3


def small_spec() -> HeadSpec:
    decoder = DecoderSpec(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        rms_norm_eps=1e-5,
        max_position_embeddings=64,
        layers=(
            LayerSpec(
                attention=AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=4, rope=RopeSpec(theta=10_000.0)),
                feed_forward=DenseSpec(size=24),
            ),
        ),
        tie_word_embeddings=False,
    )
    return HeadSpec(
        decoder=decoder,
        draft_vocab_size=DRAFTS,
        target_hidden_size=HIDDEN,
        state_layers=(1, 2, 4),
        feature_norm=FeatureNorm.EACH,
        norm_before_residual=True,
    )


def seeded(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def embedding() -> Tensor:
    return seeded(VOCAB, HIDDEN, seed=3)


def small_head() -> TrainableHead:
    """No norm is one, and no product is small."""
    spec = small_spec()
    weights = initial_weights(
        spec, head_rows=seeded(DRAFTS, HIDDEN, seed=1), final_norm=torch.ones(HIDDEN), seed=2
    )
    with torch.no_grad():
        for at, weight in enumerate(weights.values()):
            weight += 0.3 * seeded(*weight.shape, seed=10 + at)
    return TrainableHead(spec, weights, embedding(), positions=64, dtype=torch.float32)


def small_block() -> TrainableBlock:
    """No norm is one, no product is small, and the Markov and the confidence head are not zero."""
    decoder = small_spec().decoder
    layer = replace(decoder.layers[0], attention=replace(decoder.attention, qk_norm=True))
    spec = BlockSpec(
        decoder=replace(decoder, layers=(layer, layer)),
        draft_vocab_size=DRAFTS,
        state_layers=(1, 2, 4),
        block_size=4,
        markov_rank=6,
        method="dspark",
        target_hidden_size=HIDDEN,
        mask_token_id=None,
        predicts_from_anchor=True,
        causal=(False, False),
        confidence=True,
        confidence_reads_markov=True,
    )
    weights = initial_block(
        spec,
        head_rows=seeded(DRAFTS, HIDDEN, seed=1),
        final_norm=torch.ones(HIDDEN),
        mask=embedding()[0],
        states=seeded(9, 3 * HIDDEN, seed=5) * torch.tensor([0.5, 1.0, 4.0]).repeat_interleave(HIDDEN),
        seed=2,
    )
    with torch.no_grad():
        for at, weight in enumerate(weights.values()):
            weight += 0.3 * seeded(*weight.shape, seed=10 + at)
    return TrainableBlock(spec, weights, embedding(), positions=64, dtype=torch.float32)


def sample(tokens: int, prompt: int, seed: int) -> TrainingSample:
    generator = torch.Generator().manual_seed(seed)
    rows = tokens - 1 - prompt
    return TrainingSample(
        token_ids=torch.randint(VOCAB, (tokens,), generator=generator),
        prompt_tokens=prompt,
        states=seeded(tokens - 1, 3 * HIDDEN, seed=seed + 1).bfloat16(),
        top_ids=torch.stack([torch.randperm(DRAFTS, generator=generator)[:4] for _ in range(rows)]),
        top_probs=torch.rand((rows, 4), generator=generator) / 4,
        greedy=True,
    )


SAMPLES = [sample(9, 4, 20), sample(12, 2, 30), sample(4, 2, 40)]


class ListedSamples:
    """A SampleStore of given samples."""

    def __init__(self, samples: Sequence[TrainingSample]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def drafting_rows(self) -> list[int]:
        return [each.drafting_rows for each in self._samples]

    def sample(self, index: int) -> TrainingSample:
        return self._samples[index]
