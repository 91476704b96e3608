"""What steps, passes and lanes cost, of the results of an earlier run: an engine need not measure it again.

steps     phase verify: the runner alone, by sequences and rows of each
passes    phase draft: the same of the draft model, one row a sequence
lanes     phase lanes: a product, as verification is, beside traffic, as drafting is
"""

import statistics
from collections.abc import Iterable
from pathlib import Path

from benchmarks.gpu.decoding import environment
from benchmarks.gpu.engines import draft_of, target_of
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.record import Folder, Json
from faser.engine.checkpoints.config_json import read_model_config
from faser.engine.contract.interference import InterferenceTable
from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.execution.overlap.partition import Partition

_VALUE_BYTES = 2
_LEAST_S = 1e-6  # of a step without its attention
_TEXT_S = 30e-6  # a text look-up; no arm has one


def earlier_costs(plan: Plan, folder: Folder, partition: Partition) -> StepTimes | None:
    """None where a phase is missing that it takes, or a share of the partition has no times."""
    cells = _rows(folder, "verify", "cells")
    passes = _rows(folder, "draft", "draft bare")
    lanes = [_lane(folder, partition, share) for share in partition.shares()]
    known = [each for each in lanes if each is not None]
    if not cells or not passes or not known or len(known) < len(lanes):
        return None
    steps = ((each["sequences"], each["sequences"] * each["rows_each"], each["step_ms"]) for each in cells)
    drafts = ((each["sequences"], each["sequences"], each["bare_ms"]) for each in passes)
    return StepTimes(
        tables={
            Role.STEP: _table(plan, folder, target_of(plan), steps),
            Role.PASS: _table(plan, folder, draft_of(plan), drafts),
            Role.TEXT: CostTable(rows=(1, 2), seconds=(_TEXT_S, 2 * _TEXT_S)),
        },
        interference=tuple(known),
    )


def _table(plan: Plan, folder: Folder, model: Path, times: Iterable[tuple[int, int, Json]]) -> CostTable:
    """times: sequences, rows, milliseconds. The cache is read at the rate of a copy, whatever else a step does."""
    spec = read_model_config(model).spec
    kv_token_s = 2 * spec.num_layers * spec.kv_size * _VALUE_BYTES / environment.bytes_s(folder)
    seconds: dict[int, list[float]] = {}
    for sequences, rows, spread_ms in times:
        net_s = 1e-3 * spread_ms["median"] - kv_token_s * sequences * plan.sizes.context
        seconds.setdefault(rows, []).append(max(net_s, _LEAST_S))
    return CostTable.measured(
        {rows: statistics.median(found) for rows, found in seconds.items()}, kv_token_s=kv_token_s
    )


def _lane(folder: Folder, partition: Partition, share: float) -> InterferenceTable | None:
    """A lane with processors of its own is as slow while the other one is idle; a stream is as fast as alone."""
    for row in _rows(folder, "lanes", "company"):
        loads = (row["draft"], row["verify"])
        if (row["partition"], row["share"], loads) == (partition.name, round(share, 4), ("traffic", "product")):
            verify, draft = row.get("verify_slowdown"), row.get("draft_slowdown")
            if verify is None or draft is None:
                return None
            apart = partition.name != "streams"
            return InterferenceTable.constant(
                share=share,
                verify=verify,
                draft=draft,
                verify_alone=verify if apart else 1.0,
                draft_alone=draft if apart else 1.0,
            )
    return None


def _rows(folder: Folder, phase: str, name: str) -> list[Json]:
    found = folder.load(phase)
    return [] if found is None else found.result.get(name, [])
