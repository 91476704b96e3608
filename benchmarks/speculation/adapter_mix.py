"""Costs of not knowing the adapter: requests of a good and of a bad adapter take turns, in simulations.

    python -m benchmarks speculation.adapter_mix OUT.json [--seeds 3]

A drafter without adapters is as sure of its tokens with any of them, but is wrong more often where an adapter has
changed the answers. Both adapters' drafts have the same confidences here; GOOD and BAD of their tokens are right.
Four arms serve the same requests with the policy faser, on a simulated clock:

    off          nothing is drafted
    faser        every sequence begins with what holds for all, and learns its own offset
    remembers    every sequence begins with what earlier sequences of its adapter have shown
    told         the bad adapter's requests ask for no drafts

Given are tokens a second by arm, in units of `faser`, as means over seeds.
"""

import argparse
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean

import numpy as np

from benchmarks.exactness.decisions_hash import costs
from benchmarks.runner import about, write_json
from benchmarks.simulator.simulation import Machine, Simulation
from benchmarks.simulator.trace import RequestTrace, Trace
from benchmarks.simulator.workload import Arrival
from faser.config.speculation import SpeculationConfig
from faser.engine.build import native_acceptance
from faser.engine.control.clock import SimulatedClock
from faser.engine.control.sequence import Sequence
from faser.engine.control.speculation.acceptance import Acceptance
from faser.engine.control.speculation.control import SpeculationControl
from faser.engine.control.step_cost import CostModel
from faser.engine.execution.drafting.registry import load_index
from faser.types.arrays import Floats
from faser.types.request import SpeculationParams

GOOD, BAD = 0.85, 0.2
ARMS = ("off", "faser", "remembers", "told")
DRAFTERS = (("draft_model", 0.05), ("draft_model", 0.15), ("suffix", None))
CLIENTS, OUTPUTS, SPREADS = (4, 8), (48,), (0.0, 0.3)
PROMPT, MOST, SLOTS = 40, 8, 64
ROUNDS = 25  # requests of each client


class Remembering(SpeculationControl):
    """Gives a new sequence the offsets and means of the sequences of its adapter that have ended."""

    own: Acceptance
    remembered: dict[int, tuple[Floats, ...]]  # by adapter

    def start(self, sequence: Sequence) -> None:
        super().start(sequence)
        known = self.remembered.get(adapter_of(sequence))
        if known is not None:
            slot, arrays = sequence.held_slot, self.own
            arrays._offset[:, slot], arrays._precision[:, slot], arrays._own[:, slot] = (
                each.copy() for each in known
            )

    def release(self, sequence: Sequence) -> None:
        slot, arrays, key = sequence.held_slot, self.own, adapter_of(sequence)
        arrays.learn_held()
        found = arrays._offset[:, slot], arrays._precision[:, slot], arrays._own[:, slot]
        before = self.remembered.get(key)
        mixed = found if before is None else tuple(0.7 * a + 0.3 * b for a, b in zip(before, found, strict=True))
        self.remembered[key] = tuple(np.array(each) for each in mixed)
        super().release(sequence)


def adapter_of(sequence: Sequence) -> int:
    """0: the good one's, 1: the bad one's."""
    return sequence.request.prompt_token_ids[0] % 2


def trace(method: str, count: int, output: int, spread: float, seed: int) -> Trace:
    """Requests of both adapters in turn; confidences are those of the good one."""
    random = np.random.default_rng(seed)
    shift = np.log(GOOD / (1 - GOOD)) - np.log(BAD / (1 - BAD))
    requests = []
    for number in range(count):
        chances = np.full((output, MOST), GOOD)
        if spread:
            chances = random.beta(GOOD / spread, (1 - GOOD) / spread, chances.shape)
        sure = np.clip(chances, 1e-4, 1 - 1e-4)
        confidences = np.log(sure / (1 - sure))
        true = 1 / (1 + np.exp(-(confidences - (shift if number % 2 else 0.0))))
        runs = (random.random(true.shape) < true).cumprod(axis=-1).sum(axis=-1)
        requests.append(
            RequestTrace(
                prompt_len=PROMPT,
                runs=tuple(runs.tolist()),
                lengths=(MOST,) * output,
                confidences=tuple(map(tuple, confidences.round(4).tolist())),
                methods=(0,) * output,
            )
        )
    return Trace(
        model="synthetic",
        drafter=method,
        max_tokens=MOST,
        temperature=0.0,
        methods=(method,),
        requests=tuple(requests),
    )


def seconds(
    arm: str, drafter: tuple[str, float | None], clients: int, output: int, spread: float, seed: int
) -> float:
    """Return the simulated seconds until the last answer."""
    method, pass_cost = drafter
    count = ROUNDS * clients
    config = SpeculationConfig(method=method, policy="faser", model=None if method == "suffix" else "a model")
    if arm == "off":
        config = replace(config, policy="off")
    kind = Remembering if arm == "remembers" else SpeculationControl

    def make_control(own: CostModel, clock: SimulatedClock) -> SpeculationControl:
        cap = config.num_speculative_tokens or (8 if method == "draft_model" else 16)
        acceptance = Acceptance(SLOTS, max(cap, MOST), native_acceptance(load_index))
        found = kind(
            config,
            own,
            num_slots=SLOTS,
            clock=clock,
            acceptance=acceptance,
            times_itself=False,
            make_native=native_acceptance(load_index),
        )
        if isinstance(found, Remembering):
            found.own, found.remembered = acceptance, {}
        return found

    asked = SpeculationParams()
    simulation = Simulation(
        trace(method, count, output, spread, seed),
        Machine(costs=costs(pass_cost, looks_up=method == "suffix"), max_num_seqs=SLOTS, noise=0.05),
        make_control,
        classes=(asked, replace(asked, enabled=False)) if arm == "told" else (),
        seed=seed,
    )
    arrivals = (Arrival(at_s=None, prompt_len=PROMPT, output_len=output, trace=i) for i in range(count))
    return simulation.run(arrivals, clients=clients, duration_s=None).elapsed_s


def rows(seeds: Iterable[int]) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for drafter, clients, output, spread in product(DRAFTERS, CLIENTS, OUTPUTS, SPREADS):
        by_arm = {arm: fmean(seconds(arm, drafter, clients, output, spread, s) for s in seeds) for arm in ARMS}
        row: dict[str, object] = {
            "drafter": f"{drafter[0]} {drafter[1] or ''}".strip(),
            "clients": clients,
            "output": output,
            "spread": spread,
            "tokens_per_s": {arm: round(by_arm["faser"] / by_arm[arm], 4) for arm in ARMS},
        }
        print(*row.values(), flush=True)
        found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    found = rows(range(1, options.seeds + 1))
    write_json(options.out, {**about("speculation.adapter_mix"), "rows": found})
