"""Oracles: closed forms over made-up traces whose tokens are right independently of each other."""

from dataclasses import replace

import pytest

from benchmarks.simulator.simulation import Machine
from benchmarks.simulator.trace import RequestTrace, Trace, iid_trace
from benchmarks.simulator.workload import Workload, parse_workload
from benchmarks.spec_bench.policy_spec import parse_policy
from faser.engine.contract.step_times import ExpertCosts, StepTimes
from faser.engine.control.clock import SimulatedClock
from faser.engine.control.speculation.control import SpeculationControl
from faser.engine.control.step_cost import CostModel
from faser.errors import ConfigError
from tests.benchmarks.simulator.running import PASS_S, ROW_S, STEP_S, CheckedSimulation, contest, machine, run

CAP = 8


def scripted(runs: list[int], lengths: list[int], *, method: str = "ngram", prompt_len: int = 4) -> Trace:
    """One request with these positions."""
    request = RequestTrace(
        prompt_len=prompt_len,
        runs=tuple(runs),
        lengths=tuple(lengths),
        confidences=tuple((2.0,) * length for length in lengths),
        methods=(0,) * len(runs),
    )
    return Trace(
        model="none", drafter=method, max_tokens=CAP, temperature=0.0, methods=(method,), requests=(request,)
    )


