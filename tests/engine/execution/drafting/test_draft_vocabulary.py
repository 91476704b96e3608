"""Drafts of a small vocabulary: what the same sampler chooses where all other tokens have a probability of 0.

Planted bugs that these tests have caught: rows in the order of the checkpoint, not of token ids; probabilities
at the places of the small vocabulary.
"""

import numpy as np
import pytest
import torch

from faser.engine.contract.plan import SequenceStart
from faser.engine.execution.drafting.samplers import (
    DraftRows,
    DraftSampler,
    DraftVocabularySampler,
    GreedyDraftSampler,
    ProbabilisticDraftSampler,
    SampleAndMatchDraftSampler,
)
from faser.engine.execution.sampling.parameters import SamplingState
from faser.types import SamplingParams

VOCAB, DRAFT_VOCAB, NUM_ROWS = 300, 60, 8


def sampling_state() -> SamplingState:
    state = SamplingState(NUM_ROWS)
    for slot in range(NUM_ROWS):
        params = SamplingParams(temperature=0.3 * (slot % 4), top_p=0.9, top_k=20 if slot % 2 else 0)
        state.start(SequenceStart(slot=slot, sampling=params, seed=slot, prompt_len=1, token_ids=(0, 1)))
    return state


def samplers() -> list[DraftSampler]:
    state = sampling_state()
    return [GreedyDraftSampler(), SampleAndMatchDraftSampler(state), ProbabilisticDraftSampler(state)]


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("kind", range(3))
def test_drafts_are_those_of_the_whole_vocabulary_without_the_other_tokens(kind: int, ordered: bool) -> None:
    """Oracle: the same sampler over logits of the whole vocabulary, minus infinity where there is no row."""
    generator = torch.Generator().manual_seed(kind)
    draft_ids = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB]
    draft_ids = draft_ids.sort().values if ordered else draft_ids
    small = 3 * torch.randn(NUM_ROWS, DRAFT_VOCAB, generator=generator)
    small[3, :2] = 20.0  # a tie, which the lowest id wins
    whole = torch.full((NUM_ROWS, VOCAB), -torch.inf).index_copy_(1, draft_ids, small)
    positions = np.arange(NUM_ROWS) + 5
    rows = DraftRows(slots=np.arange(NUM_ROWS), positions=positions, draft_starts=positions)
    wanted = samplers()[kind].choose(whole.clone(), rows)
    given = small.clone()
    found = DraftVocabularySampler(samplers()[kind], draft_ids, VOCAB).choose(given, rows)
    assert found.token_ids.tolist() == wanted.token_ids.tolist()
    np.testing.assert_allclose(found.margins, wanted.margins)
    assert torch.equal(given, small), "logits are not written to"
    if wanted.probs is None:
        assert found.probs is None
    else:
        assert found.probs is not None
        torch.testing.assert_close(found.probs, wanted.probs)
