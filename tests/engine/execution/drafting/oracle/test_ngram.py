"""Drafts from a sequence's own n-grams. Oracle: a scan of the whole text, backwards, for every step.

Planted bugs that these tests have caught: the unverified tokens stay in the text; they are indexed; their
occurrences are not found, or the earliest of them.
"""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser.engine.contract.plan import DraftPlan, DraftRequest, SequenceStart
from faser.types.sampling import SamplingParams
from tests.engine.execution.draft_lines import committed, lines_of
from tests.engine.execution.drafting.oracle.ngram import NgramDrafter

MIN_N, MAX_N, CAP = 2, 4, 6


def start_of(slot: int, token_ids: list[int]) -> SequenceStart:
    return SequenceStart(
        slot=slot, sampling=SamplingParams(), seed=0, prompt_len=len(token_ids), token_ids=tuple(token_ids)
    )


def plan_for(*requests: tuple[int, int], unverified: tuple[int, ...] = ()) -> DraftPlan:
    """(slot, most tokens) each."""
    return DraftPlan(
        step=0,
        width=16,
        released=(),
        requests=tuple(
            DraftRequest(slot=slot, max_tokens=most, new_blocks=(), unverified=unverified)
            for slot, most in requests
        ),
    )


def scan(tokens: list[int], most: int) -> tuple[int, list[int]]:
    """Length of the match and what follows its latest earlier occurrence, read on into the draft itself."""
    for n in range(MAX_N, MIN_N - 1, -1):
        for begin in range(len(tokens) - 1, n - 1, -1):
            if tokens[begin - n : begin] == tokens[len(tokens) - n :]:
                grown = list(tokens)
                for offset in range(min(most, CAP)):
                    grown.append(grown[begin + offset])
                return n, grown[len(tokens) :]
    return 0, []


tokens_of_few_kinds = st.lists(st.integers(0, 2), max_size=8)
steps = st.lists(
    st.tuples(st.integers(0, 2), tokens_of_few_kinds, st.integers(1, 9), st.booleans(), tokens_of_few_kinds),
    max_size=25,
)


@given(steps)
def test_a_draft_is_what_a_scan_of_the_whole_text_finds(
    steps: list[tuple[int, list[int], int, bool, list[int]]],
) -> None:
    """Random starts, commits, drafts, unverified tokens, accepted or not, and releases over three slots."""
    drafter = NgramDrafter(min_n=MIN_N, max_n=MAX_N, cap=CAP)
    texts: dict[int, list[int]] = {}
    for slot, token_ids, most, ends, unverified in steps:
        if slot not in texts:
            texts[slot] = list(token_ids)
            drafter.start(start_of(slot, token_ids))
        elif ends:
            del texts[slot]
            drafter.release(slot)
        else:
            texts[slot] += token_ids
            drafter.commit(*committed({slot: tuple(token_ids)}))

        asked = [(each, most) for each in texts if (each + most) % 3]  # some are brought up to date later
        proposals = drafter.propose(plan_for(*asked, unverified=tuple(unverified)))

        assert proposals.probs is None
        assert [draft.slot for draft in lines_of(proposals.table)] == [each for each, _ in asked]
        for draft in lines_of(proposals.table):
            n, expected = scan(texts[draft.slot] + unverified, most)
            assert (draft.method, list(draft.token_ids)) == ("ngram", expected)
            assert draft.confidences == (float(n),) * len(expected)


def test_a_draft_is_the_same_however_the_text_came() -> None:
    """At once as a prompt, or token by token with drafts in between."""
    rng = random.Random(3)
    text = [rng.randrange(12) for _ in range(600)]
    at_once, bit_by_bit = (NgramDrafter(min_n=1, max_n=5, cap=8) for _ in range(2))
    at_once.start(start_of(0, text))
    bit_by_bit.start(start_of(0, []))
    for token_id in text:
        bit_by_bit.propose(plan_for((0, 8)))
        bit_by_bit.commit(*committed({0: (token_id,)}))

    found, expected = (each.propose(plan_for((0, 8))).table for each in (at_once, bit_by_bit))
    assert lines_of(found) == lines_of(expected)


def test_a_text_that_repeats_is_expected_to_go_on_repeating() -> None:
    drafter = NgramDrafter(min_n=2, max_n=5, cap=8)
    drafter.start(start_of(0, [9, 1, 2, 3, 1, 2]))

    (draft,) = lines_of(drafter.propose(plan_for((0, 8))).table)

    assert draft.token_ids == (3, 1, 2, 3, 1, 2, 3, 1)
    assert draft.confidences == (2.0,) * 8


@pytest.mark.parametrize("min_n, max_n", [(0, 3), (4, 3)])
def test_lengths_without_a_range_are_refused(min_n: int, max_n: int) -> None:
    with pytest.raises(ValueError, match=f"min_n is {min_n} and max_n is {max_n}"):
        NgramDrafter(min_n=min_n, max_n=max_n, cap=4)


def test_nothing_of_a_released_slot_is_kept() -> None:
    drafter = NgramDrafter(min_n=2, max_n=5, cap=8)
    drafter.start(start_of(0, [1, 2, 1, 2]))
    drafter.release(0)

    with pytest.raises(KeyError):
        drafter.propose(plan_for((0, 8)))
    drafter.start(start_of(0, [1, 2]))
    assert lines_of(drafter.propose(plan_for((0, 8))).table)[0].token_ids == ()
