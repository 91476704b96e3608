"""From a draft model's logits to a token and a confidence; and that drawn tokens have the reported distribution.

Planted bugs that these tests have caught: the noise of the target's own choice; one number for a position however
often it is drafted; probabilities of temperature 1 for every slot; an infinite lead; another slot's temperature;
logits overwritten.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from faser.engine.contract.plan import SequenceStart
from faser.engine.execution.drafting.samplers import (
    DraftRows,
    DraftSampler,
    GreedyDraftSampler,
    ProbabilisticDraftSampler,
    SampleAndMatchDraftSampler,
)
from faser.engine.execution.sampling.distribution import draw, fixed_point_probs, scale
from faser.engine.execution.sampling.kernels import race
from faser.engine.execution.sampling.parameters import Purpose, SamplingState, noise_words
from faser.engine.execution.sampling.sampler import Sampler
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import library_path
from faser.kernels.interface.sampling import SamplingKernels
from faser.types.sampling import SamplingParams
from tests.engine.execution.sampling.sampled import sample

VOCAB = 12


def start(state: SamplingState, slot: int, temperature: float, seed: int = 0) -> None:
    sampling = SamplingParams(temperature=temperature)
    state.start(SequenceStart(slot=slot, sampling=sampling, seed=seed, prompt_len=1, token_ids=(1,)))


def rows(slots: list[int], positions: list[int], draft_start: int = 2) -> DraftRows:
    starts = np.full(len(slots), draft_start)
    return DraftRows(slots=np.array(slots), positions=np.array(positions), draft_starts=starts)


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def test_greedy_takes_the_most_likely_token_whatever_the_temperature() -> None:
    choice = GreedyDraftSampler()
    logits = random_logits(5)
    found = choice.choose(logits, rows([0] * 5, list(range(2, 7))))
    ordered = logits.sort(-1, descending=True)
    assert found.token_ids.tolist() == ordered.indices[:, 0].tolist()
    np.testing.assert_array_equal(found.margins, (ordered.values[:, 0] - ordered.values[:, 1]).numpy())
    assert found.probs is None


def test_margins_are_finite_whatever_the_logits() -> None:
    logits = torch.full((3, VOCAB), -torch.inf)
    logits[0, 4] = 1.0
    logits[1] = torch.nan
    state = SamplingState(3)
    for slot in range(3):
        start(state, slot, 1.0)
    for choice in (GreedyDraftSampler(), ProbabilisticDraftSampler(state)):
        found = choice.choose(logits.clone(), rows([0, 1, 2], [2, 3, 4]))
        assert found.margins.tolist() == [100.0, 0.0, 0.0]
        assert 0 <= found.token_ids.min() <= found.token_ids.max() < VOCAB


def test_a_drawn_token_has_the_law_that_is_reported() -> None:
    """Oracles: softmax in float64; for the tokens chi-square over 40,000 seeds, 99.99 % quantile."""
    num_slots, temperature = 40_000, 1.4
    state = SamplingState(num_slots)
    choice = ProbabilisticDraftSampler(state)
    for slot in range(num_slots):
        start(state, slot, temperature, seed=slot)
    logits = random_logits(1).expand(num_slots, -1).contiguous()
    found = choice.choose(logits, rows(list(range(num_slots)), [17] * num_slots))
    assert found.probs is not None
    distribution = (logits[0].double() / temperature).softmax(-1)
    torch.testing.assert_close(found.probs, distribution.expand(num_slots, -1), atol=1e-6, rtol=0)
    counts = np.bincount(found.token_ids, minlength=VOCAB)
    expected = distribution.numpy() * num_slots
    assert ((counts - expected) ** 2 / expected).sum() < 37.4  # 11 degrees of freedom


def test_a_greedy_request_among_sampled_ones_is_a_point_mass() -> None:
    state = SamplingState(2)
    choice = ProbabilisticDraftSampler(state)
    start(state, 0, 0.0)
    start(state, 1, 1.0)
    logits = random_logits(2, seed=3)
    found = choice.choose(logits, rows([0, 1], [4, 4]))
    assert found.probs is not None
    assert found.token_ids[0] == logits[0].argmax()
    assert found.probs[0].tolist() == [float(i == logits[0].argmax()) for i in range(VOCAB)]
    assert (found.probs.sum(-1) - 1).abs().max() < 1e-12
    assert found.probs[1, found.token_ids[1]] > 0


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    """Slots and neighbours are exchanged; confidences stay those of the logits before the draw."""
    state = SamplingState(4)
    choice = ProbabilisticDraftSampler(state)
    for slot, seed in enumerate((7, 8, 7, 9)):
        start(state, slot, 1.0, seed)
    logits = random_logits(2, seed=5)
    one = choice.choose(logits[[0, 1]], rows([0, 1], [30, 31]))
    other = choice.choose(logits[[1, 1, 0]], rows([1, 3, 2], [31, 2, 30]))
    assert (one.token_ids[0], one.token_ids[1]) == (other.token_ids[2], other.token_ids[0])
    two = logits.topk(2).values
    np.testing.assert_allclose(one.margins, (two[:, 0] - two[:, 1]).numpy(), rtol=1e-6)


def test_a_draw_says_nothing_of_the_targets_choice_nor_of_the_next_drafts() -> None:
    """Were draft and target drawn with one number, a refused draft would tell what the target is to choose;
    and a position that is drafted again may not repeat the draw that was already verified.

    Oracle: independent draws agree with probability sum of p squared.
    """
    num_slots = 5000
    state = SamplingState(num_slots)
    choice = ProbabilisticDraftSampler(state)
    for slot in range(num_slots):
        start(state, slot, 1.0, seed=slot)
    logits = (random_logits(1) / 3).expand(num_slots, -1).contiguous()
    asked = rows(list(range(num_slots)), [9] * num_slots)
    drafted = choice.choose(logits, asked).token_ids
    again = choice.choose(logits, rows(list(range(num_slots)), [9] * num_slots, draft_start=3)).token_ids
    fixed_probs = fixed_point_probs(scale(logits.clone(), torch.ones(num_slots)))
    seeds = np.arange(num_slots, dtype=np.uint64)
    targets = [
        draw(fixed_probs, race(noise_words(seeds, asked.positions, purpose), VOCAB, logits.device)).numpy()
        for purpose in (Purpose.TOKEN, Purpose.ACCEPT, Purpose.REPLACE)
    ]
    agreement = float((logits[0].double().softmax(-1) ** 2).sum())
    for other in (*targets, again):
        assert abs((other == drafted).mean() - agreement) < 0.03


PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=4),
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(temperature=0.9, min_p=0.1, top_k=6, top_p=0.95),
)


def coupled(
    num_slots: int, params: tuple[SamplingParams, ...] = PARAMS
) -> tuple[SampleAndMatchDraftSampler, Sampler]:
    """A coupled choice, and the target's own sampler, with the same sequences in their slots."""
    sampler = Sampler(num_slots, VOCAB, ())
    for slot in range(num_slots):
        begun = SequenceStart(
            slot=slot, sampling=params[slot % len(params)], seed=31 * slot, prompt_len=1, token_ids=(1,)
        )
        sampler.start(begun)
    return SampleAndMatchDraftSampler(sampler.state), sampler


