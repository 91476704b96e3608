"""Drafts from text alone: all sequences look, and only those whose draft may be worth a row decide.

A policy keeps all that it is asked about, over the real scheduler and a scripted executor of known answers.
Planted bugs that these tests have caught: blocks of a draft are not told to the data plane; a draft keeps more
tokens than there are blocks for; drafts of which nothing is kept teach nothing; the price of a row stays that of
an earlier load; a sequence with a target is held to the price; the choice between drafts does not hear the price.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.control.speculation.control import SpeculationControl
from faser.engine.control.speculation.draft_lengths import Objective, best_prefixes
from faser.engine.control.speculation.policy import Candidates, OtherRows, Policy
from faser.engine.control.step_cost import CostModel
from faser.types.arrays import Ints
from faser.types.request import Request, Slo, SpeculationParams
from tests.engine.control.speculation.building import answer, candidates, full, named_drafts, one_draft
from tests.engine.control.speculation.test_policies import staircase
from tests.engine.driving import DRAFT_CAP, Driver, request


@dataclass
class Looking(Policy):
    """A Policy: every draft that is worth more than a price, and all of it. asked: sequences that it was shown.

    prices: by the number of sequences; 0 of others.
    """

    prices: dict[int, float] = field(default_factory=dict)
    asked: list[int] = field(default_factory=list)
    name: str = "looking"
    looks_first: bool = True

    def lengths(self, candidates: Candidates) -> Ints:
        raise AssertionError(f"{candidates.num_sequences} sequences look, which no policy decides")

    def row_price(self, candidates: Candidates) -> float:
        return self.prices.get(candidates.num_sequences, 0.0)

    def keep(self, candidates: Candidates, lengths: Ints) -> Ints:
        self.asked.append(candidates.num_sequences)
        return lengths


def asking(name: str, *, prompt: int = 6, max_tokens: int = 30, tpot_ms: float | None = None) -> Request:
    asked = request(name, [100 + len(name)] * prompt, max_tokens=max_tokens)
    return replace(asked, speculation=SpeculationParams(slo=Slo(tpot_ms=tpot_ms)))


def driver_with(policy: Looking, *, num_blocks: int = 200, max_num_seqs: int = 8) -> Driver:
    return Driver(num_blocks=num_blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=200, speculates=policy)


def test_drafts_that_may_be_worth_a_row_are_verified_and_change_no_answer() -> None:
    policy, asked = Looking(), [asking("a"), asking("bb", max_tokens=17)]
    driver = driver_with(policy)
    driver.add(*asked)
    plans = driver.run()
    driver.check(*asked)
    assert max(policy.asked) == 2
    assert max(count for plan in plans for count in plan.rows.num_drafts) == DRAFT_CAP


def test_where_no_draft_can_be_worth_a_row_steps_are_plain() -> None:
    policy, asked = Looking({1: 1.0}), [asking("a", max_tokens=40)]
    driver = driver_with(policy)
    driver.add(*asked)
    driver.step()
    control = driver.scheduler._speculation
    assert isinstance(control, SpeculationControl)
    plans = driver.run()
    driver.check(*asked)
    assert policy.asked == []
    assert not any(plan.num_drafts for plan in plans)
    assert len(plans) == 39
    (suffix,) = (each for each in control.stats().methods if each.method == "suffix")
    assert suffix.drafted > 0
    assert suffix.verified == 0


def test_what_drafts_would_have_been_right_is_learned_while_none_is_kept() -> None:
    driver = driver_with(Looking({1: 1.0}))
    driver.add(asking("a", max_tokens=50))
    control = driver.scheduler._speculation
    assert isinstance(control, SpeculationControl)
    for _ in range(12):
        driver.step()
    assert control._acceptance._precision.max() > 0.0


def test_a_load_that_changes_has_a_price_of_its_own_at_once() -> None:
    policy = Looking({2: 1.0})
    driver = driver_with(policy)
    driver.add(asking("a", max_tokens=40), asking("bb", max_tokens=40))
    driver.step()
    driver.step()
    assert policy.asked == []
    driver.abort("bb")
    driver.step()
    assert policy.asked == [1]


def test_a_sequence_with_a_target_is_asked_about_at_any_price() -> None:
    policy = Looking({2: 1.0})
    driver = driver_with(policy)
    driver.add(asking("a"), asking("target", tpot_ms=1.0))
    driver.step()
    driver.step()
    assert policy.asked == [1]


@pytest.mark.parametrize(("price", "method"), [(0.0, "suffix"), (0.62, "ngram")])
def test_between_drafts_the_price_of_the_load_decides(price: float, method: str) -> None:
    """A long draft has the most expected tokens, but at this price only a likely token is kept."""
    driver = driver_with(Looking({1: price}))
    driver.add(asking("a"))
    driver.step()
    control, running = driver.scheduler._speculation, driver.scheduler._running
    assert isinstance(control, SpeculationControl)
    others = OtherRows(rows=0, sequences=0)
    step = control.decide(running, others, budget=200, room=lambda _, lengths: lengths)
    assert step is not None
    slot = running[0].held_slot
    step.plan = replace(step.plan, from_text=True)
    drafts = [
        one_draft(slot, "suffix", [0.8] * DRAFT_CAP, width=DRAFT_CAP),
        one_draft(slot, "ngram", [8.0], width=DRAFT_CAP),
    ]
    control.drafted(step, answer(*drafts))
    assert named_drafts(step.table) == [(slot, method)]


@pytest.mark.parametrize("num_blocks", [12, 17, 20, 26, 40])
def test_drafts_take_no_block_that_a_sequence_soon_wants(num_blocks: int) -> None:
    """Few blocks: sequences are preempted, as they are without drafts, and each answer is the same."""
    asked = [asking("a" * (i + 1), prompt=3 + 2 * i, max_tokens=28) for i in range(5)]
    driver = driver_with(Looking(), num_blocks=num_blocks)
    driver.add(*asked)
    driver.run()
    driver.check(*asked)


@pytest.mark.parametrize("seed", range(60))
def test_below_the_least_price_of_a_row_no_token_is_worth_one(seed: int) -> None:
    """Oracle: the best choice of all. Above the price some step verifies tokens, or the price would be too low."""
    rng = np.random.default_rng(seed)
    count, cap = int(rng.integers(1, 6)), 4
    costs = CostModel(
        StepTimes(tables={Role.STEP: staircase(rng), Role.TEXT: CostTable(rows=(1, 2), seconds=(0, 0))})
    )
    alike = candidates(np.ones((count, cap + 1)), other_rows=int(rng.integers(3)))
    objective = Objective(costs, alike)
    price = objective.least_row_price(count * cap)
    lengths = full(count, cap)
    for factor, verifies in ((0.999, False), (1.001, True)):
        survival = np.full((count, cap + 1), price * factor)
        survival[:, 0] = 1.0
        found = best_prefixes(objective, survival, lengths).lengths.sum()
        assert bool(found) == verifies, (price, found)