@pytest.mark.parametrize("acceptance", [0.2, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("gamma", [1, 3, 7])
def test_fixed_gamma_brings_the_closed_form_of_tokens_a_turn(acceptance: float, gamma: int) -> None:
    """Oracle: (1 - α^(γ+1)) / (1 - α), arXiv 2211.17192, theorem 3.8."""
    trace = iid_trace(acceptance, max_tokens=CAP, num_requests=8, output_len=300)
    cell = run(trace, machine(), f"fixed:{gamma}", arrivals="closed:8", limit=8)
    assert cell.tokens_per_turn == pytest.approx((1 - acceptance ** (gamma + 1)) / (1 - acceptance), rel=0.05)


def test_off_brings_one_token_a_turn_and_never_drafts() -> None:
    cell = run(iid_trace(0.9), machine(), "off", limit=8)
    assert (cell.tokens_per_turn, cell.drafted, cell.verified, cell.gamma) == (1.0, 0, 0, 0.0)
    assert cell.num_steps == cell.output_tokens


def test_time_is_steps_times_their_cost_and_nothing_else() -> None:
    """Oracle: by hand. 8 requests of 64 prompt tokens and 64 steps each; text drafts come free here."""
    cell = run(iid_trace(0.7, prompt_len=64, output_len=64), machine(), "off", limit=8)
    assert cell.elapsed_s == pytest.approx(8 * ((STEP_S + 64 * ROW_S) + 63 * (STEP_S + ROW_S)))
    assert cell.utilisation == pytest.approx(1.0)


def test_a_model_pays_a_pass_for_every_drafted_token_and_for_what_it_has_not_seen() -> None:
    """Oracle: by hand. Every draft of 2 is right: 1 prompt step, then steps of 3 rows and 3 tokens after 2 passes.

    The first draft catches up on the 4 prompt tokens, and each later one on the last token of its predecessor.
    """
    trace = scripted([2] * 10, [2] * 10, method="draft_model")
    cell = run(trace, machine(row_s=0.0), "fixed:2", limit=1)
    prompt, turns = STEP_S, 3 * (2 * PASS_S + STEP_S)
    assert cell.output_tokens == 10
    assert cell.elapsed_s == pytest.approx(prompt + turns)


def test_catching_up_costs_rows_of_the_first_pass() -> None:
    """Oracle: by hand, with passes that cost their rows only: 5 known tokens, then the 2 not seen, twice."""
    trace = scripted([2] * 10, [2] * 10, method="draft_model")
    costs = CostModel(StepTimes.proportional(step_s=1e-9, row_s=0.0, pass_s=0.0, pass_row_s=1.0))
    cell = run(trace, replace(machine(), costs=costs), "fixed:2", limit=1)
    assert cell.elapsed_s == pytest.approx((5 + 1) + (2 + 1) + (2 + 1))


def test_a_drafter_from_text_costs_its_look_up_per_sequence() -> None:
    trace = scripted([0] * 5, [0] * 5, method="ngram")
    cell = run(trace, machine(step_s=1.0, row_s=0.0, pass_s=None, text_s=0.25), "fixed:4", limit=1)
    assert cell.num_steps == 5
    assert cell.elapsed_s == pytest.approx(5 * 1.0 + 3 * 0.25)  # neither the prompt's step nor the last one drafts


def test_a_draft_is_right_as_far_as_the_trace_says_and_no_further() -> None:
    """Oracle: by hand. Output of 8; position 1 accepts 2 of 4, 4 accepts 0 of 4, 5 has no draft, 6 is the last."""
    trace = scripted([0, 2, 0, 0, 0, 0, 4, 0], [0, 4, 4, 4, 4, 0, 4, 0])
    cell = run(trace, machine(pass_s=None), "fixed:4", limit=1)
    assert cell.num_steps == 1 + len([1, 4, 5, 6])
    assert cell.accepted == 2 + 0 + 0 + 1  # at position 6 the request has room for one drafted token
    assert cell.verified == 4 + 3 + 0 + 1  # at position 4 for three


def test_overheads_are_part_of_every_step_and_of_every_step_with_a_draft() -> None:
    trace = scripted([0] * 4, [1] * 4)
    bare = run(trace, machine(pass_s=None), "fixed:1", limit=1)
    cell = run(trace, machine(pass_s=None, overhead_s=0.5), "fixed:1", limit=1)
    assert cell.elapsed_s - bare.elapsed_s == pytest.approx((4 + 2) * 0.5)


@pytest.mark.parametrize("arrivals", ["closed:1", "closed:7", "poisson:3"])
def test_the_same_requests_and_tokens_are_served_under_every_policy(arrivals: str) -> None:
    trace = iid_trace(0.7, max_tokens=CAP, output_len=20)
    cells = [run(trace, machine(), policy, arrivals=arrivals) for policy in ("off", "fixed:1", "fixed:5")]
    assert {(cell.num_requests, cell.output_tokens) for cell in cells} == {(32, 32 * 20)}


def test_a_run_is_a_function_of_its_seed() -> None:
    trace = iid_trace(0.7, max_tokens=CAP, output_len=20)
    first, again, other = [
        run(trace, machine(noise=0.1), "fixed:3", arrivals="poisson:2", seed=seed) for seed in (1, 1, 2)
    ]
    assert first == again
    assert first.elapsed_s != other.elapsed_s


def test_invariants_hold_in_a_crowded_cache_where_sequences_are_preempted() -> None:
    """Room for 6 of 16 sequences: some are preempted, and go on from where they were."""
    trace = iid_trace(0.8, max_tokens=CAP, num_requests=4, prompt_len=20, output_len=100)
    serving = machine(max_num_seqs=16, kv_tokens=752)

    def control(costs: CostModel, clock: SimulatedClock) -> SpeculationControl:
        spec = parse_policy("fixed:5", cap=CAP)
        return spec.make_control(costs, clock, drafter="draft_model", cap=CAP, num_slots=16)

    simulation = CheckedSimulation(trace, serving, control)
    workload = parse_workload("closed:16")
    outcome = simulation.run(
        workload.arrivals(trace, duration_s=None, limit=40, seed=0), clients=workload.clients, duration_s=None
    )
    assert outcome.num_preemptions > 0
    assert [each.num_tokens for each in outcome.served] == [100] * 40
    assert simulation.scheduler.stats().kv_usage == 0.0


def test_open_arrivals_wait_for_their_time_and_time_jumps_over_idleness() -> None:
    trace = iid_trace(0.5, prompt_len=10, output_len=2)
    cell = run(trace, machine(), "off", arrivals="poisson:0.01", limit=5)
    assert cell.utilisation < 0.01
    assert cell.ttft.p99_ms == pytest.approx(1000 * (STEP_S + 10 * ROW_S))
    assert cell.tpot.mean_ms == pytest.approx(1000 * (STEP_S + ROW_S))
    assert cell.e2e.mean_ms == pytest.approx(cell.ttft.mean_ms + cell.tpot.mean_ms)


def test_a_closed_workload_of_a_duration_ends_and_counts_tokens_of_the_duration() -> None:
    cell = run(iid_trace(0.5), machine(), "off", arrivals="closed:3", duration_s=20.0, limit=None)
    assert cell.elapsed_s >= 20
    step_s = STEP_S + 3 * ROW_S
    assert cell.tokens_per_s == pytest.approx(3 / step_s, rel=0.1)


def test_only_tokens_within_the_duration_count_for_its_rate() -> None:
    """Oracle: by hand. Steps end at 1, 2, … 5 s; two of their tokens come within 2.5 s."""
    trace = scripted([0] * 5, [0] * 5)
    cell = run(trace, machine(step_s=1.0, row_s=0.0), "off", duration_s=2.5, limit=1)
    assert (cell.output_tokens, cell.tokens_per_s) == (5, 2 / 2.5)


def test_waiting_counts_from_the_arrival_and_not_from_the_next_step() -> None:
    """Oracle: by hand. Steps of 1 s; who comes at 0.5 s waits for 0.5 s, then has its own step."""
    spec = parse_policy("off", cap=CAP)
    shared = contest(scripted([0], [0]), machine(step_s=1.0, row_s=0.0))
    cell = replace(shared, workload=Workload(azure=((0.0, 1, 1), (0.5, 1, 1)))).run(spec)
    assert (cell.ttft.mean_ms, cell.elapsed_s) == (1250.0, 2.0)


def test_load_is_what_makes_answers_late() -> None:
    trace = iid_trace(0.5)
    calm = run(trace, machine(), "off", arrivals="poisson:0.1", limit=32)
    crowded = run(trace, machine(), "off", arrivals="poisson:100", limit=32)
    assert crowded.tpot.mean_ms > 1.3 * calm.tpot.mean_ms
    assert crowded.ttft.p99_ms > 5 * calm.ttft.p99_ms


def test_a_request_that_no_machine_of_this_size_serves_is_refused_by_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"1000 \+ 64 tokens; the longest .* is 1024"):
        run(iid_trace(0.5, prompt_len=1000), machine(), "off")


@pytest.mark.parametrize("policy", ["goodput", "survival", "faser"])
def test_adaptive_policies_serve_everything_and_stay_within_the_cap(policy: str) -> None:
    trace = iid_trace(0.8, max_tokens=CAP, output_len=40, spread=0.3)
    cell = run(trace, machine(), policy, arrivals="closed:4")
    assert cell.output_tokens == 32 * 40
    assert 0 <= cell.gamma <= CAP
    assert cell.drafted >= cell.verified >= cell.accepted


def test_faser_is_close_to_the_better_of_off_and_the_best_fixed_gamma() -> None:
    """Passes nearly free and rows nearly free, then both dear."""
    for acceptance, serving in ((0.9, machine(pass_s=0.0005, row_s=0.0001)), (0.1, machine(row_s=0.02))):
        trace = iid_trace(acceptance, max_tokens=CAP, output_len=150)

        def tokens_per_s(policy: str, trace: Trace = trace, serving: Machine = serving) -> float:
            return run(trace, serving, policy, arrivals="closed:4", limit=16).tokens_per_s

        assert tokens_per_s("faser") > 0.93 * max(map(tokens_per_s, ("off", "fixed:1", "fixed:3", "fixed:7")))


@pytest.mark.parametrize("clients", [1, 4, 16])
@pytest.mark.full(but=("4",))
def test_faser_is_close_to_the_best_where_draft_rows_read_experts_of_their_own(clients: int) -> None:
    """A row passes 8 of 128 experts, which are most of its time: drafts pay as far as they share them."""
    experts = ExpertCosts(total=1280, per_row=80, expert_s=2e-4)
    times = StepTimes.proportional(step_s=0.004, row_s=0.002, text_s=1e-5, experts=experts)
    trace, gains = iid_trace(0.6, method="ngram", max_tokens=CAP, output_len=150), {}
    for share in (1.0, 0.2):
        serving = Machine(costs=CostModel(times), max_model_len=1024, draft_share=share)

        def tokens_per_s(policy: str, serving: Machine = serving) -> float:
            return run(trace, serving, policy, arrivals=f"closed:{clients}", limit=3 * clients).tokens_per_s

        fixed = max(map(tokens_per_s, ("fixed:1", "fixed:3", "fixed:5")))
        off, found = tokens_per_s("off"), tokens_per_s("faser")
        assert found > 0.93 * max(off, fixed)
        gains[share] = fixed / off
    assert gains[1.0] < gains[0.2]
