"""Drafts looked up natively. Oracle: the drafters in Python, for every draft and every bit of its confidences.

Planted bugs that these tests have caught: unverified tokens stay, are indexed, or are scanned from the wrong end;
ties to the earliest; other shares, scores, limits and doubt; the corpus ignores salts, remembers prompts, reads
forgotten text or ignores its bounds; occurrences of a shorter context count.
"""

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

import faser
from faser.engine.contract.cache_salt import salt_digest
from faser.engine.contract.drafts import NO_DRAFTS
from faser.engine.contract.plan import DraftPlan, DraftRequest, SequenceStart
from faser.engine.execution.drafting.text import LookupDrafter, TextAndModel
from faser.kernels.cpu import library as native_library
from faser.kernels.cpu.build import library_path
from faser.kernels.cpu.text_index import TextRules
from faser.types.sampling import SamplingParams
from tests.engine.execution.draft_lines import committed, lines_of
from tests.engine.execution.drafting.oracle.ngram import NgramDrafter
from tests.engine.execution.drafting.oracle.suffix import SuffixDrafter

RULES = TextRules(
    cap=6,
    depth=10,
    max_spec_factor=1.5,
    min_token_prob=0.5,
    max_outputs=4,
    max_tokens=60,
    min_n=2,
    max_n=4,
)


@pytest.fixture(scope="session")
def library_file(kernel_cache: Path) -> Path:
    return library_path(cache_dir=kernel_cache)


class Both(NamedTuple):
    """The native lookup, and in Python the corpus and everything else."""

    native: LookupDrafter
    suffix: SuffixDrafter
    oracle: TextAndModel

    def start(self, start: SequenceStart) -> None:
        self.native.start(start)
        self.oracle.start(start)

    def commit(self, slots: Sequence[int], counts: Sequence[int], token_ids: Sequence[int]) -> None:
        self.native.commit(slots, counts, token_ids)
        self.oracle.commit(slots, counts, token_ids)

    def release(self, slot: int) -> None:
        self.native.release(slot)
        self.oracle.release(slot)

    def compare(self, plan: DraftPlan) -> int:
        """Tokens drafted. Fails where the two differ in anything."""
        found = self.native.propose(plan)
        expected = self.oracle.propose(plan)
        assert lines_of(found.table) == lines_of(expected.table)
        assert replace(found, table=NO_DRAFTS) == replace(expected, table=NO_DRAFTS)
        assert self.native.index.num_remembered == self.suffix.corpus.num_tokens
        return sum(len(draft.token_ids) for draft in lines_of(found.table))


def both(library: Path, rules: TextRules) -> Both:
    suffix = SuffixDrafter(
        cap=rules.cap,
        max_tree_depth=rules.depth,
        max_cached_requests=rules.max_outputs,
        max_spec_factor=rules.max_spec_factor,
        min_token_prob=rules.min_token_prob,
        corpus_tokens=rules.max_tokens,
    )
    ngram = NgramDrafter(min_n=rules.min_n, max_n=rules.max_n, cap=rules.cap)
    native = LookupDrafter(native_library.load(library), rules)
    return Both(native, suffix, TextAndModel([suffix, ngram]))


def start_of(
    slot: int,
    token_ids: Sequence[int],
    *,
    prompt_len: int | None = None,
    salt: str | None = None,
    predicted: Sequence[int] = (),
) -> SequenceStart:
    return SequenceStart(
        slot=slot,
        sampling=SamplingParams(),
        seed=0,
        prompt_len=len(token_ids) if prompt_len is None else prompt_len,
        token_ids=tuple(token_ids),
        salt=salt_digest(salt),
        predicted_token_ids=tuple(predicted),
    )


def plan_for(slots: Sequence[int], most: int = 16, unverified: Sequence[Sequence[int]] | None = None) -> DraftPlan:
    return DraftPlan(
        step=0,
        width=16,
        from_text=True,
        requests=tuple(
            DraftRequest(
                slot=slot,
                max_tokens=most,
                new_blocks=(),
                unverified=() if unverified is None else tuple(unverified[at]),
            )
            for at, slot in enumerate(slots)
        ),
    )


