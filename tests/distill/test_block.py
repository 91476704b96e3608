"""The trainable block drafter. Oracle: DSpark in float64 with an explicit mask, from the written files.

Planted bugs seen to be caught: see each test.
"""

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from torch.nn.functional import binary_cross_entropy

from faser.distill.acceptance import measure_acceptance
from faser.distill.batch import SampleStore, TrainingSample, make_batch
from faser.distill.block import TrainableBlock, stored_weights
from faser.distill.speculators_writer import write_block
from tests.distill.block_reference import BlockReference
from tests.distill.small import HIDDEN, SAMPLES, VOCAB, ListedSamples, embedding, sample, small_block

SIZE = 4
DRAFT_IDS = torch.arange(3, 27, 2)


def written(block: TrainableBlock, folder: Path, **options: bool) -> BlockReference:
    write_block(
        folder,
        block.spec,
        stored_weights(block.weights),
        draft_ids=DRAFT_IDS,
        target_name="small",
        target_architectures=["LlamaForCausalLM"],
        dtype=torch.float32,
        **options,
    )
    return BlockReference(folder, embedding())


def anchors(one: TrainingSample, every: int) -> list[int]:
    return list(range(one.prompt_tokens, len(one.token_ids) - 1, every))


@pytest.mark.parametrize("every", [1, 2])
def test_every_block_is_what_the_written_drafter_gives_alone(tmp_path: Path, every: int) -> None:
    block = small_block()
    reference = written(block, tmp_path)
    batch = make_batch(SAMPLES, SIZE, every=every)
    logits = torch.stack(list(block.logits(batch, SIZE)), 1)
    confidence = block.confidence(batch, SIZE).T
    at = 0
    for one in SAMPLES:
        expected = reference.draft(one.token_ids, one.states, anchors(one, every))
        for place, anchor in enumerate(anchors(one, every)):
            inside = min(SIZE, len(one.token_ids) - 1 - anchor)  # drafts that the answer has tokens for
            for found, wanted in ((logits, expected.logits), (confidence, expected.confidence)):
                torch.testing.assert_close(
                    found[at, :inside].double(), wanted[place, :inside], rtol=2e-4, atol=2e-4
                )
            at += 1
    assert at == len(logits)


def test_a_block_sees_the_states_before_its_anchor_and_no_later_one() -> None:
    block, one = small_block(), SAMPLES[1]
    states = one.states.float().requires_grad_()
    batch = make_batch([replace(one, states=states)], SIZE, every=block.every)
    logits = torch.stack(list(block.logits(batch, SIZE)), 1)
    assert len(logits) == 5
    for at, anchor in enumerate(anchors(one, block.every)):
        for step in range(SIZE):
            (grad,) = torch.autograd.grad(logits[at, step].sum(), states, retain_graph=True)
            used = grad.abs().sum(-1) > 0
            assert used[:anchor].all(), (anchor, step)
            assert not used[anchor:].any(), (anchor, step)


def test_a_draft_takes_the_anchor_and_the_token_before_it_and_no_other() -> None:
    block, one = small_block(), SAMPLES[1]
    changed = one.token_ids.clone()
    changed[6] = (changed[6] + 1) % VOCAB
    found = [
        torch.stack(list(block.logits(make_batch([each], SIZE), SIZE)), 1)
        for each in (one, replace(one, token_ids=changed))
    ]
    for at, anchor in enumerate(anchors(one, 1)):
        for step in range(min(SIZE, len(one.token_ids) - 1 - anchor)):
            differs = not torch.equal(found[0][at, step], found[1][at, step])
            assert differs == (anchor == 6 or anchor + step == 6), (anchor, step)


def drafted(reference: BlockReference, one: TrainingSample, anchor: int) -> list[int]:
    """A block, drafted greedily: each token's row of the Markov head is that of the draft before it."""
    tokens = one.token_ids.clone()
    for step in range(SIZE):
        best = reference.draft(tokens, one.states, [anchor]).logits[0, step].argmax()
        tokens[anchor + 1 + step] = reference.draft_ids[best]
    return tokens[anchor + 1 : anchor + 1 + SIZE].tolist()


