"""Machines and requests that simulations are run with where no trace of an engine is at hand.

cpu     two cores with the default model: a step takes 2.5 ms, .15 ms for each of its first eight rows and .25 ms
        for each further one (as in benchmarks/speculation/guarded.py)
zen5    the same model as it was measured on two cores of an AMD EPYC (Zen 5), whose rows are dearer
h200    an 8B on an NVIDIA H200: rows and drafts' passes of benchmarks/results/h200 (verify.json, draft.json),
        less the time that reading a context of 1024 tokens takes there; long passes are guessed
"""

from dataclasses import dataclass

import numpy as np

from benchmarks.simulator.simulation import Machine
from benchmarks.simulator.trace import Trace, iid_trace
from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.control.step_cost import CostModel

_CPU_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_TEXT = CostTable(rows=(1, 2), seconds=(1e-5, 1.1e-5))
_ZEN5_STEP = CostTable(
    rows=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    seconds=(0.00253, 0.00269, 0.00313, 0.00431, 0.00709, 0.0123, 0.0221, 0.0448, 0.0871),
    kv_token_s=5.3e-7,
    kv_row_token_s=1.1e-7,
)
_H200_STEP = CostTable(
    rows=(1, 8, 32, 64, 128, 256, 512, 1024, 2048, 8192),
    seconds=(0.00502, 0.0053, 0.0054, 0.0057, 0.0066, 0.0084, 0.0139, 0.026, 0.053, 0.213),
    kv_token_s=3.1e-8,
    kv_row_token_s=3e-9,
)
_H200_PASS = CostTable(rows=(1, 8, 32, 128, 256, 8192), seconds=(0.00153, 0.00153, 0.0021, 0.003, 0.004, 0.03))


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeMachine:
    """name: as in the module. length_scale: on the lengths of a trace of requests to a large machine.

    drafter, acceptance: of its drafts.
    """

    name: str
    machine: Machine
    length_scale: float
    drafter: str
    acceptance: float
    max_draft: int = 4

    def trace(self, *, seed: int = 0) -> Trace:
        """Make a trace of drafts; it says nothing of the lengths of requests."""
        return iid_trace(
            self.acceptance,
            max_tokens=self.max_draft,
            num_requests=64,
            prompt_len=8,
            output_len=64,
            method=self.drafter,
            spread=0.2,
            seed=seed,
        )


def _cpu_step_s(rows: int) -> float:
    return 0.0025 + 0.00015 * min(rows, 8) + 0.00025 * max(rows - 8, 0)


def cpu() -> MadeMachine:
    step = CostTable(rows=_CPU_ROWS, seconds=tuple(map(_cpu_step_s, _CPU_ROWS)), kv_token_s=5e-7)
    return _two_cores("cpu", step)


def zen5() -> MadeMachine:
    return _two_cores("zen5", _ZEN5_STEP)


def _two_cores(name: str, step: CostTable) -> MadeMachine:
    costs = CostModel(StepTimes(tables={Role.STEP: step, Role.TEXT: _TEXT}))
    machine = Machine(costs=costs, max_num_seqs=64, max_num_batched_tokens=256)
    return MadeMachine(name=name, machine=machine, length_scale=0.25, drafter="ngram", acceptance=0.6)


def h200() -> MadeMachine:
    costs = CostModel(StepTimes(tables={Role.STEP: _H200_STEP, Role.PASS: _H200_PASS}))
    machine = Machine(
        costs=costs,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        max_model_len=16384,
        step_overhead_s=0.0,
        draft_overhead_s=0.001,
    )
    return MadeMachine(name="h200", machine=machine, length_scale=1.0, drafter="draft_model", acceptance=0.8)


MACHINES = {"cpu": cpu, "zen5": zen5, "h200": h200}

Asked = tuple[float, int, int]  # seconds, prompt tokens, answer tokens


def conversation(count: int, *, seed: int = 0) -> tuple[Asked, ...]:
    """Made-up requests, one a second by a Poisson process, whose lengths spread as those of conversations do.

    Log-normal prompts and answers with medians of 600 and 150 tokens, at most 6,000 and 800.
    """
    random = np.random.default_rng(seed)
    times = np.cumsum(random.exponential(1.0, count))
    prompts = np.clip(random.lognormal(np.log(600), 1.0, count), 8, 6000).astype(int)
    answers = np.clip(random.lognormal(np.log(150), 0.8, count), 2, 800).astype(int)
    return tuple(zip(times.tolist(), prompts.tolist(), answers.tolist(), strict=True))


def paced(asked: tuple[Asked, ...], rate: float, *, scale: float = 1.0) -> tuple[Asked, ...]:
    """The same requests, from 0 on, at `rate` a second on average. scale: of their lengths."""
    first_s, last_s = asked[0][0], asked[-1][0]
    factor = (len(asked) - 1) / rate / (last_s - first_s)
    return tuple(
        ((at_s - first_s) * factor, max(round(prompt * scale), 1), max(round(answer * scale), 1))
        for at_s, prompt, answer in asked
    )