def tokens_of(kinds: int, most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, kinds - 1), max_size=most)


rules_of_all_kinds = st.builds(
    TextRules,
    cap=st.integers(1, 9),
    depth=st.integers(1, 14),
    max_spec_factor=st.sampled_from([0.3, 1.0, 1.5, 4.0]),
    min_token_prob=st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0]),
    max_outputs=st.integers(0, 5),
    max_tokens=st.sampled_from([0, 9, 30, 60, 1000]),
    min_n=st.integers(1, 3),
    max_n=st.integers(3, 7),
    chunk=st.sampled_from([1, 7, 2048]),
)
steps_of_few_kinds = st.integers(1, 5).flatmap(
    lambda kinds: st.lists(
        st.tuples(
            st.integers(0, 2),  # slot
            tokens_of(kinds, 14),
            st.sampled_from(["go on", "go on", "go on", "end", "interrupt"]),
            st.integers(1, 10),  # most tokens
            tokens_of(kinds, 6),  # unverified, or predicted
            st.sampled_from([None, None, "a"]),  # salt
        ),
        max_size=25,
    )
)


@given(rules_of_all_kinds, steps_of_few_kinds)
def test_every_draft_is_that_of_python_to_the_bit(
    library_file: Path,
    rules: TextRules,
    steps: list[tuple[int, list[int], str, int, list[int], str | None]],
) -> None:
    """Starts, predictions, salts, commits, unverified tokens, releases and preemptions over three slots."""
    pair = both(library_file, rules)
    running: dict[int, list[int]] = {}
    prompts: dict[int, int] = {}
    for slot, token_ids, what, most, other, salt in steps:
        if slot not in running:
            running[slot], prompts[slot] = list(token_ids), len(token_ids)
            pair.start(start_of(slot, token_ids, salt=salt, predicted=other))
        elif what == "go on":
            pair.commit(*committed({each: token_ids[each:] for each in running}))
            for each in running:
                running[each] += token_ids[each:]
        else:
            pair.release(slot)
            token_ids = running.pop(slot)
            if what == "interrupt":
                running[slot] = token_ids
                pair.start(start_of(slot, token_ids, prompt_len=prompts[slot], salt=salt))
        asked = [each for each in running if (each + most) % 3]
        pair.compare(plan_for(asked, most, [other[each:] for each in asked]))


@pytest.mark.parametrize("kinds", [2, 12, 400])
def test_long_texts_and_a_corpus_that_forgets_much_are_drafted_from_as_in_python(
    library_file: Path, kinds: int
) -> None:
    """Phrases recur, outputs are forgotten and cut off, and the tables grow through many sizes."""
    rng = random.Random(kinds)
    phrases = [[rng.randrange(kinds) for _ in range(rng.randrange(3, 30))] for _ in range(12)]
    rules = TextRules(
        cap=16,
        depth=24,
        min_token_prob=0.1,
        max_outputs=10_000,
        max_tokens=4000,
        min_n=2,
        max_n=5,
    )
    pair = both(library_file, rules)
    for slot in range(4):
        pair.start(start_of(slot, rng.choice(phrases), salt=rng.choice([None, "a"])))
    drafted = 0
    for _ in range(250):
        pair.commit(*committed({slot: rng.choice(phrases) for slot in range(4)}))
        if rng.random() < 0.2:
            slot = rng.randrange(4)
            pair.release(slot)
            pair.start(start_of(slot, rng.choice(phrases), salt=rng.choice([None, "a"])))
        drafted += pair.compare(plan_for(range(4), unverified=[rng.choice(phrases)[: rng.randrange(3)]] * 4))
    assert drafted > 8000
    assert pair.suffix.corpus.text.num_dropped > 0


def test_many_tokens_behind_are_scanned_as_in_python(library_file: Path) -> None:
    """Of more occurrences than are counted, and of ties, it matters which are the latest."""
    rng = random.Random(5)
    pair = both(library_file, RULES)
    drafted = 0
    for kinds in (2, 3, 4, 6) * 40:
        pair.start(start_of(0, [rng.randrange(kinds) for _ in range(rng.randrange(30))]))
        drafted += pair.compare(
            plan_for([0], unverified=[[rng.randrange(kinds) for _ in range(rng.randrange(70))]])
        )
        pair.release(0)
    assert drafted > 1000


