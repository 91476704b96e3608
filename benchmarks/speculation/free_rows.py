"""Predicts what drafts gain where 16 rows cost little more than one, on the simulator's clock.

    python -m benchmarks.speculation.free_rows OUT.json TRACE.jsonl... [--requests 1,4,16] [--most 64,200]

TRACE: of `python -m benchmarks.simulator --record`. The default policy against off, in the real scheduler, with
the acceptance that was recorded and the times of MACHINES. Nothing of a machine with AMX was measured for this but
the products' times, so what it says of AMX is a prediction.

Times are of SmolLM2-135M in bfloat16 on two cores. Products: microseconds of one of 8960 x 1536 with its weights
from memory, on one core of an Emerald Rapids (2.6 GHz), scaled to the bytes of the model and divided between two
cores; beyond 32 rows a tile of 16 takes what it does with weights in cache. The rest of a step (norms, rotations,
gates, embedding, Python) is that of low-bit-steps.json, an EPYC's, and so is attention: what it takes for each
cached token of a sequence, and a quarter of that for each further row of the same sequence.
"""

from dataclasses import asdict, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from benchmarks.runner import about, command_line, numbers, write_json
from benchmarks.simulator.contest import Contest, Figures
from benchmarks.simulator.simulation import Machine
from benchmarks.simulator.trace import Trace, read_trace
from benchmarks.simulator.workload import Workload
from benchmarks.spec_bench.policy_spec import parse_policy
from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.control.step_cost import CostModel

MODEL_BYTES, PRODUCT_BYTES, CORES = 269.0e6, 2 * 8960 * 1536, 2
PRODUCT_US = {
    "AMX": {1: 1862, 2: 1848, 4: 1847, 6: 1842, 8: 1851, 12: 1889, 16: 1910, 17: 2500, 32: 2517},
    "AVX-512": {1: 1940, 2: 2053, 4: 2150, 6: 2262, 7: 3000, 8: 3309, 12: 4068, 13: 4760, 16: 5412, 32: 10849},
}
TILES = {"AMX": (16, 560.0), "AVX-512": (6, 2034.0)}  # rows, microseconds of each beyond 32 rows
REST_MS = {1: 1.42, 2: 1.56, 4: 1.81, 8: 2.48, 12: 2.80, 16: 3.10, 32: 3.18, 64: 4.57, 256: 16.0}
KV_TOKEN_S, ROW_SHARE = 1.7e-6, 0.25
TEXT = CostTable(rows=(1, 2), seconds=(3e-5, 6e-5))
MOST_ROWS, SHOWN_ROWS = 256, (1, 2, 4, 8, 16, 17, 32)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--requests", type=numbers, default=[1, 4, 16], help="at a time [1,4,16]")
    parser.add_argument("--answers", type=int, default=188, help="of each run [188]")
    parser.add_argument("--most", type=numbers, default=[64, 200], help="tokens of an answer that count [64,200]")
    options = parser.parse_args()
    cells: list[dict[str, Any]] = []
    for path, most, machine, requests in product(options.traces, options.most, PRODUCT_US, options.requests):
        trace = shortened(read_trace(path), most)
        cells.append({"most_tokens": most, **cell(trace, machine, requests, options.answers)})
        print({name: value for name, value in cells[-1].items() if name not in ("off", "faser")}, flush=True)
    tables = {name: {rows: round(1e3 * step_s(name, rows), 2) for rows in SHOWN_ROWS} for name in PRODUCT_US}
    write_json(options.out, {**about("benchmarks.speculation.free_rows"), "step_ms": tables, "cells": cells})


def shortened(trace: Trace, most: int) -> Trace:
    """Only the first tokens of each answer."""
    lists = ("runs", "lengths", "confidences", "methods", "output_token_ids")
    requests = [replace(each, **{name: getattr(each, name)[:most] for name in lists}) for each in trace.requests]
    return replace(trace, requests=tuple(requests))


def cell(trace: Trace, machine: str, requests: int, answers: int) -> dict[str, Any]:
    """The default policy and off; decoding: by the mean time per token after the first one."""
    contest = Contest(
        trace=trace,
        machine=Machine(costs=costs(machine), max_num_seqs=requests, max_num_batched_tokens=MOST_ROWS),
        workload=Workload(clients=requests, in_order=True),
        duration_s=None,
        limit=answers,
    )
    off, faser = (contest.run(parse_policy(name, cap=trace.max_tokens)) for name in ("off", "faser"))
    return {
        "model": Path(trace.model).name,
        "temperature": trace.temperature,
        "machine": machine,
        "requests": requests,
        "tokens_per_s": round(faser.tokens_per_s / off.tokens_per_s, 3),
        "decoding": round(off.tpot.mean_ms / faser.tpot.mean_ms, 3),
        "tokens_per_step": round(faser.tokens_per_turn, 3),
        "draft_rows": round(faser.gamma, 2),
        "off": _kept(off),
        "faser": _kept(faser),
    }


def _kept(figures: Figures) -> dict[str, Any]:
    names = ("tokens_per_s", "mean_step_ms", "num_steps", "verified", "accepted", "tpot")
    return {name: value for name, value in asdict(figures).items() if name in names}


def costs(machine: str) -> CostModel:
    return CostModel(StepTimes(tables={Role.STEP: table(machine), Role.TEXT: TEXT}))


def table(machine: str, *, size: float = 1.0) -> CostTable:
    """Seconds of a step by its rows; what was measured of products is told apart by tiles. size: of the model."""
    height, tile_us = TILES[machine]
    edges = tuple(range(height, MOST_ROWS, height))
    product_us = CostTable.measured(PRODUCT_US[machine], edges=edges).dense(32)
    rest_ms = CostTable.measured(REST_MS).dense(MOST_ROWS)
    seconds = {}
    for rows in range(1, MOST_ROWS + 1):
        tiles = -(-rows // height) - -(-32 // height)
        us = product_us[rows] if rows <= 32 else product_us[32] + tile_us * tiles
        seconds[rows] = size * us * 1e-6 * MODEL_BYTES / PRODUCT_BYTES / CORES + size**0.5 * rest_ms[rows] * 1e-3
    assert all(before <= after for before, after in pairwise(seconds.values())), machine
    return CostTable.measured(seconds, kv_token_s=KV_TOKEN_S, kv_row_token_s=ROW_SHARE * KV_TOKEN_S)


def step_s(machine: str, rows: int, *, size: float = 1.0, context: int = 200) -> float:
    """Return the seconds of a step of one sequence of `context` tokens, drafts included."""
    return table(machine, size=size).seconds_at(rows, context, (rows - 1) * context)


if __name__ == "__main__":
    main()
