"""A single number for what lanes cost finds the wrong mode on one side of a machine's ridge, a matrix on neither.

The machine is made up: a step takes as long as reading (weights, once) or arithmetic (for every row), whichever is
longer. Both lanes have the same memory and processors; where these are short each gets a part, as it asks for it.
So below some rows both lanes wait for memory, and above them verification leaves some of it to the draft. Context
costs nothing here: the matrix has one line. Oracle: the same machine asked at every single number of rows.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from faser.engine.contract.drafts import Drafts, table_of
from faser.engine.contract.plan import StepResult
from faser.engine.contract.step_times import CostTable, InterferenceTable, Role, StepTimes
from faser.engine.control.speculation.acceptance import Acceptance
from faser.engine.control.speculation.draft_lengths import Objective, best_lengths
from faser.engine.control.speculation.overlap import ON, Frontiers, OverlapControl, OverlapOptions, best_overlap
from faser.engine.control.speculation.policies import Fixed
from faser.engine.control.speculation.policy import Candidates, StepFacts
from faser.engine.control.step_cost import CostModel

READ_S, ROW_S = 1 / 4.3e12, 2 / 780e12  # a byte; a multiply-add
SHARE = 0.5
MEASURED = (16, 64, 128, 256)
MOST_ROWS = 1000
ROWS_EACH = 4
CAP = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """parameters: two bytes each, read once a step; a multiply-add each for every row. waits_s: for neither."""

    parameters: float
    waits_s: float = 0.0

    def read_s(self) -> float:
        return 2 * self.parameters * READ_S

    def compute_s(self, rows: float) -> float:
        return self.parameters * rows * ROW_S

    def step_s(self, rows: float, *, memory: float = 1.0, processors: float = 1.0) -> float:
        """With at most such parts of both."""
        return max(self.read_s() / memory, self.compute_s(rows) / processors) + self.waits_s


TARGET, DRAFTER = Model(parameters=8e9), Model(parameters=1.2e9, waits_s=3e-4)


def beside(rows: int) -> tuple[float, float]:
    """Slowdown of a step and of a pass for its sequences: what is short is given out as it is asked for."""
    passed = rows / ROWS_EACH
    step_s, pass_s = TARGET.step_s(rows), DRAFTER.step_s(passed)
    memory = max(TARGET.read_s() / step_s + DRAFTER.read_s() / pass_s, 1.0)
    processors = max(TARGET.compute_s(rows) / step_s + DRAFTER.compute_s(passed) / pass_s, 1.0)
    return (
        TARGET.step_s(rows, memory=1 / memory, processors=1 / processors) / step_s,
        DRAFTER.step_s(passed, memory=1 / memory, processors=1 / processors) / pass_s,
    )


def lanes_at(rows: tuple[int, ...]) -> InterferenceTable:
    """What a measurement of these rows finds."""
    verify, draft = zip(*(beside(each) for each in rows), strict=True)
    ones = (tuple(1.0 for _ in rows),)
    return InterferenceTable(
        share=SHARE,
        rows=rows,
        contexts=(64,),
        verify=(verify,),
        draft=(draft,),
        verify_alone=ones,
        draft_alone=ones,
    )


def costs() -> CostModel:
    counts = tuple(range(1, MOST_ROWS))
    return CostModel(
        StepTimes(
            tables={
                Role.STEP: CostTable(rows=counts, seconds=tuple(TARGET.step_s(each) for each in counts)),
                Role.PASS: CostTable(rows=counts, seconds=tuple(DRAFTER.step_s(each) for each in counts)),
            }
        )
    )


TRUTH, MATRIX = lanes_at(tuple(range(1, MOST_ROWS))), lanes_at(MEASURED)
COSTS = costs()


FEW, MANY = (2, 16, 32), (64, 128)  # requests, whose steps with drafts lie below and above the ridge


def requests(count: int) -> Candidates:
    """Each with drafts whose tokens are right with a probability of 0.9."""
    survival = np.tile(0.9 ** np.arange(CAP + 1.0), (count, 1))
    return Candidates.alike(np.arange(count), np.full(count, CAP), survival, kv_tokens=64 * count)


def gain(count: int, lanes: InterferenceTable) -> float:
    """Of drafting ahead over the best other way, as these lanes let expect it."""
    candidates = requests(count)
    objective = Objective(COSTS, candidates)
    without = max(best_lengths(candidates, objective, COSTS).rate, objective.rate_without_drafts)
    found = best_overlap(candidates, objective, COSTS, (lanes,))
    assert found is not None
    return found.rate / without


def drafts_overlapped(count: int, lanes: InterferenceTable) -> bool:
    """As an engine judges that has these lanes."""
    acceptance = Acceptance(count, CAP)
    options = OverlapOptions(name="lanes", lanes=(lanes,))
    control = OverlapControl(COSTS, acceptance, Frontiers(count), options)
    control.decide(requests(count), None)
    return control.lanes is not None


def test_the_made_up_machine_has_a_side_where_drafting_ahead_pays_and_one_where_it_does_not() -> None:
    assert max(gain(count, TRUTH) for count in FEW) < 0.95
    assert min(gain(count, TRUTH) for count in MANY) > 1.05


@pytest.mark.parametrize("count", [*FEW, *MANY])
def test_a_matrix_finds_the_right_mode_on_both_sides_of_the_ridge(count: int) -> None:
    """Though it was measured at four numbers of rows. Caught: the rows of drafts alone looked up."""
    assert drafts_overlapped(count, MATRIX) == drafts_overlapped(count, TRUTH) == (count in MANY)


@pytest.mark.parametrize("rows", MEASURED)
def test_one_number_finds_the_wrong_mode_on_one_side_wherever_it_was_measured(rows: int) -> None:
    anywhere = lanes_at((rows,))
    wrong = FEW if rows == max(MEASURED) else MANY
    assert all(drafts_overlapped(count, anywhere) != (count in MANY) for count in wrong)


def test_what_a_matrix_lets_expect_is_near_what_comes() -> None:
    for count in (*FEW, *MANY):
        assert gain(count, MATRIX) == pytest.approx(gain(count, TRUTH), rel=0.06)


UNEVEN = InterferenceTable(
    share=SHARE,
    rows=(7, 9),
    contexts=(100, 400),
    verify=((1.5, 2.0), (2.5, 3.0)),
    draft=((1.1, 1.2), (1.3, 1.4)),
    verify_alone=((1.0, 1.0), (1.0, 1.0)),
    draft_alone=((1.0, 1.0), (1.0, 1.0)),
)


def test_overlapped_steps_are_foreseen_by_their_own_rows_and_context() -> None:
    """Two sequences and five rows of prompts. The second step has a chunk of two, and longer context.

    Caught: rows without the prompts, without the chunks, of the step before; context of both sequences together.
    """
    acceptance = Acceptance(2, CAP)
    options = OverlapOptions(name="lanes", lanes=(UNEVEN,), mode=ON)
    control = OverlapControl(COSTS, acceptance, Frontiers(2), options)
    expected_draft_s = measured_draft_s = 0.0
    policy, verify_s, draft_s = Fixed(3), 0.004, 3 * COSTS.pass_s(2)

    def state(kv_tokens: int) -> Candidates:
        return replace(requests(2), step=StepFacts(other_rows=5, kv_tokens=kv_tokens, kv_sequences=2))

    control.decide(state(200), None)

    def step(kv_tokens: int, drafted: tuple[tuple[int, ...], ...], sampled: tuple[tuple[int, ...], ...]) -> int:
        """As long as both lanes take, of which the draft is done first. Returns rows of drafted tokens."""
        nonlocal expected_draft_s, measured_draft_s
        ready, table = control.ready(state(kv_tokens))
        chunks: dict[int, tuple[int, ...]] = dict.fromkeys(range(2), ())
        if len(ready):
            _, kept = control.chunks(state(kv_tokens).take(ready), table, policy)
            chunks |= {
                slot: table.tokens(at)[1 : 1 + kept.item(at)] for at, slot in enumerate(table.slots.tolist())
            }
        rows = 2 + 5 + sum(map(len, chunks.values()))
        verify, draft = {(7, 200): (1.5, 1.1), (9, 800): (3.0, 1.4)}[rows, kv_tokens]
        both_s = draft_s * draft
        run_s = both_s + verify_s * (1 - both_s / (verify_s * verify))
        made = table_of(range(2), "draft_model", drafted, [(1.0,) * 3] * 2, width=CAP)
        learned = control.learn(
            StepResult(step=1, counts=[], token_ids=[], run_s=run_s),
            Drafts(step=1, table=made, run_s=both_s, passes=3),
            requested=np.array([3, 3]),
            unverified=chunks,
            sampled=dict(enumerate(sampled)),
            verify_s=verify_s,
        )
        expected_draft_s += learned.draft_s
        measured_draft_s += both_s
        return rows - 7

    assert step(200, ((7, 8, 8), (5, 5, 5)), ((7,), (9,))) == 0
    assert step(800, ((1, 1, 1), (1, 1, 1)), ((8, 8, 2), (2,))) == 2
    assert step(200, ((1, 1, 1), (1, 1, 1)), ((2,), (2,))) == 0
    cycle = control.stats()
    assert cycle.predicted_s == pytest.approx(cycle.measured_s)
    assert expected_draft_s == pytest.approx(measured_draft_s)
