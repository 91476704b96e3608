"""Drafting during steps on a simulated machine. Oracles: closed forms of PEARL's scheme, and the other modes."""

import pytest

from benchmarks.simulator.co_run import InterferenceTable
from benchmarks.simulator.contest import Contest
from benchmarks.simulator.executor import SimulatedExecutor
from benchmarks.simulator.simulation import Machine
from benchmarks.simulator.trace import iid_trace
from benchmarks.simulator.workload import Workload
from benchmarks.spec_bench.policy_spec import parse_policy
from faser.engine.contract.plan import DraftPlan, SequenceRows, StepPlan, StepRows
from faser.engine.contract.step_times import StepTimes
from faser.engine.control.clock import SimulatedClock
from faser.engine.control.speculation.control import SpeculationControl
from faser.engine.control.step_cost import CostModel
from faser.types.statistics import SpeculationStats
from tests.benchmarks.simulator.running import CheckedSimulation

CAP = 6
STEP_S, PASS_S = 0.010, 0.002
FREE = InterferenceTable.constant(share=0.5, verify=1.0, draft=1.0, verify_alone=1.0, draft_alone=1.0)
UNEVEN = InterferenceTable(
    share=0.5,
    rows=(2, 6),
    contexts=(16, 64),
    verify=((2.0, 3.0), (4.0, 5.0)),
    draft=((1.0, 1.0), (1.0, 1.0)),
    verify_alone=((1.5, 1.6), (1.7, 1.8)),
    draft_alone=((1.0, 1.0), (1.0, 1.0)),
)
DEAR = InterferenceTable.constant(share=0.5, verify=2.5, draft=2.5, verify_alone=2.0, draft_alone=2.0)


def contest(
    acceptance: float,
    lanes: InterferenceTable,
    *,
    clients: int = 1,
    pass_s: float = PASS_S,
    num_requests: int = 12,
) -> Contest:
    """Steps of STEP_S whatever their rows, passes of pass_s; answers of 400 tokens."""
    return Contest(
        trace=iid_trace(acceptance, max_tokens=CAP, num_requests=num_requests, prompt_len=4, output_len=400),
        machine=Machine(
            costs=CostModel(StepTimes.proportional(step_s=STEP_S, pass_s=pass_s)),
            lanes=(lanes,),
            max_num_seqs=16,
            step_overhead_s=0.0,
            draft_overhead_s=0.0,
        ),
        workload=Workload(clients=clients, in_order=True),
        duration_s=None,
        limit=num_requests,
    )


def speed(given: Contest, policy: str) -> float:
    return given.run(parse_policy(policy, cap=CAP)).tokens_per_s


def stats(given: Contest, policy: str) -> SpeculationStats:
    spec = parse_policy(policy, cap=CAP)

    def control(costs: CostModel, clock: SimulatedClock) -> SpeculationControl:
        return spec.make_control(costs, clock, drafter="draft_model", cap=CAP, num_slots=16, share=FREE.share)

    simulation = CheckedSimulation(given.trace, given.machine, control)
    workload = given.workload
    outcome = simulation.run(
        workload.arrivals(given.trace, duration_s=None, limit=given.limit, seed=0),
        clients=workload.clients,
        duration_s=None,
    )
    assert outcome.speculation is not None
    return outcome.speculation


def frontier_speed(acceptance: float, length: int, lanes: InterferenceTable) -> float:
    """Tokens a second of one sequence: 1 - p + p (1 - a^m) / (1 - a), p = a / (1 + a - a^m), over both lanes."""
    ready = acceptance / (1 + acceptance - acceptance**length)
    tokens = 1 - ready + ready * (1 - acceptance**length) / (1 - acceptance)
    return tokens / lanes.one(STEP_S, length * PASS_S, rows=1, context=1)