def test_real_text_is_drafted_as_in_python(library_file: Path) -> None:
    """This package's own sources, as bytes, each known to the corpus when the next one comes."""
    rules = TextRules(cap=16, depth=24, min_token_prob=0.1, max_outputs=50, max_tokens=9000, min_n=2, max_n=5)
    pair = both(library_file, rules)
    drafted = 0
    for path in sorted((Path(faser.__file__).parent / "engine").rglob("*.py"))[:8]:
        text = path.read_bytes()[:2500]
        pair.start(start_of(0, text[:800]))
        for at in range(800, len(text), 7):
            pair.commit(*committed({0: tuple(text[at : at + 7])}))
            drafted += pair.compare(plan_for([0]))
        pair.release(0)
    assert drafted > 10_000


@pytest.mark.parametrize("method", ["suffix", "ngram"])
def test_one_method_alone_drafts_what_it_drafts_beside_the_other(library_file: Path, method: str) -> None:
    rng = random.Random(4)
    pair = both(library_file, RULES)
    suffix = method == "suffix"
    rules = TextRules(
        cap=RULES.cap,
        depth=RULES.depth if suffix else 0,
        max_spec_factor=RULES.max_spec_factor,
        min_token_prob=RULES.min_token_prob,
        max_outputs=RULES.max_outputs,
        max_tokens=RULES.max_tokens,
        min_n=0 if suffix else RULES.min_n,
        max_n=0 if suffix else RULES.max_n,
    )
    alone = LookupDrafter(native_library.load(library_file), rules)
    for _ in range(60):
        start = start_of(1, [rng.randrange(3) for _ in range(20)], prompt_len=5)
        pair.start(start)
        alone.start(start)
        sampled = committed({1: [rng.randrange(3) for _ in range(20)]})
        pair.commit(*sampled)
        alone.commit(*sampled)
        found = alone.propose(plan_for([1]))
        assert lines_of(found.table)[0] == lines_of(pair.native.propose(plan_for([1])).table)[0 if suffix else 1]
        assert found.probs is None
        pair.release(1)
        alone.release(1)


def test_a_wide_step_has_the_drafts_of_many_narrow_ones(library_file: Path) -> None:
    rng = random.Random(2)
    lookup = both(library_file, RULES).native
    slots = list(range(100))
    for slot in slots:
        lookup.start(start_of(slot, [rng.randrange(4) for _ in range(slot)]))
    rng.shuffle(slots)
    unverified = [[rng.randrange(4) for _ in range(rng.randrange(5))] for _ in slots]

    together = lines_of(lookup.propose(plan_for(slots, unverified=unverified)).table)

    apart = [
        lines_of(lookup.propose(plan_for([slot], unverified=[each])).table)
        for slot, each in zip(slots, unverified, strict=True)
    ]
    assert together == [each[method] for method in range(2) for each in apart]
    assert lines_of(lookup.propose(plan_for([])).table) == []


def test_drafts_may_be_asked_for_in_another_thread(library_file: Path) -> None:
    pair = both(library_file, RULES)
    pair.start(start_of(0, [1, 2, 3, 1, 2, 3, 1, 2]))
    with ThreadPoolExecutor(1) as lane:
        found = lane.submit(pair.native.propose, plan_for([0])).result()
    assert lines_of(found.table) == lines_of(pair.oracle.propose(plan_for([0])).table)
    assert pair.native.drafts_overlapped


def test_nothing_of_a_released_slot_is_kept(library_file: Path) -> None:
    lookup = both(library_file, RULES).native
    lookup.start(start_of(0, [1, 2, 1, 2]))
    lookup.release(0)

    with pytest.raises(KeyError):
        lookup.propose(plan_for([0]))
    lookup.start(start_of(0, [1, 2]))
    assert [draft.token_ids for draft in lines_of(lookup.propose(plan_for([0])).table)] == [(), ()]
