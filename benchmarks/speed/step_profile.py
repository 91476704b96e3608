"""Time of a decode step by part, on the embedded model in process; and how far it is from its floor.

    python -m benchmarks speed.step_profile OUT.json [--steps 150] [--rows 1,4,16]

Stages are timed from outside by wrapping the methods of one engine. The floor of a step is the time that reading
all weights once takes at the read bandwidth measured in the same run. `host` is what is neither the forward pass,
nor logits, nor the choice of tokens: planning, laying out rows, committing. It is the most that asynchronous
scheduling could hide.
"""

import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.engines import model_directory, quiet
from benchmarks.runner import about, command_line, numbers, write_json
from faser.config.engine import EngineConfig
from faser.engine.build import build_engine
from faser.engine.engine import Engine
from faser.types import Request, SamplingParams

PROMPT_TOKENS = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=None, ignore_eos=True)

Times = dict[str, list[float]]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rows", type=numbers, default="1,4,16")
    options = parser.parse_args()
    directory = model_directory(None)
    engine, info = build_engine(EngineConfig(), directory, quiet)
    times: Times = defaultdict(list)
    _watch(engine, times)
    read_gb_s = _read_gb_s()
    floor_ms = info.weight_bytes / read_gb_s / 1e6
    steps = [
        _profile(engine, times, rows, sampling, options.steps, floor_ms)
        for rows in options.rows
        for sampling in (GREEDY, SAMPLED)
    ]
    result = {
        **about("speed.step_profile"),
        "backend": info.backend,
        "dtype": info.dtype,
        "weight_bytes": info.weight_bytes,
        "read_gb_s": round(read_gb_s, 1),
        "floor_ms": round(floor_ms, 2),
        "steps": steps,
    }
    write_json(options.out, result, show=True)


def _watch(engine: Engine, times: Times) -> None:
    executor: Any = engine._executor
    for owner, name, stage in (
        (engine._scheduler, "plan", "plan"),
        (engine._scheduler, "commit", "commit"),
        (executor._table, "gather", "layout"),
        (executor._runner, "forward", "forward"),
        (executor._runner, "logits", "logits"),
        (executor._sampler, "sample", "sample"),
    ):
        setattr(owner, name, _timed(getattr(owner, name), times[stage]))


def _timed(method: Any, into: list[float]) -> Any:
    def call(*arguments: Any) -> Any:
        began_s = time.perf_counter()
        value = method(*arguments)
        into.append(time.perf_counter() - began_s)
        return value

    return call


def _profile(
    engine: Engine, times: Times, rows: int, sampling: SamplingParams, num_steps: int, floor_ms: float
) -> dict[str, Any]:
    names = [f"{rows}-{sampling.temperature}-{number}" for number in range(rows)]
    for number, name in enumerate(names):
        prompt = tuple(range(1000 + number, 1000 + number + PROMPT_TOKENS))
        engine.add(Request(request_id=name, prompt_token_ids=prompt, sampling=sampling))
    for _ in range(rows * PROMPT_TOKENS // 200 + 10):
        engine.step()
    for stage in times.values():
        stage.clear()
    whole = [_step_s(engine) for _ in range(num_steps)]
    for name in names:
        engine.abort(name)
    stages_ms = {stage: round(1e3 * statistics.median(each), 3) for stage, each in times.items()}
    step_ms = 1e3 * statistics.median(whole)
    device_ms = stages_ms["forward"] + stages_ms["logits"] + stages_ms["sample"]
    return {
        "rows": rows,
        "sampling": "greedy" if sampling.greedy else "temperature 0.8, top_p 0.95",
        "step_ms": round(step_ms, 2),
        "times_floor": round(step_ms / floor_ms, 2),
        "stages_ms": stages_ms,
        "host_share": round(1 - device_ms / step_ms, 4),
    }


def _step_s(engine: Engine) -> float:
    began_s = time.perf_counter()
    engine.step()
    return time.perf_counter() - began_s


def _read_gb_s(repeats: int = 9) -> float:
    """Median over reads of a gigabyte by all threads of torch."""
    memory = torch.ones(1 << 28)
    seconds = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        memory.sum()
        seconds.append(time.perf_counter() - began_s)
    return memory.nbytes / statistics.median(seconds) / 1e9
