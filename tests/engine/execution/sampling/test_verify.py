"""The verifiers with a real sampler, as the executor uses them: ragged drafts of many sequences in one batch.

Results that follow from sampled tokens alone are those of the rule, whoever else is in the step.
"""

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from faser.config.speculation import SpeculationConfig
from faser.engine.execution.sampling.rejection import Block, Rejection
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.sampling.verify import (
    SampleAndMatch,
    Synthetic,
    Verifier,
    make_verifier,
    matched,
)
from faser.types.answer import PositionLogprobs, SequenceError
from faser.types.arrays import NO_TOKEN
from faser.types.sampling import SamplingParams
from tests.engine.execution.sampling.sampled import Drafted, Outcome, layout, outcomes, sample
from tests.engine.execution.sampling.test_sampler import EOS, PROMPT, VOCAB, random_sampling, starting

# Of one sequence: drafted tokens, and what its rows choose.
OneSequence = tuple[tuple[int, ...], tuple[int, ...]]


def one_by_one(sequences: Sequence[Drafted], chosen: Sequence[int]) -> list[Outcome]:
    """The rule in words."""
    found, left = [], list(chosen)
    for each in sequences:
        own, left = left[: len(each.draft) + 1], left[len(each.draft) + 1 :]
        right = 0
        while right < len(each.draft) and own[right] == each.draft[right]:
            right += 1
        is_bad = own[right] == NO_TOKEN
        token_ids = tuple(own[: right + (not is_bad)])
        found.append(Outcome(token_ids, error=SequenceError.NOT_FINITE if is_bad else None))
    return found


@st.composite
def one_sequence(draw: st.DrawFn) -> OneSequence:
    draft = tuple(draw(st.lists(st.integers(0, 1), max_size=4)))
    size = len(draft) + 1
    return draft, tuple(draw(st.lists(st.sampled_from([NO_TOKEN, 0, 1]), min_size=size, max_size=size)))


@given(st.lists(one_sequence(), min_size=1, max_size=5))
def test_tokens_are_matched_as_in_words(steps: list[OneSequence]) -> None:
    sequences = [Drafted(slot, 10 * slot, draft) for slot, (draft, _) in enumerate(steps)]
    chosen = [token_id for _, tokens in steps for token_id in tokens]
    assert outcomes(matched(layout(sequences), np.array(chosen))) == one_by_one(sequences, chosen)


def test_tokens_behind_the_first_one_that_nobody_drafted_are_dropped() -> None:
    (verdict,) = outcomes(matched(layout([Drafted(0, 6, (7, 8, 9))]), np.array([7, 4, 9, 3])))
    assert verdict == Outcome(token_ids=(7, 4))


NUM_TOKENS = 9
VERIFIERS: list[Callable[[Sampler], Verifier]] = [SampleAndMatch, Rejection, Block]


