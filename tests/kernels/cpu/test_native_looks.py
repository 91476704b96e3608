"""Drafts that are looked up, chosen and judged natively. Oracle: planned look-ups, and Acceptance in Python.

Planted bugs that these tests have caught: the draft that was taken teaches a second time; methods in another
order; a draft without a token is promising; tokens of an earlier look beyond the end of a draft; limits are not
heard.
"""

from pathlib import Path

import numpy as np
import pytest

from faser.config.speculation import DRAFT_METHODS
from faser.engine.contract.drafts import Drafts, DraftTable
from faser.engine.contract.plan import DraftPlan, DraftRequest
from faser.engine.control.speculation.policy import Candidates
from faser.engine.control.speculation.step_drafts import StepDrafts
from faser.engine.execution.drafting.text import IndexedTexts, LookupDrafter, TextAndModel, texts_of
from faser.kernels.cpu.text_index import TextRules, text_library
from faser.types.arrays import Ints
from tests.engine.execution.drafting.test_text import start_of
from tests.kernels.cpu.test_acceptance import ARRAYS, CAP, NUM_SLOTS, VOCAB, Twins

RULES = TextRules(
    cap=CAP, depth=8, max_outputs=4, max_tokens=200, max_spec_factor=2.0, min_token_prob=0.1, min_n=1, max_n=3
)


class LookingTwins(Twins):
    """Both, over the same texts, which repeat themselves."""

    def __init__(self, seed: int, kernel_cache: Path) -> None:
        super().__init__(seed, kernel_cache)
        self.drafter = LookupDrafter(text_library(kernel_cache), RULES)
        texts = texts_of(self.drafter, None)
        assert texts is not None
        self.texts = texts
        for slot in range(NUM_SLOTS):
            self.drafter.start(start_of(slot, self.rng.integers(0, VOCAB, 12).tolist()))

    def look(self, slots: Ints, limits: Ints, row_price: float) -> tuple[StepDrafts, StepDrafts]:
        """Look up natively, and by a plan among whose answers Python chooses."""
        native = self.native.native
        assert native is not None
        candidates = Candidates.alike(slots, limits, np.ones((len(slots), CAP + 1)))
        columns, survival, num_promising = native.look(self.texts, slots, limits, row_price)
        looked = StepDrafts(
            sequences=[],
            lengths=limits,
            candidates=candidates,
            is_looked=True,
            drafts=Drafts(step=0, table=DraftTable(*columns), run_s=0.0),
            survival=survival,
        )
        requests = tuple(map(DraftRequest, slots.tolist(), limits.tolist()))
        plan = DraftPlan(step=0, width=CAP, requests=requests, from_text=True)
        planned = StepDrafts(sequences=[], lengths=limits, candidates=candidates)
        found = Drafts(step=0, table=self.drafter.propose(plan).table, run_s=0.0)
        planned.take_text(found, self.python, notes=False, row_price=row_price)
        assert num_promising == np.count_nonzero(
            (planned.survival[:, 1] > row_price) & (planned.table.lengths > 0)
        )
        return looked, planned

    def look_step(self) -> int:
        """Look, verify some tokens, learn, and go on. Returns how many tokens were drafted."""
        slots = self.slots()
        limits, row_price = self.rng.integers(0, CAP + 1, len(slots)), float(self.rng.choice([0.0, 0.4, 0.7]))
        looked, planned = self.look(slots, limits, row_price)
        for one, other in zip(looked.table, planned.table, strict=True):
            np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(looked.survival, planned.survival, rtol=1e-9)
        kept = self.rng.integers(0, looked.table.lengths + 1)
        sampled = self.sampled(looked.table, kept)
        found = []
        for step, acceptance in ((looked, self.native), (planned, self.python)):
            step.kept = kept
            found.append(step.judge(acceptance, sampled).tolist())
            acceptance.learn_held()
        assert found[0] == found[1]
        for name in ARRAYS:
            np.testing.assert_allclose(
                getattr(self.native, f"_{name}"), getattr(self.python, f"_{name}"), rtol=1e-7, err_msg=name
            )
        for slot, tokens in sampled.by_slot().items():
            self.drafter.commit([slot], [len(tokens)], tokens)
        return int(looked.table.lengths.sum())


@pytest.mark.parametrize("seed", range(12))
def test_native_looks_find_and_teach_what_planned_ones_do(seed: int, kernel_cache: Path) -> None:
    twins = LookingTwins(seed, kernel_cache)
    assert sum(twins.look_step() for _ in range(30)) > 100


def test_a_slot_without_a_text_is_named(kernel_cache: Path) -> None:
    twins = LookingTwins(0, kernel_cache)
    twins.drafter.release(3)
    with pytest.raises(KeyError, match=r"\[2, 3\]"):
        twins.look(np.array([2, 3]), np.array([1, 1]), 0.0)


def test_texts_are_looked_up_only_where_nothing_else_drafts(kernel_cache: Path) -> None:
    lookup = LookupDrafter(text_library(kernel_cache), RULES)
    assert isinstance(texts_of(TextAndModel([lookup]), None), IndexedTexts)
    assert texts_of(TextAndModel([lookup], lookup), None) is None
    assert texts_of(TextAndModel([lookup, lookup]), None) is None


def test_methods_have_the_numbers_of_the_tables(kernel_cache: Path) -> None:
    texts = texts_of(LookupDrafter(text_library(kernel_cache), RULES), None)
    assert texts is not None
    assert [DRAFT_METHODS[each] for each in texts.method_ids.tolist()] == ["suffix", "ngram"]
