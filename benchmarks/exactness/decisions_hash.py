"""Hashes every plan of 936 simulated scenarios, and times them: what a change decides otherwise, and its worth.

    python -m benchmarks exactness.decisions_hash OUT.json [--compare BEFORE.json] [--tokens 40]

26 kinds of speculation (drafters, policies, costs of a pass, drafts made during steps) under 36 conditions
(acceptance, requests at once, confidences that tell something or nothing, noise of the times). The real scheduler,
control and policies run on a simulated clock; hashed are the rows of every plan, the time of every step and what
speculation counted. Beside the hash stand the simulated seconds until the last answer. --tokens: of each answer;
in 40 the guard has hardly measured what drafts gain. It takes a minute, says by kind how much faster the scenarios
are than those of BEFORE.json, and ends with status 1 if a hash differs.
"""

import argparse
import hashlib
import json
import sys
from itertools import product
from pathlib import Path
from statistics import fmean

from rich.progress import track

from benchmarks.runner import about, write_json
from benchmarks.simulator.co_run import InterferenceTable
from benchmarks.simulator.simulation import Machine, Simulation
from benchmarks.simulator.trace import Trace, iid_trace
from benchmarks.simulator.workload import Arrival
from faser.config.speculation import SpeculationConfig
from faser.engine.build import native_acceptance
from faser.engine.contract.native_acceptance import MakeNativeAcceptance
from faser.engine.contract.plan import StepPlan, StepResult
from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.control.clock import SimulatedClock
from faser.engine.control.speculation.control import SpeculationControl
from faser.engine.control.speculation.overlap import OverlapOptions
from faser.engine.control.speculation.policy import Policy
from faser.engine.control.step_cost import CostModel
from faser.engine.execution.drafting.registry import load_index

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256)
MILLISECONDS = (12.4, 14.1, 14.6, 17.6, 19.3, 24.9, 29.3, 41.2, 53.5, 103.8, 208.0)  # two cores, 135M parameters
CHEAP, DEAR = 0.05, 0.4  # a pass of the drafter, in steps with as many rows
LANES = InterferenceTable.constant(share=0.5, verify=1.1, draft=1.2, verify_alone=1.05, draft_alone=1.1)
PROMPT, OUTPUT = 40, 40
SERIAL = "serial"

# Method, policy, its gamma, cost of a pass, and whether drafts are made during steps.
Kind = tuple[str, str, int | None, float | None, str]
ALONE = (("fixed", 3), ("fixed", 8), ("goodput", None), ("survival", None), ("faser", None))
KINDS: tuple[Kind, ...] = (
    *(("draft_model", *policy, cost, SERIAL) for policy, cost in product(ALONE, (CHEAP, DEAR))),
    *(("draft_model", "fixed", 3, cost, "on") for cost in (CHEAP, DEAR)),
    *(("draft_model", "faser", None, cost, "auto") for cost in (CHEAP, DEAR)),
    *(("suffix", *policy, None, SERIAL) for policy in (*ALONE, ("off", None))),
    ("suffix", "faser", None, None, "on"),
    *(("auto", policy, None, cost, SERIAL) for policy, cost in product(("faser", "goodput"), (CHEAP, DEAR))),
    ("auto", "faser", None, CHEAP, "on"),
)
Condition = tuple[float, int, float, float]  # acceptance, requests at once, spread of the confidences, noise
CONDITIONS: tuple[Condition, ...] = tuple(product((0.5, 0.7, 0.9), (1, 8, 32), (0.0, 0.5), (0.0, 0.1)))


def costs(pass_cost: float | None, *, looks_up: bool) -> CostModel:
    seconds = [each / 1000 for each in MILLISECONDS]
    tables = {Role.STEP: CostTable(rows=ROWS, seconds=tuple(seconds))}
    if looks_up:
        tables[Role.TEXT] = CostTable(rows=(1, 2), seconds=(3e-5, 6e-5))
    if pass_cost is not None:
        tables[Role.PASS] = CostTable(rows=ROWS, seconds=tuple(pass_cost * each for each in seconds))
    return CostModel(StepTimes(tables=tables))


