"""The unrolled head. Oracle: EAGLE-3 in float64, written from the paper, run once for every position and step."""

from dataclasses import replace

import torch
from torch import Tensor

from faser.distill.batch import TrainingSample, make_batch
from faser.distill.head import TrainableHead
from faser.engine.execution.drafting.heads import tensors
from tests.distill.small import HIDDEN, SAMPLES, STEPS, VOCAB, embedding, small_head
from tests.engine.execution.drafting.head_references import Eagle3, Shape


def reference_outputs(head: TrainableHead, one: TrainingSample, row: int, steps: int) -> list[Tensor]:
    """What the head gives when it drafts from this row: one sequence of true rows, then of its own outputs."""
    weights = {name: weight.detach().double() for name, weight in head.weights.items()}
    model = Eagle3(
        weights=weights | {tensors.EMBEDDING: embedding().double()},
        shape=Shape(num_heads=4, num_kv_heads=2, head_dim=4, eps=1e-5),
        norm_before_residual=True,
    )
    states = list(torch.split(one.states[:row].double(), HIDDEN, dim=1))
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