class Table:
    """Logits as a function of position and the token before: a model without a network."""

    def __init__(self, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        self._rows = torch.randn(64, VOCAB, generator=rng) * 2

    def logits(self, position: int, last: int) -> Tensor:
        return self._rows[(7 * position + last) % 64]

    def of(self, each: Drafted, last: int) -> Tensor:
        """[len(draft) + 1, V]"""
        before = (last, *each.draft)
        return torch.stack([self.logits(each.position + i, token_id) for i, token_id in enumerate(before)])


def plainly(
    table: Table, sampling: SamplingParams, seed: int
) -> tuple[list[int], list[PositionLogprobs | None], str | None]:
    """NUM_TOKENS tokens one by one, their reports, and the error that ended them."""
    sampler = Sampler(1, VOCAB, EOS)
    sampler.start(starting(sampling, seed=seed))
    tokens: list[int] = []
    reports: list[PositionLogprobs | None] = []
    for position in range(len(PROMPT), len(PROMPT) + NUM_TOKENS):
        last = tokens[-1] if tokens else PROMPT[-1]
        (row,) = sample(sampler, table.logits(position, last)[None].clone(), [0], [position])
        if row.error is not None:
            return tokens, reports, row.error
        tokens.append(row.token_id)
        reports.append(row.logprobs)
        sampler.accept([0], [row.token_id])
    return tokens, reports, None


def guess(rng: random.Random, truth: list[int], at: int) -> tuple[int, ...]:
    """A draft of 0 … 5 tokens that is often right for a while."""
    right = truth[at : at + rng.randrange(6)]
    return tuple(token_id if rng.random() < 0.75 else rng.randrange(VOCAB) for token_id in right)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_coupled_tokens_and_reports_are_those_of_an_engine_that_never_drafts(seed: int) -> None:
    """Oracle: Sampler.sample, token by token, each request alone. Any mixture of features, two samples alike."""
    rng, table = random.Random(seed), Table(seed)
    params = [random_sampling(rng) for _ in range(4)]
    params.append(params[0])  # a second sample of the same request differs by its seed only
    expected = [plainly(table, sampling, seed + i) for i, sampling in enumerate(params)]
    sampler = Sampler(8, VOCAB, EOS)
    slots = rng.sample(range(8), len(params))
    for i, slot in enumerate(slots):
        sampler.start(starting(params[i], slot=slot, seed=seed + i))
    found: list[list[int]] = [[] for _ in params]
    reports: list[list[PositionLogprobs | None]] = [[] for _ in params]
    errors: list[SequenceError | None] = [None] * len(params)

    while going := [i for i in range(len(params)) if len(found[i]) < NUM_TOKENS and errors[i] is None]:
        rng.shuffle(going)
        sequences = [
            Drafted(
                slot=slots[i],
                position=len(PROMPT) + len(found[i]),
                draft=guess(rng, expected[i][0], len(found[i])),
            )
            for i in going
        ]
        last = [found[i][-1] if found[i] else PROMPT[-1] for i in going]
        logits = torch.cat([table.of(each, before) for each, before in zip(sequences, last, strict=True)])
        for i, verdict in zip(
            going, outcomes(SampleAndMatch(sampler).verify(logits, layout(sequences), None)), strict=True
        ):
            errors[i] = verdict.error
            found[i] += verdict.token_ids
            reports[i] += verdict.logprobs or [None] * len(verdict.token_ids)
            sampler.accept([slots[i]] * len(verdict.token_ids), verdict.token_ids)

    for i, (tokens, plain_reports, error) in enumerate(expected):
        assert errors[i] == error
        assert found[i][:NUM_TOKENS] == tokens
        assert reports[i][:NUM_TOKENS] == plain_reports


def judge_alone(
    make: Callable[[Sampler], Verifier],
    sampling: SamplingParams,
    logits: Tensor,
    draft: tuple[int, ...],
    probs: Tensor | None = None,
) -> Outcome:
    sampler = Sampler(1, VOCAB, EOS)
    sampler.start(starting(sampling))
    each = Drafted(slot=0, position=len(PROMPT), draft=draft)
    (verdict,) = outcomes(make(sampler).verify(logits.clone(), layout([each]), probs))
    return verdict


def peaked(*token_ids: int) -> Tensor:
    """One row per token, which is the most likely one there."""
    logits = torch.randn(len(token_ids), VOCAB, generator=torch.Generator().manual_seed(3))
    logits[range(len(token_ids)), token_ids] = 9.0
    return logits


@pytest.mark.parametrize("make", VERIFIERS)
@pytest.mark.parametrize(
    "draft, expected", [((), (4,)), ((4, 5), (4, 5, 6)), ((4, 7), (4, 5)), ((7, 5), (4,)), ((7, 7), (4,))]
)
def test_a_greedy_request_gets_the_most_likely_tokens(
    make: Callable[[Sampler], Verifier], draft: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    logits = peaked(4, 5, 6)[: len(draft) + 1]

    assert judge_alone(make, SamplingParams(temperature=0.0), logits, draft).token_ids == expected


@pytest.mark.parametrize("make", VERIFIERS)
@pytest.mark.parametrize("seed", range(3))
def test_a_sequence_without_a_draft_gets_the_token_of_the_plain_sampler(
    make: Callable[[Sampler], Verifier], seed: int
) -> None:
    """Although its neighbours drafted."""
    rng = random.Random(seed)
    params = [replace(random_sampling(rng), min_tokens=0, allowed_token_ids=None) for _ in range(6)]
    sampler = Sampler(6, VOCAB, EOS)
    for slot, sampling in enumerate(params):
        sampler.start(starting(sampling, slot=slot, seed=seed))
    sequences = [Drafted(slot=slot, position=len(PROMPT), draft=(1, 2, 3)[: 3 * (slot % 2)]) for slot in range(6)]
    logits = torch.randn(6 + 9, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    first = [0, 1, 5, 6, 10, 11]

    verdicts = outcomes(make(sampler).verify(logits.clone(), layout(sequences), None))

    for slot in (0, 2, 4):
        (plain,) = sample(sampler, logits[first[slot]][None].clone(), [slot], [len(PROMPT)])
        assert verdicts[slot].token_ids == (plain.token_id,)
        assert verdicts[slot].logprobs == (None if plain.logprobs is None else (plain.logprobs,))


@pytest.mark.parametrize("make", VERIFIERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bad_row_counts_only_where_it_is_reached(
    make: Callable[[Sampler], Verifier], temperature: float
) -> None:
    sampling = SamplingParams(temperature=temperature, logprobs=1)
    logits = peaked(4, 5, 6) * 4
    logits[2] = torch.nan

    cut_before = judge_alone(make, sampling, logits, (4, 7))
    logits[1] = torch.nan
    first_bad = judge_alone(make, sampling, logits[1:], (4, 5)[:1])

    assert cut_before.error is None
    assert cut_before.token_ids == (4, 5)
    assert first_bad == Outcome(error=SequenceError.NOT_FINITE)


@pytest.mark.parametrize("make", VERIFIERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft", [(4, 5), (4, 5, 6)])
def test_tokens_accepted_before_a_bad_row_come_with_its_error(
    make: Callable[[Sampler], Verifier], temperature: float, draft: tuple[int, ...]
) -> None:
    logits = peaked(4, 5, 6, 7)[: len(draft) + 1] * 4
    logits[2] = torch.nan
    sampling = SamplingParams(temperature=temperature, logprobs=1)

    verdict = judge_alone(make, sampling, logits, draft)

    assert (verdict.token_ids, verdict.error) == ((4, 5), SequenceError.NOT_FINITE)
    assert verdict.logprobs is not None
    assert [each.token_id for each in verdict.logprobs] == [4, 5]


@pytest.mark.parametrize("make", VERIFIERS)
def test_tokens_accepted_before_a_row_that_is_allowed_none_come_with_its_error(
    make: Callable[[Sampler], Verifier],
) -> None:
    sampling = SamplingParams(temperature=1.0, allowed_token_ids=(4,), bad_words=((4, 4, 4),))

    verdict = judge_alone(make, sampling, torch.zeros(6, VOCAB), (4,) * 5)

    assert verdict == Outcome((4, 4), error=SequenceError.NONE_ALLOWED)


@pytest.mark.parametrize("make", [Rejection, Block])
@pytest.mark.parametrize("num_drafts", [1, 2])
def test_drafts_fail_as_often_as_the_target_says(make: Callable[[Sampler], Verifier], num_drafts: int) -> None:
    """Token 0 has probability 1/2, nothing follows it, and the drafter proposes nothing else."""
    num = 4000
    sampler = Sampler(num, 4, EOS)
    for slot in range(num):
        sampler.start(starting(SamplingParams(), slot=slot, seed=slot))
    sequences = [Drafted(slot=slot, position=4, draft=(0,) * num_drafts) for slot in range(num)]
    rows = torch.full((num_drafts + 1, 4), -torch.inf)
    rows[0, :2] = 0.0
    rows[1] = torch.nan
    rows[2:] = 0.0
    drafted = torch.zeros(num_drafts * num, 4, dtype=torch.float64)
    drafted[:, 0] = 1.0

    verdicts = outcomes(make(sampler).verify(rows.repeat(num, 1), layout(sequences), drafted))

    failed = [each for each in verdicts if each.error is not None]
    assert {each.token_ids for each in failed} == {(0,)}
    assert {each.token_ids for each in verdicts if each.error is None} == {(1,)}
    assert len(failed) / num == pytest.approx(0.5, abs=0.04)


@pytest.mark.parametrize("make", VERIFIERS)
def test_judging_leaves_the_state_of_the_sampler_as_it_was(make: Callable[[Sampler], Verifier]) -> None:
    sampler = Sampler(1, VOCAB, EOS)
    sampler.start(starting(SamplingParams(frequency_penalty=1.0, repetition_penalty=1.3, logprobs=2)))
    each = Drafted(slot=0, position=len(PROMPT), draft=(4, 5))
    logits = peaked(4, 5, 6)

    first, again = (make(sampler).verify(logits.clone(), layout([each]), None) for _ in range(2))

    assert first == again


def test_penalties_of_a_row_see_the_drafted_tokens_before_it_and_no_others() -> None:
    """Token 4 leads everywhere, 5 follows; a token that was said falls behind."""
    logits = torch.zeros(3, VOCAB)
    logits[:, 4], logits[:, 5], logits[:, 6] = 1.9, 1.0, 0.9
    sampling = SamplingParams(temperature=0.0, presence_penalty=1.5)

    verdict = judge_alone(SampleAndMatch, sampling, logits, (4, 5))

    assert verdict.token_ids == (4, 5, 6)


@pytest.mark.parametrize("rates, length", [((1.0, 1.0, 1.0), 4), ((0.0,), 1), ((1.0, 0.0, 0.0), 2), ((1.0,), 2)])
def test_synthetic_acceptance_takes_drafts_and_ends_with_the_target_choice(
    rates: tuple[float, ...], length: int
) -> None:
    logits = peaked(4, 5, 6, 7)

    verdict = judge_alone(
        lambda sampler: Synthetic(sampler, rates), SamplingParams(temperature=0.0), logits, (9, 9, 9)
    )

    assert verdict.token_ids == (*(9,) * (length - 1), 3 + length)


def test_synthetic_rates_are_of_whole_prefixes() -> None:
    rates, num = (0.8, 0.6, 0.15), 20_000
    sampler = Sampler(num, 4, EOS)
    for slot in range(num):
        sampler.start(starting(SamplingParams(), slot=slot, seed=slot))
    sequences = [Drafted(slot=slot, position=4, draft=(1, 2, 3)) for slot in range(num)]

    verdicts = outcomes(Synthetic(sampler, rates).verify(torch.zeros(4 * num, 4), layout(sequences), None))

    lengths = [len(verdict.token_ids) - 1 for verdict in verdicts]
    for i, rate in enumerate(rates):
        assert sum(length > i for length in lengths) / num == pytest.approx(rate, abs=0.015)


@pytest.mark.parametrize(
    "method, drafting, expected",
    [
        ("standard", "greedy", SampleAndMatch),
        ("block", "greedy", SampleAndMatch),
        ("standard", "probabilistic", Rejection),
        ("block", "probabilistic", Block),
        ("synthetic", "greedy", Synthetic),
        ("synthetic", "probabilistic", Synthetic),
    ],
)
def test_the_verifier_fits_the_way_of_drafting(
    method: str, drafting: str, expected: type[object], caplog: pytest.LogCaptureFixture
) -> None:
    config = SpeculationConfig(
        rejection_sample_method=method, draft_sample_method=drafting, synthetic_acceptance_rates=(0.5,)
    )

    with caplog.at_level(logging.WARNING, "faser"):
        verifier = make_verifier(config, Sampler(1, VOCAB, EOS))

    assert type(verifier) is expected
    assert ("NOT THE MODEL" in caplog.text) == (method == "synthetic")


@pytest.mark.parametrize("make", VERIFIERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bad_row_accepts_nothing(make: Callable[[Sampler], Verifier], temperature: float) -> None:
    """Token 0 is what a row of NaN yields to whoever does not look."""
    logits = peaked(0, 5)
    logits[0] = torch.nan

    verdict = judge_alone(make, SamplingParams(temperature=temperature), logits, (0,))

    assert verdict == Outcome(error=SequenceError.NOT_FINITE)
