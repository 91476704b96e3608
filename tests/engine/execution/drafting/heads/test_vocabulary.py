"""Drafts of a small vocabulary: what the same sampler chooses where all other tokens have a probability of 0.
And how large it is, which depends on what the target says.

Planted bugs that these tests have caught: rows in the order of the checkpoint, not of token ids; probabilities
at the places of the small vocabulary; tokens that could not be drafted count as refused; ends count by their ids;
counts never fade; a draft is compared with the last token of its step.
"""

import numpy as np
import pytest
import torch

from faser.engine.contract.plan import SequenceStart
from faser.engine.execution.drafting.heads.vocabulary import CHOOSE_EVERY, DraftVocabulary
from faser.engine.execution.drafting.samplers import (
    DraftRows,
    DraftSampler,
    DraftVocabularySampler,
    GreedyDraftSampler,
    ProbabilisticDraftSampler,
    SampleAndMatchDraftSampler,
)
from faser.engine.execution.sampling.parameters import SamplingState
from faser.types.sampling import SamplingParams

VOCAB, DRAFT_VOCAB, NUM_ROWS = 300, 60, 8
SIZES, END = (10, 20, 40, 80), 70


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


class Text:
    """Three tokens a step, two of a sequence whose first token is drafted. prices: of passes, by size."""

    def __init__(self, prices: tuple[float, ...] = (0.05, 0.07, 0.1, 0.16), ends: tuple[int, ...] = ()) -> None:
        self.vocabulary = DraftVocabulary(SIZES, pass_prices=prices, vocab_size=VOCAB, ends=ends, start=40)
        self._rng = np.random.default_rng(5)

    def read(self, shares: tuple[float, ...], *, right: float = 0.8, times: int = 4) -> int:
        """Return the size after this text.

        shares: of tokens below 10, 20, 40, 80, 300. right: the share of drafts that are, of those that can be.
        """
        borders, count = np.array((0, *SIZES, VOCAB)), times * CHOOSE_EVERY
        which = self._rng.choice(len(shares), count, p=shares)
        said = self._rng.integers(borders[which], borders[which + 1]).tolist()
        for at, lucky in zip(range(0, count - 2, 3), self._rng.random(count) < right, strict=False):
            other, first, second = said[at : at + 3]
            self.vocabulary.drafted([7], [first if lucky and first < self.vocabulary.size else (first + 1) % 10])
            self.vocabulary.commit([3, 7], [1, 2], [other, first, second])
        return self.vocabulary.size


NARROW, USUAL, WIDE = (0.88, 0.11, 0.01, 0.0, 0.0), (0.6, 0.17, 0.14, 0.06, 0.03), (0.3, 0.2, 0.15, 0.3, 0.05)


def test_the_vocabulary_follows_the_text() -> None:
    text = Text()
    assert [text.read(shares) for shares in (USUAL, WIDE, USUAL, NARROW, WIDE)] == [40, 80, 40, 20, 80]


def test_a_size_stays_while_the_text_does() -> None:
    """What a size could not draft does not count against the next one."""
    text = Text()
    assert [text.read(WIDE, times=1) for _ in range(12)][2:] == [80] * 10


@pytest.mark.parametrize(("right", "size"), [(0.9, 80), (0.05, 10)])
def test_a_layer_that_is_seldom_right_is_made_cheap(right: float, size: int) -> None:
    assert Text().read(WIDE, right=right) == size


def test_rows_that_cost_much_are_not_paid_for_tokens_that_are_rare() -> None:
    assert (
        Text(prices=(0.05, 0.1, 0.2, 0.4)).read(WIDE) < 80 <= Text(prices=(0.05, 0.051, 0.052, 0.053)).read(USUAL)
    )


def test_tokens_that_end_generation_belong_to_every_size() -> None:
    text = Text(ends=(END,))
    for _ in range(CHOOSE_EVERY // 2):
        text.vocabulary.drafted([0], [END])
        text.vocabulary.commit([0], [2], [END, 3])
    assert text.vocabulary.size == SIZES[0]


def test_text_alone_is_counted_where_nothing_is_drafted() -> None:
    vocabulary = Text().vocabulary
    changes = [vocabulary.commit([0, 1], [64, 64], [5, 70] * 64) for _ in range(CHOOSE_EVERY // 128)]
    assert (changes.index(True), vocabulary.size) == (CHOOSE_EVERY // 128 - 1, 80)
    assert not vocabulary.commit([], [], [])
