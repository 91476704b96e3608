"""Check of the fleet's replicas against the real scheduler: the same requests through both, on one replica.

The real one is the simulator (benchmarks/simulator): scheduler, KV blocks and chunked prompts as they serve, on a
simulated clock with the same step times. Nothing is shared between prompts, as the simulator keeps no prefixes.
"""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.scale.fleet.replicas import ReplicaModel
from benchmarks.scale.fleet.routers import Routing
from benchmarks.scale.fleet.simulation import Scenario
from benchmarks.scale.fleet.simulation import Simulation as FleetSimulation
from benchmarks.scale.fleet.workload import FleetRequest, fleet_requests
from benchmarks.simulator.simulation import Machine, Simulation
from benchmarks.simulator.trace import iid_trace
from benchmarks.simulator.workload import Arrival
from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.control.step_cost import CostModel


def check(
    trace: Sequence[tuple[float, int, int]], model: ReplicaModel, *, rate: float, seconds: float
) -> dict[str, Any]:
    """Mean seconds until the first token and until the last, of both."""
    alone = replace(model, cache_tokens=0)
    requests = fleet_requests(trace, rate=rate, seconds=seconds, seed=1)
    fleet = FleetSimulation(Scenario(replicas=1, model=alone, routing=Routing(), seconds=seconds)).run(requests)
    first_s, total_s = scheduled(requests, alone)
    return {
        "requests": len(requests),
        "rate": rate,
        "first token s": {
            "fleet": round(statistics.fmean(fleet.first_s), 4),
            "scheduler": round(statistics.fmean(first_s), 4),
        },
        "whole answer s": {
            "fleet": round(statistics.fmean(fleet.total_s), 4),
            "scheduler": round(statistics.fmean(total_s), 4),
        },
    }


def scheduled(requests: Sequence[FleetRequest], model: ReplicaModel) -> tuple[list[float], list[float]]:
    """Seconds until the first and until the last token of each request, by the real scheduler."""
    costs = CostModel(
        StepTimes(tables={Role.STEP: model.costs, Role.PASS: CostTable(rows=(1,), seconds=(0.001,))})
    )
    machine = Machine(
        costs=costs,
        max_num_seqs=model.max_num_seqs,
        max_num_batched_tokens=model.max_num_batched_tokens,
        max_model_len=32_768,
        step_overhead_s=0.0,
    )
    longest = max(each.output_tokens for each in requests)
    simulation = Simulation(
        iid_trace(0.5, output_len=longest, num_requests=1), machine, lambda _costs, _clock: None
    )
    arrivals = (
        Arrival(at_s=each.at_s, prompt_len=each.prompt_tokens, output_len=each.output_tokens, trace=0)
        for each in requests
    )
    served = simulation.run(arrivals, clients=None, duration_s=None).served
    return [each.first_s - each.arrival_s for each in served], [
        each.finished_s - each.arrival_s for each in served
    ]
