"""The sampler as the executor uses it: slots come and go, rows of every kind stand in one batch."""

import math
import random
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from torch import Tensor

from faser.engine.contract.plan import SequenceStart
from faser.engine.execution.sampling.logprobs import position_logprobs
from faser.engine.execution.sampling.parameters import Purpose, noise_words
from faser.engine.execution.sampling.sampler import Sampler
from faser.kernels.interface.sampling import RACE_BLOCK, arrivals
from faser.types.answer import SequenceError
from faser.types.arrays import NO_TOKEN
from faser.types.sampling import SamplingParams
from tests.engine.execution.sampling.sampled import SampledRow, plain_rows, sample

VOCAB = 300
EOS = (2, 5)
PROMPT = (7, 8, 9, 8)


def make_sampler(vocab_size: int = VOCAB) -> Sampler:
    return Sampler(16, vocab_size, EOS)


def starting(
    sampling: SamplingParams, *, slot: int = 0, seed: int = 1, output: tuple[int, ...] = ()
) -> SequenceStart:
    return SequenceStart(
        slot=slot, sampling=sampling, seed=seed, prompt_len=len(PROMPT), token_ids=PROMPT + output
    )


def random_logits(num_rows: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def only_row(sampling: SamplingParams, logits: Tensor, *, position: int = len(PROMPT)) -> SampledRow:
    sampler = make_sampler(logits.shape[-1])
    sampler.start(starting(sampling))
    (row,) = sample(sampler, logits.clone(), [0], [position])
    return row


def random_sampling(rng: random.Random) -> SamplingParams:
    """Any mixture of features, each of them often off."""

    def sometimes(value: float, off: float) -> float:
        return value if rng.random() < 0.4 else off

    ids = range(VOCAB)
    return SamplingParams(
        temperature=rng.choice([0.0, 0.3, 1.0, 2.0]),
        top_p=sometimes(rng.uniform(0.05, 1.0), 1.0),
        top_k=int(sometimes(rng.randrange(1, 200), 0)),
        min_p=sometimes(rng.random(), 0.0),
        repetition_penalty=sometimes(rng.uniform(0.5, 2.0), 1.0),
        frequency_penalty=sometimes(rng.uniform(-2, 2), 0.0),
        presence_penalty=sometimes(rng.uniform(-2, 2), 0.0),
        logit_bias=tuple((i, rng.uniform(-9, 9)) for i in rng.sample(ids, int(sometimes(4, 0)))),
        allowed_token_ids=tuple(rng.sample(ids, 30)) if rng.random() < 0.2 else None,
        stop_token_ids=tuple(rng.sample(ids, int(sometimes(2, 0)))),
        ignore_eos=rng.random() < 0.3,
        min_tokens=int(sometimes(6, 0)),
        max_tokens=None,
        logprobs=rng.choice([None, 0, 3]),
    )


def plain_logits(sampling: SamplingParams, raw: list[float], output: list[int], position: int) -> list[float]:
    """The processed logits of one row, token by token."""
    counts, bias = Counter(output), dict(sampling.logit_bias)
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else EOS)}
    processed = []
    for token_id, logit in enumerate(raw):
        logit += bias.get(token_id, 0.0)
        if token_id in counts or token_id in PROMPT:
            logit = logit / sampling.repetition_penalty if logit > 0 else logit * sampling.repetition_penalty
        logit -= sampling.frequency_penalty * counts[token_id]
        logit -= sampling.presence_penalty * (token_id in counts)
        allowed = sampling.allowed_token_ids is None or token_id in sampling.allowed_token_ids
        held = position - len(PROMPT) < sampling.min_tokens and token_id in ends
        processed.append(logit if allowed and not held else -math.inf)
    return processed


