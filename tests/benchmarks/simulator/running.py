"""Short ways to a contest over made-up traces, and a simulation that checks every step's books."""

from benchmarks.simulator.contest import Contest, Figures
from benchmarks.simulator.simulation import Machine, Simulation
from benchmarks.simulator.trace import Trace
from benchmarks.simulator.workload import parse_workload
from benchmarks.spec_bench.policy_spec import parse_policy
from faser.engine.contract.step_times import StepTimes
from faser.engine.control.step_cost import CostModel
from faser.types.request import Slo

STEP_S, ROW_S, PASS_S = 0.02, 0.0005, 0.003


def machine(
    *,
    step_s: float = STEP_S,
    row_s: float = ROW_S,
    pass_s: float | None = PASS_S,
    text_s: float | None = None,
    overhead_s: float = 0.0,
    max_num_seqs: int = 64,
    kv_tokens: int | None = None,
    noise: float = 0.0,
) -> Machine:
    return Machine(
        costs=CostModel(StepTimes.proportional(step_s=step_s, row_s=row_s, pass_s=pass_s, text_s=text_s)),
        max_num_seqs=max_num_seqs,
        max_model_len=1024,
        kv_tokens=kv_tokens,
        step_overhead_s=overhead_s,
        draft_overhead_s=overhead_s,
        noise=noise,
    )


def contest(
    trace: Trace,
    serving: Machine,
    *,
    arrivals: str = "closed:1",
    duration_s: float | None = None,
    limit: int | None = 32,
    slo: Slo | None = None,
    seed: int = 0,
) -> Contest:
    return Contest(
        trace=trace,
        machine=serving,
        workload=parse_workload(arrivals),
        duration_s=duration_s,
        limit=limit,
        slo=slo,
        seed=seed,
    )


def run(trace: Trace, serving: Machine, policy: str, **options: object) -> Figures:
    spec = parse_policy(policy, cap=trace.max_tokens)
    return contest(trace, serving, **options).run(spec)  # type: ignore[arg-type]


class CheckedSimulation(Simulation):
    """A simulation whose scheduler restates its invariants after every step."""

    def step(self, duration_s: float | None = None) -> None:
        super().step(duration_s)
        self.scheduler.check_invariants()
