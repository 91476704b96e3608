"""What an engine is told to cost, of an earlier run's results: worked out by hand from times that were made up."""

from pathlib import Path

import pytest

from benchmarks.gpu.lanes.earlier_costs import earlier_costs
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.record import Folder, Json, Record
from faser.engine.contract.step_times import Role
from faser.engine.execution.overlap.cores import Cores
from faser.engine.execution.overlap.partition import Partition

CONTEXT = 64  # of dry runs
TARGET_KV, DRAFT_KV = 2 * 2 * 2 * 16 * 2, 2 * 1 * 2 * 16 * 2  # bytes of a token: two layers, and one
BYTES_S = 1e9


class Named(Cores):
    """Two shares under a name. Nothing is divided."""

    def __init__(self, name: str) -> None:
        self.name = name

    def shares(self) -> tuple[float, ...]:
        return (0.25, 0.5)


def company(partition: str, share: float, **more: object) -> Json:
    return {"partition": partition, "share": share, "draft": "traffic", "verify": "product", **more}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """A step of S sequences with r rows takes S * r ms and its cache's time; a pass of S rows half of that."""
    found = Folder(tmp_path, dry_run=True)

    def save(phase: str, result: Json) -> None:
        found.save(Record(phase=phase, dry_run=True, complete=True, result=result))

    save("environment", {"copy_bytes_s": BYTES_S})
    shapes = [(1, 1), (1, 4), (4, 1), (4, 4)]
    times = {shape: shape[0] * shape[1] + 1e3 * shape[0] * CONTEXT * TARGET_KV / BYTES_S for shape in shapes}
    cells = [{"sequences": s, "rows_each": r, "step_ms": {"median": ms}} for (s, r), ms in times.items()]
    save("verify", {"cells": cells})
    passes = {s: s / 2 + 1e3 * s * CONTEXT * DRAFT_KV / BYTES_S for s in (1, 4)}
    save("draft", {"draft bare": [{"sequences": s, "bare_ms": {"median": ms}} for s, ms in passes.items()]})
    others = {"draft": "product", "verify_slowdown": 9.0, "draft_slowdown": 9.0}
    rows = [company(name, share) for name in ("streams", "sm") for share in (0.25, 0.5)]
    slow = [row | {"verify_slowdown": 1.1 + row["share"], "draft_slowdown": 1.5} for row in rows]
    save("lanes", {"company": [*(row | others for row in rows), *slow]})
    return found


def costs(folder: Folder, name: str) -> object:
    partition: Partition = Named(name)
    return earlier_costs(Plan(out=folder.path, dry_run=True), folder, partition)


@pytest.mark.parametrize("name", ["streams", "sm"])
def test_times_are_those_of_the_phases_less_what_the_cache_takes(folder: Folder, name: str) -> None:
    """Planted: the cache counted twice; rows of a sequence for rows of a step; the loads the wrong way round."""
    found = earlier_costs(Plan(out=folder.path, dry_run=True), folder, Named(name))
    assert found is not None
    step, drafting = found.tables[Role.STEP], found.tables[Role.PASS]
    assert step.rows == (1, 4, 16)
    assert step.seconds == pytest.approx((1e-3, 4e-3, 16e-3))
    assert step.kv_token_s == pytest.approx(TARGET_KV / BYTES_S)
    assert drafting.seconds == pytest.approx((0.5e-3, 2e-3))
    assert [each.share for each in found.interference] == [0.25, 0.5]
    assert [each.verify for each in found.interference] == [((1.35,),), ((1.6,),)]
    alone = 1.5 if name == "sm" else 1.0
    assert [each.draft_alone for each in found.interference] == [((alone,),)] * 2


@pytest.mark.parametrize("missing", ["verify", "draft", "lanes"])
def test_without_one_of_the_phases_the_engine_measures(folder: Folder, missing: str) -> None:
    folder.discard(missing)
    assert costs(folder, "sm") is None


def test_a_share_on_which_the_kernels_could_not_run_has_no_times(folder: Folder) -> None:
    """Planted: one share's times for all of them."""
    rows = [company("sm", 0.25, verify_slowdown=1.1, draft_slowdown=1.2), company("sm", 0.5, says="refused")]
    folder.save(Record(phase="lanes", dry_run=True, complete=True, result={"company": rows}))
    assert costs(folder, "sm") is None