def plain_choice(sampling: SamplingParams, logits: list[float], numbers: list[float]) -> int:
    """Temperature, min_p, top_k, top_p and the race, in double precision; ids in the documented order."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if sampling.greedy:
        return order[0]
    best = logits[order[0]]
    weights = [math.exp((logit - best) / sampling.temperature) for logit in logits]
    kept = [i for i in order if weights[i] >= sampling.min_p]
    kept = kept[: sampling.top_k] if sampling.top_k else kept
    target, total = sampling.top_p * sum(weights[i] for i in kept), 0.0
    nucleus = []
    for token_id in kept:
        nucleus.append(token_id)
        total += weights[token_id]
        if total >= target and sampling.top_p < 1:
            break
    sums: dict[int, float] = defaultdict(float)
    nucleus = [token_id for token_id in nucleus if weights[token_id]]
    for token_id in nucleus:
        sums[token_id // RACE_BLOCK] += weights[token_id]
    block = min(sums, key=lambda block: numbers[RACE_BLOCK + block] / sums[block])
    inside = [token_id for token_id in nucleus if token_id // RACE_BLOCK == block]
    return min(inside, key=lambda token_id: numbers[token_id % RACE_BLOCK] / weights[token_id])


@pytest.mark.parametrize("seed", range(12))
def test_a_mixed_batch_gives_every_row_the_token_of_the_plain_computation(seed: int) -> None:
    rng = random.Random(seed)
    sampler = make_sampler()
    slots = rng.sample(range(16), 12)
    outputs = [[rng.randrange(VOCAB) for _ in range(rng.randrange(10))] for _ in slots]
    params = [random_sampling(rng) for _ in slots]
    for slot, sampling, output in zip(slots, params, outputs, strict=True):
        sampler.start(starting(sampling, slot=slot, seed=slot, output=tuple(output)))
    positions = [len(PROMPT) + len(output) for output in outputs]
    logits = random_logits(12, seed)

    rows = sample(sampler, logits.clone(), slots, positions)

    words = noise_words(np.array(slots, dtype=np.uint64), np.array(positions), Purpose.TOKEN)
    numbers = arrivals(words, VOCAB).tolist()
    for i, row in enumerate(rows):
        processed = plain_logits(params[i], logits[i].tolist(), outputs[i], positions[i])
        assert row.error is None
        assert row.token_id == plain_choice(params[i], processed, numbers[i])


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6, top_k=5),
        SamplingParams(temperature=1.3, top_p=0.8),
        SamplingParams(temperature=0.9, min_p=0.1),
        SamplingParams(temperature=1.1, top_p=0.9, top_k=9, min_p=0.02),
        SamplingParams(temperature=0.8, logit_bias=((3, 2.0),), repetition_penalty=1.5, top_p=0.95),
    ],
)
@pytest.mark.full(but=("sampling0", "sampling4", "sampling5"))
def test_many_tokens_follow_the_enumerated_distribution(sampling: SamplingParams, full: bool) -> None:
    """Chi-square over many positions of one request; a fourth standard deviation is luck of 1 in 30,000."""
    num_draws, vocab_size = 200_000 if full else 80_000, 16
    logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(4)) * 1.5
    sampler = make_sampler(vocab_size)
    sampler.start(starting(sampling))

    positions = range(len(PROMPT), len(PROMPT) + num_draws)
    rows = sampler.rows(logits.repeat(num_draws, 1), plain_rows([0] * num_draws, positions))

    found = Counter(rows.tokens().tolist())
    expected = exact_distribution(sampling, plain_logits(sampling, logits[0].tolist(), [], len(PROMPT)))
    assert found.keys() <= expected.keys()
    distance = sum((found[i] - num_draws * p) ** 2 / (num_draws * p) for i, p in expected.items())
    freedom = len(expected) - 1
    assert distance < freedom + 4 * math.sqrt(2 * freedom)


def exact_distribution(sampling: SamplingParams, logits: list[float]) -> dict[int, float]:
    """Probabilities of the tokens that may be drawn, by the shares of the uniform that lead to them."""
    weights = {i: math.exp(logit / sampling.temperature) for i, logit in enumerate(logits)}
    best = max(weights.values())
    kept = sorted((i for i in weights if weights[i] >= sampling.min_p * best), key=lambda i: -weights[i])
    kept = kept[: sampling.top_k] if sampling.top_k else kept
    total = sum(weights[i] for i in kept)
    before = [sum(weights[j] for j in kept[:n]) for n in range(len(kept))]
    kept = [i for i, mass in zip(kept, before, strict=True) if mass < sampling.top_p * total]
    total = sum(weights[i] for i in kept)
    return {i: weights[i] / total for i in kept}


@pytest.mark.parametrize("seed", range(6))
def test_neither_slot_nor_neighbours_change_a_row(seed: int) -> None:
    rng = random.Random(seed)
    params = [random_sampling(rng) for _ in range(10)]
    logits = random_logits(10, seed)
    together = make_sampler()
    for slot, sampling in enumerate(params):
        together.start(starting(sampling, slot=slot, seed=100 + slot))

    rows = sample(together, logits.clone(), list(range(10)), [4 + i for i in range(10)])

    for i, sampling in enumerate(params):
        alone = make_sampler()
        alone.start(starting(sampling, slot=15 - i, seed=100 + i))
        assert sample(alone, logits[i : i + 1].clone(), [15 - i], [4 + i]) == [rows[i]]


def test_sampling_changes_nothing_until_the_token_is_accepted() -> None:
    sampler = make_sampler()
    sampler.start(starting(SamplingParams(temperature=0.0, presence_penalty=2.0)))
    logits = torch.zeros(1, VOCAB)
    logits[0, 40], logits[0, 30] = 3.0, 2.0

    first = sample(sampler, logits.clone(), [0], [4])
    again = sample(sampler, logits.clone(), [0], [4])
    sampler.accept([0], [40])
    later = sample(sampler, logits.clone(), [0], [5])

    assert [first[0].token_id, again[0].token_id, later[0].token_id] == [40, 40, 30]


def test_a_sequence_goes_on_after_a_preemption_as_if_there_had_been_none() -> None:
    sampling = SamplingParams(
        temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.2, min_tokens=9
    )
    plain, preempted = make_sampler(), make_sampler()
    plain.start(starting(sampling))
    preempted.start(starting(sampling))
    output: list[int] = []
    for step in range(20):
        position = len(PROMPT) + step
        logits = random_logits(1, step, spread=1.0)
        if step in (3, 8, 9):
            preempted.release(0)
            preempted.start(starting(sampling, output=tuple(output)))
        (one,) = sample(plain, logits.clone(), [0], [position])
        (other,) = sample(preempted, logits.clone(), [0], [position])
        assert one == other
        output.append(one.token_id)
        plain.accept([0], [one.token_id])
        preempted.accept([0], [one.token_id])


@pytest.mark.parametrize("seed", range(4))
def test_a_slot_keeps_nothing_of_its_former_sequence(seed: int) -> None:
    """Oracle: a fresh sampler for every sequence."""
    rng = random.Random(seed)
    used = make_sampler()
    for turn in range(25):
        sampling, fresh = random_sampling(rng), make_sampler()
        for sampler in (used, fresh):
            sampler.start(starting(sampling, slot=3, seed=turn))
            sampler.check_invariants()
        for step in range(2):
            logits = random_logits(1, 50 * turn + step)
            rows = sample(used, logits.clone(), [3], [len(PROMPT) + step])
            assert rows == sample(fresh, logits.clone(), [3], [len(PROMPT) + step])
            for sampler in (used, fresh):
                sampler.accept([3], [rows[0].token_id])
        used.release(3)
        used.check_invariants()


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [299, 17, 18]] = 1.0

    assert only_row(SamplingParams(temperature=0.0), logits).token_id == 17


def test_seeds_below_zero_and_equal_seeds_are_taken_as_they_are() -> None:
    sampler = make_sampler()
    seeds = [-1, 2**64 - 1, -(2**63), 5, 5, 6]
    for slot, seed in enumerate(seeds):
        sampler.start(starting(SamplingParams(), slot=slot, seed=seed))

    tokens = []
    for position in range(4, 24):
        rows = sample(sampler, torch.zeros(6, VOCAB), list(range(6)), [position] * 6)
        tokens.append([row.token_id for row in rows])

    columns = list(zip(*tokens, strict=True))
    assert columns[0] == columns[1]
    assert columns[3] == columns[4]
    assert len({columns[0], columns[2], columns[3], columns[5]}) == 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [[math.nan], [math.inf], [-math.inf] * VOCAB, [math.nan] * VOCAB])
def test_a_row_that_is_not_numbers_gets_an_error_and_the_others_their_tokens(
    bad: list[float], temperature: float
) -> None:
    sampler = make_sampler()
    for slot in range(3):
        sampler.start(starting(SamplingParams(temperature=temperature, top_p=0.9, logprobs=2), slot=slot))
    logits = random_logits(3)
    sound = sample(sampler, logits.clone(), [0, 1, 2], [4, 5, 6])
    logits[1, : len(bad)] = torch.tensor(bad)

    rows = sample(sampler, logits, [0, 1, 2], [4, 5, 6])

    assert rows[0] == sound[0]
    assert rows[2] == sound[2]
    assert rows[1] == SampledRow(token_id=NO_TOKEN, error=SequenceError.NOT_FINITE)


def test_masks_that_leave_no_token_are_an_error() -> None:
    sampler = make_sampler()
    sampler.start(starting(SamplingParams(allowed_token_ids=(2, 5), min_tokens=2)))

    early, late = (sample(sampler, random_logits(1), [0], [position])[0] for position in (5, 6))

    assert early.token_id == NO_TOKEN
    assert early.error is SequenceError.NONE_ALLOWED
    assert late.token_id in (2, 5)


@pytest.mark.parametrize(
    "sampling, expected",
    [
        (SamplingParams(temperature=0.0, min_tokens=2), [9, 9, 2, 2]),
        (SamplingParams(temperature=0.0, min_tokens=2, ignore_eos=True), [2, 2, 2, 2]),
        (SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=(9,)), [1, 1, 1, 2]),
    ],
)
def test_tokens_that_end_the_sequence_wait_for_min_tokens(sampling: SamplingParams, expected: list[int]) -> None:
    """By logit: 2 and 5, which end every sequence, then 9, then 1."""
    logits = torch.zeros(1, VOCAB)
    logits[0, [2, 5, 9, 1]] = torch.tensor([9.0, 8.0, 7.0, 6.0])

    found = [only_row(sampling, logits, position=len(PROMPT) + step).token_id for step in range(4)]

    assert found == expected


def test_logprobs_are_those_of_the_model_whatever_is_done_to_the_logits() -> None:
    logits = random_logits(1)
    exact = logits[0].double().log_softmax(-1)
    favoured = int(logits.argmin())
    sampling = SamplingParams(
        temperature=0.0, logit_bias=((favoured, 100.0),), repetition_penalty=2.0, min_tokens=3, logprobs=4
    )

    report = only_row(sampling, logits).logprobs

    assert report is not None
    assert (report.token_id, report.rank) == (favoured, VOCAB)
    assert report.logprob == pytest.approx(float(exact[favoured]), abs=1e-5)
    assert [token_id for token_id, _ in report.top] == exact.topk(4).indices.tolist()
    assert [value for _, value in report.top] == pytest.approx(exact.topk(4).values.tolist(), abs=1e-5)


def test_each_row_reports_as_many_alternatives_as_it_asked_for() -> None:
    sampler = make_sampler()
    for slot, logprobs in enumerate([None, 0, 20, 3]):
        sampler.start(starting(SamplingParams(logprobs=logprobs), slot=slot))

    rows = sample(sampler, random_logits(4), [3, 2, 1, 0], [4] * 4)

    assert [None if row.logprobs is None else len(row.logprobs.top) for row in rows] == [3, 20, 0, None]
    assert all(row.logprobs is None or row.logprobs.token_id == row.token_id for row in rows)


def test_prompt_logprobs_are_of_the_true_next_tokens() -> None:
    logits = random_logits(3)
    exact = logits.double().log_softmax(-1)

    reports = position_logprobs(logits, [8, 9, 8], [2] * 3)

    assert [report.token_id for report in reports] == [8, 9, 8]
    assert [report.logprob for report in reports] == pytest.approx(exact[[0, 1, 2], [8, 9, 8]].tolist(), abs=1e-5)
    assert [len(report.top) for report in reports] == [2, 2, 2]


def test_logits_from_inference_mode_can_be_sampled() -> None:
    with torch.inference_mode():
        logits = random_logits(1)

    sampler = make_sampler()
    sampler.start(starting(SamplingParams(temperature=0.7, presence_penalty=1.0, logit_bias=((1, 1.0),))))

    assert sample(sampler, logits, [0], [4])[0].error is None


def test_a_slot_cannot_be_started_twice_or_released_when_free() -> None:
    sampler = make_sampler()
    sampler.start(starting(SamplingParams()))

    with pytest.raises(AssertionError, match="slot 0 is started twice"):
        sampler.start(starting(SamplingParams()))
    with pytest.raises(AssertionError, match="slot 4 is released"):
        sampler.release(4)
