"""The order of the logits processors, and one more: what a new sampling parameter takes.

Oracle of bad_words: a search of every word in the output as it would be with each token of the vocabulary. Planted
bugs that its tests have caught: a token too few remembered; drafts left out; a word that is found in the
prompt; the tokens of another slot.
"""

import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from faser.engine.contract.plan import SequenceStart
from faser.engine.execution.sampling.edits import LogitsEdit, LogitsProcessor, ProcessedRows, edit_rows
from faser.engine.execution.sampling.penalties import Penalties
from faser.engine.execution.sampling.processors import (
    AllowedTokens,
    BadWords,
    Bias,
    MinTokens,
    make_logits_processors,
)
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.sampling.thinking import Thinking
from faser.errors import RequestError
from faser.types.sampling import SamplingParams
from tests.engine.execution.sampling.sampled import plain_rows, sample

WIDTH = 40
EVERYTHING = SamplingParams(
    logit_bias=((3, 1.0),),
    repetition_penalty=1.5,
    allowed_token_ids=(1, 3),
    bad_words=((2,),),
    min_tokens=2,
    stop_token_ids=(1,),
)


def start(slot: int, sampling: SamplingParams) -> SequenceStart:
    return SequenceStart(slot=slot, sampling=sampling, seed=slot, prompt_len=2, token_ids=(5, 6))


class TopNSigma(LogitsProcessor[None]):
    """Removes tokens whose logit is more than one standard deviation below the largest, in even slots."""

    def start(self, start: SequenceStart) -> None:
        if start.slot % 2 == 0:
            self._by_slot[start.slot] = None

    def edit(self, rows: ProcessedRows) -> LogitsEdit | None:
        asking = rows.of(self._by_slot)
        return partial(edit_rows, rows=asking, function=top_n_sigma) if asking else None


def top_n_sigma(logits: Tensor) -> Tensor:
    limit = logits.amax(-1, keepdim=True) - logits.std(-1, keepdim=True)
    return logits.masked_fill(logits < limit, -torch.inf)


def test_bias_and_penalties_come_before_masks() -> None:
    processors = make_logits_processors(WIDTH, (2,))
    assert [type(each) for each in processors] == [Bias, Penalties, AllowedTokens, BadWords, MinTokens, Thinking]


@pytest.mark.parametrize("index", range(5))
def test_a_processor_edits_for_the_slots_that_ask_for_it_and_no_others(index: int) -> None:
    processor: LogitsProcessor[Any] = make_logits_processors(WIDTH, (2,))[index]
    rows = ProcessedRows([0, 1], [2, 2], [(), ()])
    processor.start(start(0, SamplingParams()))
    assert not processor.slots
    processor.start(start(1, EVERYTHING))
    assert list(processor.slots) == [1]
    edit = processor.edit(rows)
    assert edit is not None
    logits = torch.ones(2, WIDTH)
    edit(logits)
    assert (logits != 1).any(-1).tolist() == [False, True]
    processor.release(1)
    assert processor.edit(rows) is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_new_processor_edits_the_rows_that_ask_for_it(temperature: float) -> None:
    """Oracle: a sampler without it, of logits that were edited before."""
    processor = TopNSigma()
    ours, plain = Sampler(4, WIDTH, (), processors=[processor]), Sampler(4, WIDTH, ())
    for slot in range(4):
        for sampler in (ours, plain):
            sampler.start(start(slot, SamplingParams(temperature=temperature)))
    logits = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    edited = logits.clone()
    edited[[0, 2]] = top_n_sigma(logits[[0, 2]])

    for position in range(2, 30):
        found = sample(ours, logits.clone(), range(4), [position] * 4)
        assert found == sample(plain, edited.clone(), range(4), [position] * 4)
        ours.accept(range(4), [row.token_id for row in found])

    assert torch.equal(ours.rows(logits.clone(), plain_rows(range(4), [2] * 4)).logits, edited)
    assert not ours.needs_only_logits([1, 2])
    assert ours.needs_only_logits([1, 3])
    ours.release(2)
    assert ours.needs_only_logits([1, 3])
    ours.check_invariants()


VOCAB = 6


def started(
    slot: int, words: tuple[tuple[int, ...], ...], prompt: tuple[int, ...], output: tuple[int, ...]
) -> BadWords:
    processor = BadWords(VOCAB)
    sampling = SamplingParams(bad_words=words)
    processor.start(
        SequenceStart(slot=slot, sampling=sampling, seed=0, prompt_len=len(prompt), token_ids=prompt + output)
    )
    return processor


def forbidden(processor: BadWords, slots: list[int], drafts: list[tuple[int, ...]]) -> dict[int, list[int]]:
    """Token ids by row."""
    edit = processor.edit(ProcessedRows(slots, [9] * len(slots), drafts))
    logits = torch.zeros(len(slots), VOCAB)
    if edit is not None:
        edit(logits)
    lines = [line.isinf().nonzero()[:, 0].tolist() for line in logits]
    return {row: token_ids for row, token_ids in enumerate(lines) if token_ids}


def completed(words: tuple[tuple[int, ...], ...], output: tuple[int, ...]) -> list[int]:
    return [
        token_id
        for token_id in range(VOCAB)
        if any((*output, token_id)[-len(word) :] == word for word in words if len(word) <= len(output) + 1)
    ]


@pytest.mark.parametrize("seed", range(40))
def test_exactly_the_tokens_that_complete_a_word_are_forbidden(seed: int) -> None:
    rng = random.Random(seed)

    def some(most: int, least: int = 0) -> tuple[int, ...]:
        return tuple(rng.randrange(3) for _ in range(rng.randint(least, most)))

    words = tuple(some(4, 1) for _ in range(rng.randint(1, 6)))
    prompt, output = some(4, 1), some(5)
    processor = started(2, words, prompt, output)
    for _ in range(12):
        drafts = [some(4) for _ in range(3)]
        expected = {row: ids for row, each in enumerate(drafts) if (ids := completed(words, output + each))}
        assert forbidden(processor, [2, 2, 2], drafts) == expected
        plain = completed(words, output)
        assert forbidden(processor, [2], [()]) == ({0: plain} if plain else {})
        said = some(3, 1)
        processor.accept([0, *[2] * len(said)], [4, *said])
        output += said


def test_slots_have_words_of_their_own() -> None:
    processor = started(0, ((1, 2),), (5,), (1,))
    processor.start(
        SequenceStart(
            slot=1, sampling=SamplingParams(bad_words=((1, 3), (4,))), seed=0, prompt_len=1, token_ids=(5, 1)
        )
    )
    assert forbidden(processor, [0, 1, 0], [()] * 3) == {0: [2], 1: [3, 4], 2: [2]}
    processor.accept([1, 1], [5, 5])
    assert forbidden(processor, [0, 1], [()] * 2) == {0: [2], 1: [4]}
    processor.release(1)
    assert forbidden(processor, [0, 1], [()] * 2) == {0: [2]}
    assert list(processor.slots) == [0]


def test_a_request_without_words_is_not_looked_at() -> None:
    assert not started(0, (), (1,), ()).slots
    with pytest.raises(RequestError, match="bad_words"):
        SamplingParams(bad_words=((),))
