"""What a head is expected to bring. Oracle: the same sums with the prices written out.

Planted bugs seen to be caught: the first token of a draft counted twice, passes that cost nothing.

Measured acceptance. Oracle: drafts made one by one from each row, and held against what the answers say.
"""

from dataclasses import replace
from typing import cast

import pytest
import torch

from faser.distill.acceptance import Expected, expected_speedup, measure_acceptance, speedup_in_words
from faser.distill.batch import SampleStore, TrainingSample, make_batch
from faser.engine.contract.step_times import StepTimes
from faser.engine.control.step_cost import CostModel
from tests.distill.small import DRAFTS, SAMPLES, STEPS, VOCAB, ListedSamples, sample, small_head

ACCEPTED = (0.7, 0.4, 0.2)


def costs(pass_s: float, *, in_blocks: bool = False) -> CostModel:
    times = StepTimes.proportional(step_s=1.0, row_s=0.05, pass_s=pass_s, pass_row_s=0.01)
    return CostModel(times, block_tokens=8 if in_blocks else None)


def by_hand(requests: int, length: int, pass_s: float) -> float:
    accepted = sum(ACCEPTED[:length])
    step_s = 1.0 + 0.05 * requests * (1 + length)
    passes_s = length * (pass_s + 0.01 * requests) + 0.01 * round(accepted * requests)
    return (1 + accepted) * (1.0 + 0.05 * requests) / (step_s + passes_s)


@pytest.mark.parametrize("requests", [1, 4, 32])
@pytest.mark.parametrize("pass_s", [0.02, 0.3])
def test_the_best_length_is_chosen_and_priced(requests: int, pass_s: float) -> None:
    found = expected_speedup(costs(pass_s), ACCEPTED, requests)
    speedups = {length: by_hand(requests, length, pass_s) for length in (1, 2, 3)} | {0: 1.0}
    assert found.speedup == pytest.approx(max(speedups.values()), rel=1e-6)
    assert speedups[found.draft_tokens] == max(speedups.values())


@pytest.mark.parametrize("requests", [1, 4])
def test_a_block_takes_one_pass_whatever_its_length(requests: int) -> None:
    found = expected_speedup(costs(0.1, in_blocks=True), ACCEPTED, requests)
    speedups = {}
    for length in (1, 2, 3):
        accepted = sum(ACCEPTED[:length])
        pass_s = 0.1 + 0.01 * (requests * (length + 1) + round(accepted * requests))  # an anchor's row each
        step_s = 1.0 + 0.05 * requests * (1 + length)
        speedups[length] = (1 + accepted) * (1.0 + 0.05 * requests) / (step_s + pass_s)
    assert found.speedup == pytest.approx(max(speedups.values()), rel=1e-6)
    assert speedups[found.draft_tokens] == max(speedups.values())


def test_drafts_that_cost_more_than_they_bring_are_not_made() -> None:
    found = expected_speedup(costs(2.0), ACCEPTED, 4)
    assert found == Expected(requests=4, draft_tokens=0, speedup=1.0)
    assert speedup_in_words([found]).startswith("not worth using")


def test_the_sentence_names_the_largest_load_at_which_drafts_pay() -> None:
    found = [
        Expected(requests=requests, draft_tokens=2, speedup=speedup)
        for requests, speedup in ((1, 1.5), (4, 1.1), (16, 1.01))
    ]
    assert speedup_in_words(found) == (
        "worth using at up to 4 requests at once: answers at temperature 0 are expected up to 1.50 times as fast"
    )
    assert "at one request at a time" in speedup_in_words(found[:1])


DRAFT_IDS = torch.arange(3, 3 + 2 * DRAFTS, 2)


def said_by_the_head(tokens: int, prompt: int, seed: int) -> TrainingSample:
    """A conversation that now and then says what the head drafts, so that drafts are accepted."""
    head, found = small_head(), sample(tokens, prompt, seed)
    for row in range(prompt, tokens - STEPS, STEPS + 1):
        for step in range(STEPS):
            output = head.outputs(make_batch([found], step + 1), step + 1)[step][row - prompt]
            token = DRAFT_IDS[int((head.logits_input(output[None]) @ head.head().T).argmax())]
            found.token_ids[row + 1 + step] = token
    return found


def accepted(one: TrainingSample) -> list[list[bool]]:
    """For each row from which a whole draft fits: whether tokens 0 … i are all accepted."""
    head = small_head()
    found = []
    for row in range(one.prompt_tokens, len(one.token_ids) - STEPS):
        drafted: list[int] = []
        for step in range(STEPS):
            tokens = torch.cat((one.token_ids[: row + 1], torch.tensor(drafted, dtype=torch.int64)))
            tokens = torch.cat((tokens, torch.zeros(len(one.token_ids) - len(tokens), dtype=torch.int64)))
            output = head.outputs(make_batch([replace(one, token_ids=tokens)], step + 1), step + 1)[step]
            logits = head.logits_input(output[row - one.prompt_tokens][None]) @ head.head().T
            drafted.append(int(DRAFT_IDS[int(logits.argmax())]))
        said = one.token_ids[row + 1 : row + 1 + STEPS].tolist()
        found.append([drafted[: at + 1] == said[: at + 1] for at in range(STEPS)])
    return found


def test_acceptance_is_that_of_drafts_made_one_by_one() -> None:
    samples = [*SAMPLES, said_by_the_head(20, 4, 50), said_by_the_head(13, 3, 60)]
    store = cast(SampleStore, ListedSamples(samples))
    found = measure_acceptance(small_head(), store, DRAFT_IDS, [[0, 1], [2, 3, 4]], steps=STEPS, temperature=0.8)
    expected = torch.tensor([each for one in samples for each in accepted(one)]).double()
    assert expected[:, 2].any()
    assert found.greedy == pytest.approx(expected.mean(0).tolist())
    assert found.greedy_rows == len(expected)
    assert (found.sampled, found.sampled_rows) == ((), 0)


def test_the_overlap_of_sampled_answers_is_summed_over_tokens() -> None:
    """Oracle: both distributions over the head's vocabulary, at the temperature of the answer."""
    one = replace(SAMPLES[1], greedy=False)
    head = small_head()
    found = measure_acceptance(
        head, cast(SampleStore, ListedSamples([one])), DRAFT_IDS, [[0]], steps=STEPS, temperature=0.5
    )
    batch = make_batch([one], STEPS)
    shares = torch.ones(int(batch.valid.all(0).sum()), dtype=torch.float64)
    expected = []
    for step, output in enumerate(head.outputs(batch, STEPS)):
        draft = (head.logits_input(output) @ head.head().T / 0.5).softmax(-1)
        for at in range(len(shares)):
            target = torch.zeros(DRAFTS)
            target[batch.wanted_ids[step, at]] = batch.wanted_probs[step, at] ** 2
            shares[at] *= float(torch.minimum(target / target.sum(), draft[at].detach()).sum())
        expected.append(float(shares.mean()))
    assert found.sampled == pytest.approx(expected, rel=1e-5)
    assert found.greedy == ()
    assert VOCAB > DRAFTS