def scenario_hash(
    kind: Kind,
    condition: Condition,
    chosen: Policy | None = None,
    make_native: MakeNativeAcceptance | None = None,
    num_tokens: int = OUTPUT,
) -> tuple[str, float]:
    """Run one scenario, from an empty engine to the last answer. Returns its hash and the simulated seconds.

    chosen: instead of the kind's policy. num_tokens: of each answer.
    """
    method, policy, gamma, pass_cost, overlap = kind
    acceptance, load, spread, noise = condition
    count = max(load + 2, 4)

    def trace(of_method: str, chance: float, cap: int, seed: int) -> Trace:
        return iid_trace(
            chance,
            max_tokens=cap,
            num_requests=count,
            prompt_len=PROMPT,
            output_len=num_tokens,
            method=of_method,
            spread=spread,
            seed=seed,
        )

    cap = gamma or (8 if method == "draft_model" else 16)
    options = None
    if overlap != SERIAL:
        options = OverlapOptions(name="lanes", share=LANES.share, mode=overlap, every=8)
    config = SpeculationConfig(
        method=method, policy=policy, num_speculative_tokens=gamma, model=None if method == "suffix" else "a model"
    )
    machine = Machine(
        costs=costs(pass_cost, looks_up=method != "draft_model"),
        lanes=() if options is None else (LANES,),
        max_num_seqs=16,
        max_model_len=1024,
        kv_tokens=15 * (PROMPT + num_tokens) if load == 32 else None,  # too few for all of them
        draft_overhead_s=0.0,
        noise=noise,
    )

    def make_control(own: CostModel, clock: SimulatedClock) -> SpeculationControl:
        return SpeculationControl(
            config,
            own,
            num_slots=64,
            clock=clock,
            policy=chosen,
            overlap=options,
            times_itself=False,
            make_native=make_native or native_acceptance(load_index),
        )

    simulation = Simulation(
        trace(method if method == "draft_model" else "suffix", acceptance, cap, 1),
        machine,
        make_control,
        model_trace=trace("draft_model", min(acceptance + 0.1, 0.95), 8, 2) if method == "auto" else None,
        seed=3,
    )
    found, run = hashlib.sha256(), simulation.executor.run

    def hashed(plan: StepPlan) -> StepResult:
        result = run(plan)
        rows = plan.rows
        said = (plan.step, plan.released, [each.slot for each in plan.started], rows.slots, rows.starts)
        found.update(repr((*said, rows.counts, rows.num_drafts, rows.samples, rows.token_ids)).encode())
        found.update(repr(result.run_s).encode())
        return result

    simulation.executor.run = hashed  # type: ignore[method-assign]
    arrivals = (Arrival(at_s=None, prompt_len=PROMPT, output_len=num_tokens, trace=i) for i in range(count))
    outcome = simulation.run(arrivals, clients=load, duration_s=None)
    stats = outcome.speculation
    assert stats is not None
    counts = [
        (each.drafted, each.pruned, each.verified, each.accepted, round(each.expected, 6))
        for each in stats.methods
    ]
    found.update(repr((outcome.elapsed_s, outcome.num_preemptions, counts)).encode())
    found.update(repr((stats.mode_steps, stats.bypasses, stats.switches)).encode())
    return found.hexdigest()[:20], round(outcome.elapsed_s, 4)


def compare(before: dict[str, tuple[str, float]], after: dict[str, tuple[str, float]]) -> int:
    """Print how much faster each kind of scenario has become. Returns how many hashes differ."""
    other = [name for name, (found, _) in after.items() if before[name][0] != found]
    print(f"{len(other)} hashes differ. Seconds before over seconds now, by kind: lowest, mean, highest")
    for kind in KINDS:
        ratios = [before[name][1] / after[name][1] for name in (f"{kind} {each}" for each in CONDITIONS)]
        print(f"  {min(ratios):.3f}  {fmean(ratios):.3f}  {max(ratios):.3f}  {kind}")
    return len(other)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--compare", type=Path, default=None, help="the result of another checkout")
    parser.add_argument("--tokens", type=int, default=OUTPUT, help=f"tokens of each answer (default {OUTPUT})")
    options = parser.parse_args()
    scenarios = [*product(KINDS, CONDITIONS)]
    found = {
        f"{kind} {condition}": scenario_hash(kind, condition, num_tokens=options.tokens)
        for kind, condition in track(scenarios, "simulating", disable=not sys.stderr.isatty())
    }
    total = hashlib.sha256(json.dumps([each for each, _ in found.values()]).encode()).hexdigest()[:16]
    write_json(options.out, {**about("exactness.decisions_hash"), "hash": total, "scenarios": found})
    print(len(found), "scenarios,", total)
    if options.compare is not None:
        sys.exit(bool(compare(json.loads(options.compare.read_text())["scenarios"], found)))
