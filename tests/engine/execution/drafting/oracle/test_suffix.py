"""Drafts from what followed before, here and in past outputs. Oracle: counting in all texts, for every step.

Planted bugs that these tests have caught: the unverified tokens stay in the text; they are indexed; the
context ends before them; their occurrences are not found, or all of them, or the earliest first.
"""

import random
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser.engine.contract.cache_salt import salt_digest
from faser.engine.contract.plan import DraftPlan, DraftRequest, SequenceStart
from faser.types.sampling import SamplingParams
from tests.engine.execution.draft_lines import DraftLine, committed, lines_of
from tests.engine.execution.drafting.oracle.corpus import ANCHORS, SHORTEST_OUTPUT
from tests.engine.execution.drafting.oracle.suffix import DOUBT, OCCURRENCES, SuffixDrafter

CAP, DEPTH, FACTOR, MIN_SHARE = 6, 10, 1.5, 0.5
CORPUS_TOKENS, CORPUS_OUTPUTS = 60, 4

Path = tuple[list[int], list[float]]


def start_of(slot: int, token_ids: Sequence[int], prompt_len: int, salt: str | None = None) -> SequenceStart:
    return SequenceStart(
        slot=slot,
        sampling=SamplingParams(),
        seed=0,
        prompt_len=prompt_len,
        token_ids=tuple(token_ids),
        salt=salt_digest(salt),
    )


def plan_for(*requests: tuple[int, int], unverified: Sequence[int] = ()) -> DraftPlan:
    """(slot, most tokens) each."""
    return DraftPlan(
        step=0,
        width=16,
        released=(),
        requests=tuple(
            DraftRequest(slot=slot, max_tokens=most, new_blocks=(), unverified=tuple(unverified))
            for slot, most in requests
        ),
    )


def draft_of(drafter: SuffixDrafter, slot: int, most: int, *, unverified: Sequence[int] = ()) -> DraftLine:
    (draft,) = lines_of(drafter.propose(plan_for((slot, most), unverified=unverified)).table)
    return draft


class SequenceText(NamedTuple):
    prompt_len: int
    unsaid: int
    tokens: list[int]


def count(texts: list[list[int]], tail: list[int], most: int, *, itself: bool) -> Path:
    """The most frequent path from the longest context. texts: oldest first. itself: the only text, and goes on."""
    occurrences = longest_occurrences(texts, tail)
    drafted: list[int] = []
    probs: list[float] = []
    if not occurrences:
        return drafted, probs
    length = common_end(occurrences[0][0][: occurrences[0][1]], tail)
    while len(drafted) < min(most, CAP, int(FACTOR * length)):
        grown = [(text + drafted if itself else text, start) for text, start in occurrences]
        reaching = [(text, start) for text, start in grown if text[start : start + len(drafted)] == drafted]
        following = [text[start + len(drafted)] for text, start in reaching if start + len(drafted) < len(text)]
        counts = Counter(following)  # in order of occurrence, the latest first
        if not counts or max(counts.values()) / len(following) < MIN_SHARE:
            break
        token = next(each for each in counts if counts[each] == max(counts.values()))
        drafted.append(token)
        probs.append(counts[token] / (len(following) + DOUBT / (length + len(probs))))
    return drafted, probs


def longest_occurrences(texts: list[list[int]], tail: list[int]) -> list[tuple[list[int], int]]:
    for anchor in ANCHORS:
        if anchor > len(tail):
            continue
        latest = [
            (text, start)
            for text in reversed(texts)
            for start in range(len(text) - 1, anchor - 1, -1)
            if text[start - anchor : start] == tail[-anchor:]
        ][:OCCURRENCES]
        longest = max((common_end(text[:start], tail) for text, start in latest), default=0)
        if latest:
            return [(text, start) for text, start in latest if common_end(text[:start], tail) == longest]
    return []


def common_end(one: list[int], other: list[int]) -> int:
    length = 0
    while length < min(len(one), len(other)) and one[-length - 1] == other[-length - 1]:
        length += 1
    return length


def score(path: Path) -> float:
    total, survival = 0.0, 1.0
    for prob in path[1]:
        survival *= prob
        total += survival
    return total


def best(tokens: list[int], outputs: list[list[int]], most: int) -> Path:
    own = count([tokens], tokens[-DEPTH:], most, itself=True)
    past = count(outputs, tokens[-DEPTH:], most, itself=False)
    return past if score(past) > score(own) else own


