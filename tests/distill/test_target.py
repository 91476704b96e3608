"""States and distributions of a target. Oracle: transformers, one conversation at a time."""

from pathlib import Path

import pytest
import torch
import transformers

from faser.distill.target import Passage, batches
from tests.distill.small_target import load_small_target

LENGTHS = ((5, 2), (33, 20), (1, 1), (17, 3), (40, 39))  # tokens, and those of the prompt


def passages() -> list[Passage]:
    generator = torch.Generator().manual_seed(1)
    return [
        Passage(token_ids=torch.randint(512, (tokens,), generator=generator), first_row=prompt)
        for tokens, prompt in LENGTHS
    ]


def test_states_and_distributions_are_those_of_transformers(small_target: Path) -> None:
    """Seen to catch: states of the layer before or after, of another row, of a neighbour's context."""
    target = load_small_target(small_target)
    found = target.states((0, 2, 5), top=6).compute(passages())
    model = transformers.AutoModelForCausalLM.from_pretrained(small_target, dtype=torch.float32)
    for passage, states in zip(passages(), found, strict=True):
        with torch.inference_mode():
            expected = model(passage.token_ids[None], output_hidden_states=True)
        hidden = torch.cat([expected.hidden_states[layer][0] for layer in (0, 2, 5)], -1)
        torch.testing.assert_close(states.states.float(), hidden, rtol=1e-2, atol=1e-2)  # of bfloat16
        probs = expected.logits[0, passage.first_row : -1].softmax(-1)
        top = probs.topk(6, dim=-1)
        assert torch.equal(states.top_ids.long(), top.indices)
        torch.testing.assert_close(states.top_probs.float(), top.values, rtol=2e-3, atol=1e-4)


def test_neighbouring_passages_share_a_batch_while_their_blocks_fit() -> None:
    assert batches([16, 16, 16], 48) == [range(3)]
    assert batches([17, 16, 16, 1], 48) == [range(2), range(2, 4)]
    assert batches([48, 48], 48) == [range(1), range(1, 2)]
    assert batches([], 48) == []
    assert batches([1] * 7, 48) == [range(3), range(3, 6), range(6, 7)]


def test_more_rows_than_fit_are_our_own_mistake(small_target: Path) -> None:
    target = load_small_target(small_target).states((1,), top=2)
    long = Passage(token_ids=torch.zeros(300, dtype=torch.int64), first_row=1)
    with pytest.raises(AssertionError, match="300 rows; at most 256 fit"):
        target.compute([long])
