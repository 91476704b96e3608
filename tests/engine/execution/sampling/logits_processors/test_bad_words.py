"""bad_words. Oracle: a search of every word in the output as it would be with each token of the vocabulary.

Planted bugs that these tests have caught: a token too few remembered; drafts left out; a word that is found in the
prompt; the tokens of another slot.
"""

import random

import pytest

from faser.engine.contract.plan import SequenceStart
from faser.engine.execution.sampling.logits_processors.bad_words import BadWords
from faser.engine.execution.sampling.logits_processors.processor import ProcessedRows
from faser.errors import RequestError
from faser.types import SamplingParams

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


def forbidden(processor: BadWords, slots: list[int], drafts: list[tuple[int, ...]] | None) -> dict[int, list[int]]:
    """Token ids by row."""
    edit = processor.edit(ProcessedRows(slots, [9] * len(slots), drafts))
    found: dict[int, list[int]] = {}
    if edit is not None:
        begin = 0
        for row, size in zip(edit.at.rows.tolist(), edit.at.sizes.tolist(), strict=True):
            found[row] = edit.at.token_ids[begin : begin + size].tolist()
            begin += size
        assert begin == len(edit.at.token_ids)
    return found


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
        assert forbidden(processor, [2], None) == ({0: plain} if plain else {})
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
    assert forbidden(processor, [0, 1, 0], None) == {0: [2], 1: [3, 4], 2: [2]}
    processor.accept([1, 1], [5, 5])
    assert forbidden(processor, [0, 1], None) == {0: [2], 1: [4]}
    processor.release(1)
    assert forbidden(processor, [0, 1], None) == {0: [2]}
    assert list(processor.slots) == [0]


def test_a_request_without_words_is_not_looked_at() -> None:
    assert not started(0, (), (1,), ()).slots
    with pytest.raises(RequestError, match="bad_words"):
        SamplingParams(bad_words=((),))