def remember(outputs: list[list[int]], output: list[int]) -> None:
    output = output[-CORPUS_TOKENS:]
    if len(output) >= SHORTEST_OUTPUT:
        outputs.append(output)
        while len(outputs) > CORPUS_OUTPUTS or sum(map(len, outputs)) > CORPUS_TOKENS:
            outputs.pop(0)


def small_drafter() -> SuffixDrafter:
    return SuffixDrafter(
        cap=CAP,
        max_tree_depth=DEPTH,
        max_cached_requests=CORPUS_OUTPUTS,
        max_spec_factor=FACTOR,
        min_token_prob=MIN_SHARE,
        corpus_tokens=CORPUS_TOKENS,
    )


@given(
    st.integers(1, 4).flatmap(
        lambda kinds: st.lists(
            st.tuples(
                st.integers(0, 2),  # slot
                st.lists(st.integers(0, kinds - 1), max_size=14),
                st.integers(1, 8),  # most tokens
                st.sampled_from(["go on", "go on", "go on", "end", "interrupt"]),
                st.lists(st.integers(0, kinds - 1), max_size=6),  # unverified
            ),
            max_size=30,
        )
    )
)
def test_a_draft_is_the_most_frequent_path_by_counting(
    steps: list[tuple[int, list[int], int, str, list[int]]],
) -> None:
    """Random starts, commits, drafts, unverified tokens, releases and preemptions over three slots.

    The corpus forgets, and learns only what was committed.
    """
    drafter = small_drafter()
    running: dict[int, SequenceText] = {}
    outputs: list[list[int]] = []
    for slot, token_ids, most, what, unverified in steps:
        sequence = running.get(slot)
        if sequence is None:
            running[slot] = SequenceText(len(token_ids), len(token_ids), list(token_ids))
            drafter.start(start_of(slot, token_ids, len(token_ids)))
        elif what == "go on":
            sequence.tokens.extend(token_ids)
            drafter.commit(*committed({slot: tuple(token_ids)}))
        else:
            del running[slot]
            drafter.release(slot)
            remember(outputs, sequence.tokens[sequence.unsaid :])
            if what == "interrupt":
                unsaid = max(sequence.prompt_len, len(sequence.tokens) - DEPTH)
                running[slot] = SequenceText(sequence.prompt_len, unsaid, sequence.tokens)
                drafter.start(start_of(slot, sequence.tokens, sequence.prompt_len))
        drafter.corpus.check_invariants()

        asked = [(each, most) for each in running if (each + most) % 3]
        proposals = drafter.propose(plan_for(*asked, unverified=unverified))

        assert proposals.probs is None
        for draft, (each, _) in zip(lines_of(proposals.table), asked, strict=True):
            drafted, probs = best(running[each].tokens + unverified, outputs, most)
            assert (draft.slot, draft.method) == (each, "suffix")
            assert (list(draft.token_ids), list(draft.confidences)) == (drafted, probs)


@pytest.mark.parametrize("kinds", [2, 6, 30])
def test_long_texts_are_drafted_as_counting_says(kinds: int) -> None:
    """Phrases that recur, so that long contexts do too."""
    rng = random.Random(kinds)
    phrases = [[rng.randrange(kinds) for _ in range(rng.randrange(3, 15))] for _ in range(6)]
    drafter = small_drafter()
    tokens = list(phrases[0])
    drafter.start(start_of(0, tokens, len(tokens)))
    drafted = 0
    for _ in range(120):
        phrase = rng.choice(phrases)
        sampled = phrase[: rng.randrange(1, len(phrase) + 1)]
        tokens += sampled
        drafter.commit(*committed({0: sampled}))
        unverified = rng.choice(phrases)[: rng.randrange(4)]
        for after in ([], unverified):
            draft = draft_of(drafter, 0, CAP, unverified=after)
            assert (list(draft.token_ids), list(draft.confidences)) == best(tokens + after, [], CAP)
            drafted += len(draft.token_ids)
    assert drafted > 240


