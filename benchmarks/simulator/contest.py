"""Contest: every policy serves the same requests at every load. Owns how one run becomes a row of numbers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.cells import Times, share
from benchmarks.simulator.simulation import Machine, Outcome, Simulation
from benchmarks.simulator.trace import Trace
from benchmarks.simulator.workload import Workload
from benchmarks.spec_bench.policy_spec import PolicySpec
from faser.engine.control.clock import SimulatedClock
from faser.engine.control.speculation.control import SpeculationControl
from faser.engine.control.step_cost import CostModel
from faser.types.request import Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The result of one policy at one load. See Outcome for the counts.

    tokens_per_s: within the duration. tpot: time per token after a request's first one, of requests with more than
    one. gamma: verified tokens per decoding sequence and step. accepted_share: of the verified tokens. slo_share:
    of requests that met every target; None without targets.
    """

    policy: str
    load: float
    num_requests: int
    output_tokens: int
    tokens_per_s: float
    ttft: Times
    tpot: Times
    e2e: Times
    num_steps: int
    mean_step_ms: float
    tokens_per_turn: float
    gamma: float
    drafted: int
    verified: int
    accepted: int
    accepted_share: float
    utilisation: float
    slo_share: float | None
    elapsed_s: float
    num_preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """Setting that all runs share. duration_s: of arrivals. limit: most requests. A closed workload needs one."""

    trace: Trace
    machine: Machine
    workload: Workload
    duration_s: float | None
    limit: int | None = None
    slo: Slo | None = None
    seed: int = 0

    def run(
        self, spec: PolicySpec, load: float = 1.0, progress: Callable[[float, int], None] = lambda _at, _done: None
    ) -> Figures:
        """Serve the workload at this load under this policy."""
        workload = self.workload.at_load(load)
        simulation = Simulation(self.trace, self.machine, self._control(spec), slo=self.slo, seed=self.seed)
        outcome = simulation.run(
            workload.arrivals(self.trace, duration_s=self.duration_s, limit=self.limit, seed=self.seed),
            clients=workload.clients,
            duration_s=self.duration_s,
            progress=progress,
        )
        return summarise(outcome, spec.text, load, duration_s=self.duration_s, slo=self.slo)

    def runs(self, specs: Sequence[PolicySpec], loads: Sequence[float]) -> Iterator[tuple[PolicySpec, float]]:
        return ((spec, load) for load in loads for spec in specs)

    def _control(self, spec: PolicySpec) -> Callable[[CostModel, SimulatedClock], SpeculationControl]:
        def make(costs: CostModel, clock: SimulatedClock) -> SpeculationControl:
            return spec.make_control(
                costs,
                clock,
                drafter=self.trace.drafter,
                cap=self.trace.max_tokens,
                num_slots=self.machine.max_num_seqs,
                share=self.machine.lanes[0].share if self.machine.lanes else 0.0,
            )

        return make


def summarise(outcome: Outcome, policy: str, load: float, *, duration_s: float | None, slo: Slo | None) -> Figures:
    """The numbers of one run."""
    served = outcome.served
    tpot_s = [each.tpot_s for each in served if each.num_tokens > 1]
    window_s = outcome.elapsed_s if duration_s is None else duration_s
    return Figures(
        policy=policy,
        load=load,
        num_requests=len(served),
        output_tokens=sum(each.num_tokens for each in served),
        tokens_per_s=share(outcome.window_tokens, window_s),
        ttft=Times.of([each.first_s - each.arrival_s for each in served]),
        tpot=Times.of(tpot_s),
        e2e=Times.of([each.finished_s - each.arrival_s for each in served]),
        num_steps=outcome.num_steps,
        mean_step_ms=share(1000 * outcome.busy_s, outcome.num_steps),
        tokens_per_turn=1 + share(outcome.accepted, outcome.turns),
        gamma=share(outcome.verified, outcome.turns),
        drafted=outcome.drafted,
        verified=outcome.verified,
        accepted=outcome.accepted,
        accepted_share=share(outcome.accepted, outcome.verified),
        utilisation=share(outcome.busy_s, outcome.elapsed_s),
        slo_share=_met(outcome, slo),
        elapsed_s=outcome.elapsed_s,
        num_preemptions=outcome.num_preemptions,
    )


def _met(outcome: Outcome, slo: Slo | None) -> float | None:
    if slo is None or slo == Slo():
        return None
    met = 0
    for each in outcome.served:
        in_time = slo.ttft_ms is None or (each.first_s - each.arrival_s) * 1000 <= slo.ttft_ms
        per_token_s = share(each.finished_s - each.first_s, each.num_tokens - 1)
        met += in_time and (slo.tpot_ms is None or per_token_s * 1000 <= slo.tpot_ms)
    return share(met, len(outcome.served))
