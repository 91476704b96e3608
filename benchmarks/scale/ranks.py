"""Cost of dividing a model among processes of one machine: a step's time, and the memory of each, by ranks.

    python -m benchmarks scale.ranks OUT.json [--model MODEL] [--ranks 1,2] [--rows 1,4,16] [--rounds 3]

Engines with 1, 2 … ranks take turns; the cores are divided among the ranks. A step of R rows has one row of each
of R sequences, with 64 tokens of context. Memory: what the kernel counts as the process's own (unique set size),
after the steps.
"""

import statistics
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import psutil
from rich.progress import track

from benchmarks.engines import model_directory
from benchmarks.runner import about, command_line, numbers, write_json
from faser.config.engine import EngineConfig
from faser.engine.build import build
from faser.types import Request, SamplingParams

_CONTEXT, _STEPS, _WARM = 64, 40, 8


def measure(given: Namespace, ranks: int) -> dict[str, Any]:
    """Measure one engine: seconds of a step by rows, and bytes of each rank."""
    most = max(given.rows)
    config = EngineConfig(
        model=given.model,
        device="cpu",
        tensor_parallel_size=ranks,
        max_num_seqs=most,
        max_model_len=512,
        kv_cache_memory=1 << 28,
        speculative_config={"policy": "off"},
    )
    built = build(config, model_directory(given.model), lambda *_: None)
    engine, found = built.engine, {}
    try:
        for rows in given.rows:
            for number in range(rows):
                tokens = tuple(range(100 + number, 100 + number + _CONTEXT))
                sampling = SamplingParams(temperature=0.0, max_tokens=_STEPS, ignore_eos=True)
                engine.add(
                    Request(request_id=str(number), prompt_token_ids=tokens, sampling=sampling, arrival_s=0.0)
                )
            times = []
            while engine.has_work():
                began_s = time.perf_counter()
                engine.step()
                times.append(time.perf_counter() - began_s)
            found[rows] = statistics.median(times[_WARM:])
        processes = [psutil.Process(), *psutil.Process().children()]
        memory = [each.memory_full_info().uss for each in processes]
    finally:
        engine.close()
    return {"step_s": found, "uss_bytes": memory, "weight_bytes": built.info.weight_bytes}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--ranks", type=numbers, default=(1, 2))
    parser.add_argument("--rows", type=numbers, default=(1, 4, 16))
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    runs: dict[int, list[dict[str, Any]]] = {ranks: [] for ranks in given.ranks}
    for round_number in track(range(given.rounds), "rounds"):
        for ranks in given.ranks if round_number % 2 == 0 else given.ranks[::-1]:
            runs[ranks].append(measure(given, ranks))
    medians = {
        ranks: {
            "step_ms": {
                rows: round(1e3 * statistics.median(each["step_s"][rows] for each in found), 3)
                for rows in given.rows
            },
            "weights of rank 0, MB": round(found[-1]["weight_bytes"] / 1e6, 1),
            "own memory of each rank, MB": [round(each / 1e6) for each in found[-1]["uss_bytes"]],
        }
        for ranks, found in runs.items()
    }
    write_json(given.out, {**about("scale.ranks"), "model": given.model, "medians": medians})