def test_a_coupled_draft_is_what_the_target_would_choose_from_the_same_logits() -> None:
    """Oracle: the target's sampler. Caught: noise of drafts, or of their start; no truncation; no temperature."""
    choice, sampler = coupled(200)
    logits, slots = random_logits(200), list(range(200))
    positions = [2 + slot % 9 for slot in slots]
    expected = [row.token_id for row in sample(sampler, logits.clone(), slots, positions)]
    assert choice.choose(logits, rows(slots, positions)).token_ids.tolist() == expected
    assert len(set(expected)) > 5


def test_coupled_drafts_agree_with_the_target_more_often_than_the_likeliest_token() -> None:
    """The target's logits are the draft model's with noise: each draft is held against the target's choice."""
    num_slots = 4000
    choice, sampler = coupled(num_slots, (SamplingParams(temperature=1.0),))
    draft_logits = random_logits(num_slots) / 3
    target_logits = draft_logits + 0.2 * torch.randn(num_slots, VOCAB, generator=torch.Generator().manual_seed(1))
    at = rows(list(range(num_slots)), [7] * num_slots)
    sampled = np.array(
        [row.token_id for row in sample(sampler, target_logits, at.slots.tolist(), [7] * num_slots)]
    )

    by_coupling = (choice.choose(draft_logits, at).token_ids == sampled).mean()
    by_likeliest = (GreedyDraftSampler().choose(draft_logits, at).token_ids == sampled).mean()

    assert by_coupling > 0.7 > 0.5 > by_likeliest


def test_the_lead_of_a_coupled_draft_is_over_the_best_other_token() -> None:
    choice, _ = coupled(40, (SamplingParams(temperature=0.5),))
    logits = random_logits(40)
    found = choice.choose(logits.clone(), rows(list(range(40)), [3] * 40))
    for row, (token_id, margin) in enumerate(zip(found.token_ids, found.margins, strict=True)):
        others = torch.cat((logits[row, :token_id], logits[row, token_id + 1 :]))
        assert abs(margin - float(logits[row, token_id] - others.max()) / 0.5) < 1e-4
    assert (found.margins < 0).any()
    assert found.probs is None


@pytest.mark.parametrize(
    "make",
    [
        lambda _state, kernels: GreedyDraftSampler(kernels),
        lambda state, kernels: SampleAndMatchDraftSampler(state, kernels=kernels),
        lambda state, kernels: ProbabilisticDraftSampler(state, kernels=kernels),
    ],
)
def test_drafts_are_the_same_by_kernels_and_by_tensors(
    make: Callable[[SamplingState, SamplingKernels | None], DraftSampler], kernel_cache: Path
) -> None:
    """Tokens, margins and probabilities, bit for bit; rows of NaN, of -inf, of one number among them."""
    kernels = NativeBackend(library_path(cache_dir=kernel_cache), num_threads=2).sampling_kernels
    state = SamplingState(20)
    choices = [make(state, None), make(state, kernels)]
    for slot in range(20):
        sampling = PARAMS[slot % len(PARAMS)]
        state.start(SequenceStart(slot=slot, sampling=sampling, seed=5 * slot, prompt_len=1, token_ids=(1,)))
    for position in range(2, 8):
        logits = random_logits(20, seed=position)
        logits[position] = torch.nan
        logits[position + 1] = -torch.inf
        logits[position + 2, 1:] = -torch.inf
        asked, before = rows(list(range(20)), [position] * 20), logits.clone()
        plain, quick = (choice.choose(logits, asked) for choice in choices)
        assert plain.token_ids.tolist() == quick.token_ids.tolist()
        assert plain.margins.tolist() == quick.margins.tolist()
        assert plain.margins[position] == plain.margins[position + 1] == 0.0
        assert abs(plain.margins).max() <= 100.0
        assert (plain.probs is None) == (quick.probs is None)
        if plain.probs is not None and quick.probs is not None:
            assert torch.equal(plain.probs, quick.probs)
            assert (plain.probs.sum(-1) - 1).abs().max() < 1e-12
        torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)