def test_measured_acceptance_is_that_of_blocks_drafted_one_by_one(tmp_path: Path) -> None:
    block = small_block()
    reference = written(block, tmp_path)
    samples = [sample(20, 4, 50), sample(13, 3, 60), sample(30, 5, 70)]
    for one in samples:  # its answer now and then is what the block drafts
        for anchor in range(one.prompt_tokens, len(one.token_ids) - SIZE - 1, SIZE + 2):
            right = 1 + anchor % SIZE
            one.token_ids[anchor + 1 : anchor + 1 + right] = torch.tensor(drafted(reference, one, anchor)[:right])
    expected = []
    for one in samples:
        for anchor in range(one.prompt_tokens, len(one.token_ids) - SIZE):
            said = one.token_ids[anchor + 1 : anchor + 1 + SIZE].tolist()
            block_of = drafted(reference, one, anchor)
            expected.append([block_of[: at + 1] == said[: at + 1] for at in range(SIZE)])
    shares = torch.tensor(expected).double().mean(0)
    found = measure_acceptance(
        block, cast(SampleStore, ListedSamples(samples)), DRAFT_IDS, [[0, 1], [2]], steps=SIZE, temperature=0.8
    )
    assert found.greedy == pytest.approx(shares.tolist())
    assert found.greedy_rows == len(expected)
    assert 0.0 < shares[-1] < shares[0] < 1.0


def test_the_loss_is_that_of_the_formula(tmp_path: Path) -> None:
    """.1 cross-entropy and .9 L1 of each distribution, fading by position, and the confidence's cross-entropy."""
    block = small_block()
    one = replace(SAMPLES[1], top_probs=SAMPLES[1].top_probs / SAMPLES[1].top_probs.sum(-1, keepdim=True))
    reference = written(block, tmp_path).draft(one.token_ids, one.states, anchors(one, 2))
    total, scale = 0.0, sum(torch.exp(torch.tensor(-step / 4.0)).item() for step in range(SIZE))
    for place, anchor in enumerate(anchors(one, 2)):
        for step in range(min(SIZE, len(one.token_ids) - 1 - anchor)):
            target = torch.zeros(len(DRAFT_IDS), dtype=torch.float64)
            wanted = anchor + step - one.prompt_tokens
            target[one.top_ids[wanted]] = one.top_probs[wanted].double()
            said = reference.logits[place, step].log_softmax(-1)
            distance = (said.exp() - target).abs().sum()
            confidence = binary_cross_entropy(reference.confidence[place, step], 1 - distance / 2)
            own = -0.1 * (target * said).sum() + 0.9 * distance + confidence
            total += float(own) * torch.exp(torch.tensor(-step / 4.0)).item() / scale
    found = block.loss(make_batch([one], SIZE, every=2), SIZE)
    assert float(found.loss.detach()) == pytest.approx(total / len(anchors(one, 2)), rel=1e-4)


def test_steps_along_the_gradient_lower_the_loss() -> None:
    block = small_block()
    batch = make_batch(SAMPLES, SIZE, every=block.every)
    weights = list(block.weights.values())
    optimiser = torch.optim.SGD(weights, lr=1e-2)
    losses = []
    for _ in range(4):
        loss = block.loss(batch, SIZE).loss
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses == sorted(losses, reverse=True)
    assert all(weight.grad is not None and bool(weight.grad.any()) for weight in weights)


def test_drafts_do_not_learn_from_the_confidence() -> None:
    block = small_block()
    batch = make_batch(SAMPLES, SIZE, every=block.every)
    found = block.confidence(batch, SIZE).sum()
    found.backward()  # type: ignore[no-untyped-call]
    learning = {name for name, weight in block.weights.items() if weight.grad is not None}
    assert learning == {"confidence_head.proj.weight", "confidence_head.proj.bias"}


def test_the_written_folder_says_how_it_drafts(tmp_path: Path) -> None:
    found = written(small_block(), tmp_path)
    assert torch.equal(found.draft_ids, DRAFT_IDS)
    wanted = {
        "speculators_model_type": "dspark",
        "aux_hidden_state_layer_ids": [1, 2, 4],
        "block_size": SIZE,
        "sample_from_anchor": True,
        "draft_vocab_size": len(DRAFT_IDS),
        "markov_rank": 6,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    assert {name: found.config[name] for name in wanted} == wanted
    assert found.config["transformer_layer_config"]["model_type"] == "qwen3"
    assert found.weights["fc.weight"].shape == (HIDDEN, 3 * HIDDEN)
