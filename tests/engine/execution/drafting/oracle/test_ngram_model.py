"""Chains of an n-gram model. Oracle of the native one: the drafter in Python, to the bit.

Planted bugs that these tests have caught: the shorter context counts in a tie; unverified tokens are forgotten;
the chain goes on after an unlikely token.
"""

import random
from pathlib import Path

import pytest

from faser.engine.checkpoints.ngram_model import count
from faser.engine.contract.cache_salt import salt_digest
from faser.engine.contract.plan import DraftPlan, DraftRequest, SequenceStart
from faser.engine.execution.drafting.text import LookupDrafter, ngram_table
from faser.kernels.cpu import library as native_library
from faser.kernels.cpu.build import library_path
from faser.kernels.cpu.text_index import TextRules
from faser.types.sampling import SamplingParams
from tests.engine.execution.draft_lines import committed, lines_of
from tests.engine.execution.drafting.oracle.ngram_model import NgramModelDrafter


def start_of(slot: int, token_ids: tuple[int, ...], salt: str | None = None) -> SequenceStart:
    return SequenceStart(
        slot=slot,
        sampling=SamplingParams(),
        seed=0,
        prompt_len=len(token_ids),
        token_ids=token_ids,
        salt=salt_digest(salt),
    )


def plan_for(unverified: dict[int, tuple[int, ...]], most: int = 16) -> DraftPlan:
    return DraftPlan(
        step=0,
        width=16,
        requests=tuple(
            DraftRequest(slot=slot, max_tokens=most, new_blocks=(), unverified=tokens)
            for slot, tokens in unverified.items()
        ),
    )


def test_a_chain_takes_the_context_whose_next_token_is_likeliest() -> None:
    """After 1 2 come 3 and, alone, 4: the longer context knows better, and is followed to its end."""
    texts = [(9, 1, 2, 3, 5)] * 8 + [(8, 2, 4)] * 20
    drafter = NgramModelDrafter(count(texts), cap=4)
    drafter.start(start_of(0, (9, 1, 2)))
    drafter.start(start_of(1, (2,)))
    drafter.start(start_of(2, (77,)))
    found = lines_of(drafter.propose(plan_for({0: (), 1: (), 2: ()})).table)
    assert [draft.token_ids for draft in found] == [(3, 5), (4,), ()]
    assert all(0 < chance < 1 for draft in found for chance in draft.confidences)


def test_an_unlikely_token_ends_the_chain() -> None:
    """Each of thirty tokens follows a 0 as often: none of them is worth a row."""
    texts = [(0, each) for each in range(1, 61)] * 2
    drafter = NgramModelDrafter(count(texts), cap=4)
    drafter.start(start_of(0, (0,)))
    (draft,) = lines_of(drafter.propose(plan_for({0: ()})).table)
    assert draft.token_ids == ()


def test_a_chain_depends_on_the_last_tokens_alone() -> None:
    """Whatever other sequences said, whatever their salts: nothing is learned from text that is served."""
    drafter = NgramModelDrafter(count([(1, 2, 3, 4)] * 5), cap=4)
    drafter.start(start_of(0, (5, 1, 2), salt="a"))
    before = lines_of(drafter.propose(plan_for({0: ()})).table)
    drafter.start(start_of(1, (1, 2), salt="b"))
    for _ in range(20):
        drafter.commit(*committed({1: (2, 9, 1, 2, 9)}))
    drafter.release(1)
    assert lines_of(drafter.propose(plan_for({0: ()})).table) == before


@pytest.mark.parametrize("kinds", [2, 6, 40])
def test_every_native_draft_is_that_of_python_to_the_bit(kernel_cache: Path, kinds: int) -> None:
    rng = random.Random(kinds)
    drafted = 0
    for longest in (1, 2, 3, 4):
        texts = [[int(kinds * rng.random() ** 2) for _ in range(60)] for _ in range(5)]
        model = count(texts, longest=longest, fewest=1 + longest % 2)
        library = native_library.load(library_path(cache_dir=kernel_cache))
        native = LookupDrafter(library, TextRules(cap=5, ngrams=ngram_table(library, model)))
        python = NgramModelDrafter(model, cap=5)
        for slot in range(3):
            token_ids = tuple(rng.randrange(kinds) for _ in range(slot * 2))
            for each in (native, python):
                each.start(start_of(slot, token_ids))
        for _ in range(40):
            unverified = {slot: tuple(rng.randrange(kinds) for _ in range(rng.randrange(5))) for slot in (2, 0, 1)}
            plan = plan_for(unverified, most=rng.randrange(1, 8))
            found = native.propose(plan)
            assert lines_of(found.table) == lines_of(python.propose(plan).table)
            drafted += sum(len(draft.token_ids) for draft in lines_of(found.table))
            sampled = {slot: [rng.randrange(kinds) for _ in range(rng.randrange(3))] for slot in range(3)}
            for each in (native, python):
                each.commit(*committed(sampled))
    assert drafted > 300