def test_the_more_frequent_continuation_is_drafted_with_its_share_and_some_doubt() -> None:
    drafter = SuffixDrafter(cap=4)
    drafter.start(start_of(0, [1, 2, 7, 0, 1, 2, 7, 0, 1, 2, 7, 8, 1, 2, 9, 3, 1, 2], 18))

    draft = draft_of(drafter, 0, 4)

    assert draft.token_ids == (7, 0)  # as long as the context
    assert draft.confidences == (3 / (4 + DOUBT / 2), 2 / (3 + DOUBT / 3))


def test_what_one_sequence_said_another_drafts() -> None:
    drafter = SuffixDrafter(cap=8)
    output = tuple(range(100, 120))
    drafter.start(start_of(0, [1, 2, 3], 3))
    drafter.commit(*committed({0: output}))
    drafter.start(start_of(1, [9, *output[:4]], 5))
    assert draft_of(drafter, 1, 8).token_ids == ()
    drafter.release(0)

    assert draft_of(drafter, 1, 8).token_ids == output[4:8]


def test_a_prompt_is_never_remembered() -> None:
    drafter = SuffixDrafter(cap=8)
    drafter.start(start_of(0, range(100, 140), 40))
    drafter.commit(*committed({0: tuple(range(20))}))
    drafter.release(0)
    drafter.start(start_of(0, range(110, 115), 5))

    assert draft_of(drafter, 0, 8).token_ids == ()


@pytest.mark.parametrize("salt, other", [("a", "b"), (None, "b"), ("a", None)])
def test_sequences_with_different_salts_share_nothing(salt: str | None, other: str | None) -> None:
    drafter = SuffixDrafter(cap=8)
    drafter.start(start_of(0, [], 0, salt))
    drafter.commit(*committed({0: tuple(range(20))}))
    drafter.release(0)
    drafter.start(start_of(0, range(5), 5, other))
    drafter.start(start_of(1, range(5), 5, salt))

    assert draft_of(drafter, 0, 8).token_ids == ()
    assert draft_of(drafter, 1, 8).token_ids == (5, 6, 7, 8, 9)


def test_a_preemption_does_not_count_an_output_twice() -> None:
    drafter = SuffixDrafter(cap=8, max_tree_depth=4)
    output = list(range(50))
    drafter.start(start_of(0, [99], 1))
    drafter.commit(*committed({0: tuple(output[:30])}))
    drafter.release(0)
    drafter.start(start_of(0, [99, *output[:30]], 1))
    drafter.commit(*committed({0: tuple(output[30:])}))
    drafter.release(0)

    assert drafter.corpus.num_tokens == 50 + 4
    drafter.start(start_of(0, output[27:30], 3))
    assert draft_of(drafter, 0, 8).token_ids == (30, 31, 32)  # across the interruption


def test_a_text_that_repeats_is_drafted_beyond_its_end() -> None:
    drafter = SuffixDrafter(cap=16)
    drafter.start(start_of(0, [5] * 10, 10))

    assert draft_of(drafter, 0, 16).token_ids == (5,) * 9


def test_a_proposal_leaves_no_trace() -> None:
    drafter = small_drafter()
    drafter.start(start_of(0, [1, 2, 3, 1, 2, 3, 1, 2], 8))

    drafts = [draft_of(drafter, 0, 6, unverified=unverified) for unverified in ((), (3, 1, 2, 9), (), (8,), ())]

    assert drafts[0].token_ids
    assert drafts[0] == drafts[2] == drafts[4]


def test_of_equally_frequent_tokens_behind_the_latest_is_drafted() -> None:
    drafter = SuffixDrafter(cap=1)
    drafter.start(start_of(0, [1, 2], 2))

    assert draft_of(drafter, 0, 1, unverified=(7, 1, 2, 8, 1, 2)).token_ids == (8,)


def test_of_tokens_behind_no_more_occurrences_are_counted_than_of_known_ones() -> None:
    """The latest ones go on with 8; the many before them, with 7. Something new comes before each."""
    continued = [7] * (OCCURRENCES + 4) + [8] * OCCURRENCES
    unverified = [token for new, after in enumerate(continued, 100) for token in (new, 1, 2, after)]
    drafter = SuffixDrafter(cap=1)
    drafter.start(start_of(0, [5], 1))

    draft = draft_of(drafter, 0, 1, unverified=(*unverified, 99, 1, 2))

    assert draft.token_ids == (8,)
    assert draft.confidences == (OCCURRENCES / (OCCURRENCES + DOUBT / 2),)
