"""Where the driver of a GPU refuses, the bench programs say so for each partition, and measure what came once."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu import report as lane_report
from benchmarks.gpu.decoding import overlap
from benchmarks.gpu.decoding.partitions import Divided, TimedPartition
from benchmarks.gpu.plan import ON_CPU, Plan, Sizes
from benchmarks.gpu.record import Desk, Folder
from faser.engine.execution.overlap.partition import Cores, core_numbers
from faser.errors import ConfigError

WORDS = "cuGreenCtxCreate: CUDA_ERROR_NOT_SUPPORTED, operation not supported"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(len(core_numbers()) < 2, reason="two lanes take two cores"),
]


class AsOnAGpu(Plan):
    """A dry run that asks for what a GPU has, and for what nobody has."""

    @property
    def sizes(self) -> Sizes:
        return replace(
            ON_CPU,
            partitions=("streams", "sm", "halves"),
            overlap_acceptances=(0.9,),
            overlap_batches=(1,),
        )


@pytest.mark.full
def test_an_engine_that_loses_at_once_is_traced_instead_of_measured_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: further rounds, numbers of requests or acceptances after a loss; no trace."""
    monkeypatch.setattr(overlap, "LEAST_AHEAD", 1000.0)
    desk = Desk(Folder(tmp_path, dry_run=True), "overlap", 60.0, lambda _: None)
    overlap.run(Plan(out=tmp_path, dry_run=True), desk)
    turns, (stopped,) = desk.result["turns"], desk.result["stopped"]
    assert {(turn["acceptance"], turn["sequences"], turn["round"]) for turn in turns} == {(0.9, 2, 0)}
    assert [turn["policy"] for turn in turns] == ["off", "serial", "ahead", "auto", "ahead:1"]
    assert json.loads(gzip.decompress((tmp_path / stopped["trace"]).read_bytes()))["traceEvents"]
    assert f"see {stopped['trace']}" in lane_report.overlap(desk.result)


class Streams(TimedPartition):
    """Cores by the name of what comes where a GPU cannot be divided."""

    is_closed = False

    @property
    def name(self) -> str:
        return "streams"

    def close(self) -> None:
        super().close()
        self.is_closed = True


class Refusing:
    """Divides nothing: streams come for sm. given: what there is to be closed."""

    def __init__(self) -> None:
        self.given: list[Streams] = []

    def __call__(self, _plan: Plan, name: str) -> Divided:
        if name == "halves":
            raise ConfigError("partition is halves; on a GPU it must be auto, sm, streams or serial")
        self.given.append(Streams(Cores(core_numbers())))
        return Divided(asked=name, partition=self.given[-1], refusal=WORDS if name == "sm" else None)


@pytest.mark.full
def test_drafting_ahead_by_a_partition_that_came_for_another_is_measured_once(tmp_path: Path) -> None:
    """Planted: an engine for the fallback too; a refusal that ends the phase; a partition left open."""
    driver = Refusing()
    desk = Desk(Folder(tmp_path, dry_run=True), "overlap", 100.0, lambda _: None)
    overlap.run(AsOnAGpu(out=tmp_path, dry_run=True), desk, driver)
    result = desk.finish().result
    assert {row["partition"] for row in result["rows"]} == {"streams"}
    (lane,) = result["lanes"]
    assert (lane["asked"], lane["came"], lane["refusal"]) == ("streams", "streams", None)
    assert {row["partition"]: WORDS in row["says"] for row in result["refused"]} == {"sm": True, "halves": False}
    assert all(each.is_closed for each in driver.given)
    (gaps,) = result["gaps"]
    assert gaps["pairs"] > 0
    assert gaps["draft_gap_ms"] > 0
    assert gaps["verify_gap_ms"] > 0
    text = lane_report.overlap(result)
    for each in (WORDS, "draft_gap_ms", "refusal"):
        assert each in text