@pytest.mark.parametrize("acceptance", [0.5, pytest.param(0.8, marks=pytest.mark.full), 0.9])
@pytest.mark.parametrize("length", [2, 5])
@pytest.mark.full(but=("5-0.9",))
def test_a_fixed_length_ahead_brings_the_closed_form(acceptance: float, length: int) -> None:
    found = speed(contest(acceptance, FREE), f"fixed:{length}+overlap")
    assert found == pytest.approx(frontier_speed(acceptance, length, FREE), rel=0.06)


@pytest.mark.parametrize("acceptance", [0.6, 0.9])
@pytest.mark.full(but=("0.9",))
def test_the_best_length_ahead_comes_near_the_best_closed_form(acceptance: float) -> None:
    best = max(frontier_speed(acceptance, length, FREE) for length in range(1, CAP + 1))
    assert speed(contest(acceptance, FREE), "faser+overlap") >= 0.93 * best


@pytest.mark.full
@pytest.mark.parametrize(("acceptance", "clients"), [(0.9, 1), (0.9, 8), (0.6, 1), (0.6, 8)])
@pytest.mark.parametrize("lanes", [FREE, DEAR])
def test_auto_is_about_as_fast_as_the_best_mode(acceptance: float, clients: int, lanes: InterferenceTable) -> None:
    """After the steps that it takes to find out, which are a tenth of those of 12 answers."""
    given = contest(acceptance, lanes, clients=clients, num_requests=24 * (1 + clients // 4))
    best = max(speed(given, policy) for policy in ("off", "faser+serial", "faser+overlap"))
    assert speed(given, "faser+auto") >= 0.92 * best


@pytest.mark.full
def test_lanes_that_cost_too_much_are_left_and_cheap_ones_are_used() -> None:
    cheap = dict(stats(contest(0.9, FREE), "faser+auto").mode_steps)
    dear = dict(stats(contest(0.9, DEAR), "faser+auto").mode_steps)
    assert cheap["lanes"] > 0.8 * sum(cheap.values())
    assert dear["lanes"] < 0.1 * sum(dear.values())


@pytest.mark.full
def test_drafted_tokens_are_verified_or_pruned_and_those_dropped_are_among_the_pruned() -> None:
    (method,) = [each for each in stats(contest(0.7, FREE), "faser+overlap").methods if each.drafted]
    assert method.drafted == method.pruned + method.verified
    assert 0 < method.dropped <= method.pruned
    assert 0 < method.accepted <= method.verified


@pytest.mark.full
def test_the_time_of_overlapped_steps_is_foreseen() -> None:
    found = stats(contest(0.8, FREE), "faser+overlap")
    predicted = sum(each.predicted_s for each in found.roles if each.role == "step")
    measured = sum(each.measured_s for each in found.roles if each.role == "step")
    assert predicted == pytest.approx(measured, rel=0.05)
    assert found.overlap_s > 0
    assert found.draft_share == FREE.share


@pytest.mark.parametrize(
    ("sequences", "slowed"),
    [(((10, 1), (22, 1)), 1.5), (((16, 6),), 1.6), (((64, 1), (64, 1)), 1.7), (((8, 3), (120, 3)), 1.8)],
)
def test_a_step_is_slowed_down_by_its_own_rows_and_context(
    sequences: tuple[tuple[int, int], ...], slowed: float
) -> None:
    """Nobody drafts, so verification is alone on its lane. Caught: sequences counted as rows, contexts summed."""
    costs = CostModel(StepTimes.proportional(step_s=STEP_S, pass_s=PASS_S))
    executor = SimulatedExecutor(
        iid_trace(0.9, max_tokens=CAP, num_requests=1, prompt_len=4, output_len=4), costs, lanes=(UNEVEN,)
    )
    rows = tuple(
        SequenceRows(slot=slot, start=start, token_ids=(1,) * count, new_blocks=(), samples=False)
        for slot, (start, count) in enumerate(sequences)
    )
    plan = StepPlan(step=1, released=(), started=(), rows=StepRows.of(*rows))
    result, _ = executor.run_overlapped(plan, DraftPlan(width=32, step=1, requests=(), share=UNEVEN.share))
    assert result.run_s == pytest.approx(STEP_S * slowed)
