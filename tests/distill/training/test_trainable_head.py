"""The unrolled head. Oracle: EAGLE-3 in float64, written from the paper, run once for every position and step."""

from dataclasses import replace

import torch
from torch import Tensor

from faser.distill.training.batch import Sample, make_batch
from faser.distill.training.initial_weights import initial_weights
from faser.distill.training.trainable_head import TrainableHead
from faser.engine.checkpoints.families.architecture import DecoderSpec, RopeSpec
from faser.engine.checkpoints.heads.head_spec import FeatureNorm, HeadKind, HeadSpec
from faser.engine.execution.heads import tensors
from tests.engine.execution.heads.references import Eagle3, Shape

VOCAB, HIDDEN, DRAFTS, STEPS = 40, 16, 12, 3


def small_spec() -> HeadSpec:
    decoder = DecoderSpec(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        rms_norm_eps=1e-5,
        max_position_embeddings=64,
        rope=RopeSpec(theta=10_000.0),
        windows=(None,),
        rotary=(True,),
        tie_word_embeddings=False,
    )
    return HeadSpec(
        kind=HeadKind.EAGLE3,
        decoder=decoder,
        draft_vocab_size=DRAFTS,
        target_hidden_size=HIDDEN,
        state_layers=(1, 2, 4),
        feature_norm=FeatureNorm.EACH,
        norm_before_residual=True,
    )


def seeded(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def small_head() -> TrainableHead:
    spec = small_spec()
    weights = initial_weights(spec, head_rows=seeded((DRAFTS, HIDDEN), 1), final_norm=torch.ones(HIDDEN), seed=2)
    with torch.no_grad():
        for at, weight in enumerate(weights.values()):
            weight += 0.3 * seeded(tuple(weight.shape), 10 + at)  # no norm is one, no product is small
    return TrainableHead(spec, weights, seeded((VOCAB, HIDDEN), 3), positions=64, dtype=torch.float32)


def sample(tokens: int, prompt: int, seed: int) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    rows = tokens - 1 - prompt
    return Sample(
        token_ids=torch.randint(VOCAB, (tokens,), generator=generator),
        prompt_tokens=prompt,
        states=seeded((tokens - 1, 3 * HIDDEN), seed + 1).bfloat16(),
        top_ids=torch.stack([torch.randperm(DRAFTS, generator=generator)[:4] for _ in range(rows)]),
        top_probs=torch.rand((rows, 4), generator=generator) / 4,
        greedy=True,
    )


SAMPLES = [sample(9, 4, 20), sample(12, 2, 30), sample(4, 2, 40)]


def reference_outputs(head: TrainableHead, one: Sample, row: int, steps: int) -> list[Tensor]:
    """What the head gives when it drafts from this row: one sequence of true rows, then of its own outputs."""
    weights = {name: weight.detach().double() for name, weight in head.weights.items()}
    embedding = seeded((VOCAB, HIDDEN), 3).double()
    model = Eagle3(
        weights=weights | {tensors.EMBEDDING: embedding},
        shape=Shape(num_heads=4, num_kv_heads=2, head_dim=4, eps=1e-5),
        norm_before_residual=True,
    )
    states = list(one.states[:row].double().split(HIDDEN, dim=1))
    features = model.features(states)
    found: list[Tensor] = []
    for step in range(steps):
        outputs = model.outputs(one.token_ids[1 : row + step + 1].tolist(), features)
        found.append(outputs[-1])
        features = torch.cat((features, outputs[-1:]))
    return found


def test_every_row_drafts_as_it_would_alone() -> None:
    """Seen to catch: states shifted by one, a later state or token in sight, keys of a draft left out."""
    head = small_head()
    batch = make_batch(SAMPLES, STEPS)
    found = head.outputs(batch, STEPS)
    assert len(found) == STEPS
    at = 0
    for one in SAMPLES:
        for row in range(one.prompt_tokens, len(one.token_ids) - 1):
            steps = min(STEPS, len(one.token_ids) - 1 - row)
            for step, expected in enumerate(reference_outputs(head, one, row, steps)):
                torch.testing.assert_close(found[step][at].double(), expected, rtol=2e-4, atol=2e-4)
            at += 1
    assert at == len(found[0])


def test_no_output_depends_on_states_that_a_drafter_lacks() -> None:
    """The states of a row's own token and of later ones: their gradients are zero."""
    head = small_head()
    one = SAMPLES[1]
    states = one.states.float().requires_grad_()
    batch = make_batch([replace(one, states=states)], STEPS)
    for step, output in enumerate(head.outputs(batch, STEPS)):
        for at in range(len(output)):
            (grad,) = torch.autograd.grad(output[at].sum(), states, retain_graph=True)
            used = grad.abs().sum(-1) > 0
            row = one.prompt_tokens + at
            assert used[:row].all(), (step, at)
            assert not used[row:].any(), (step, at)


def test_a_step_sees_the_tokens_that_were_drafted_before_it() -> None:
    head = small_head()
    one = SAMPLES[1]
    before = head.outputs(make_batch([one], STEPS), STEPS)
    changed = one.token_ids.clone()
    changed[6] = (changed[6] + 1) % VOCAB
    after = head.outputs(make_batch([replace(one, token_ids=changed)], STEPS), STEPS)
    for step in range(STEPS):
        for at in range(len(before[step])):
            row = one.prompt_tokens + at
            if row + step < len(one.token_ids) - 1:
                differs = not torch.equal(before[step][at], after[step][at])
                assert differs == (row + step >= 6), (step, row)


def test_rows_in_the_padding_change_nothing() -> None:
    head = small_head()
    together = head.outputs(make_batch(SAMPLES, STEPS), STEPS)
    alone = [head.outputs(make_batch([one], STEPS), STEPS) for one in SAMPLES]
    for step in range(STEPS):
        torch.testing.assert_close(together[step], torch.cat([each[step] for each in alone]), rtol=1e-5, atol=1e-5)
