"""Phases lanes, overlap and arrivals of the bench programs for a GPU: their parts, and that they run on a CPU."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu import report as lane_report
from benchmarks.gpu.decoding import real_text as arrivals
from benchmarks.gpu.decoding.real_text import wanted_of
from benchmarks.gpu.engines import Wanted, close, lane_costs, open_engine
from benchmarks.gpu.lanes import overlap
from benchmarks.gpu.lanes.lanes import company, granted, pairs, run, splits
from benchmarks.gpu.lanes.overlap import ARMS, expected, pictures, promises, rows_of
from benchmarks.gpu.lanes.places import GreenPlaces
from benchmarks.gpu.models import Walk, Walking, write_shape
from benchmarks.gpu.phases import phases_named, run_here
from benchmarks.gpu.plan import ON_CPU, Plan, Sizes
from benchmarks.gpu.record import Desk, Folder
from benchmarks.gpu.steps import HostClock, answers
from faser.engine.contract.interference import InterferenceTable
from faser.engine.contract.step_times import StepTimes
from faser.engine.control.timing.cost_model import CostModel
from faser.engine.execution.overlap.cores import core_numbers
from faser.engine.execution.overlap.partition import Serial
from faser.kernels.cuda.events import DeviceEvent
from faser.kernels.cuda.green_contexts import GreenContextError, Group
from faser.types import SamplingParams


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


SAID = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)


def test_a_walk_is_one_cycle_for_each_acceptance_and_guesses_are_right_as_often_as_wanted() -> None:
    """Planted: wrong guesses that are right by chance; a cycle that leaves its tokens."""
    walk = Walk.drawn(1000, (0.9, 0.6))
    for place, acceptance in enumerate((0.9, 0.6)):
        token, seen = place, set()
        while token not in seen:
            seen.add(token)
            token = int(walk.successor[token])
        assert seen == set(range(place, 1000, 2))
        right = np.mean([walk.guess[each] == walk.successor[each] for each in seen])
        assert right == pytest.approx(acceptance)
    assert sorted(walk.guess) == list(range(1000))


def test_prompts_of_cycles_differ_in_their_last_tokens_alone() -> None:
    walk = Walk.drawn(100, (0.9, 0.8, 0.6))
    one, other = walk.prompts(0, 3, 20), walk.prompts(2, 3, 20)
    assert [each[:-1] for each in one] == [each[:-1] for each in other]
    assert {each[-1] % 3 for each in one} == {0}
    assert {each[-1] % 3 for each in other} == {2}
    assert len({each[:5] for each in one}) == 3


@pytest.mark.parametrize("acceptance", [1.5, -0.1])
def test_an_acceptance_that_is_no_share_is_refused(acceptance: float) -> None:
    with pytest.raises(ValueError, match=f"an acceptance is {acceptance}; it must lie between 0 and 1"):
        Walk.drawn(10, (acceptance,))


def test_a_model_with_a_tied_head_cannot_walk(tmp_path: Path) -> None:
    directory = write_shape(tmp_path, ON_CPU.draft)
    with pytest.raises(ValueError, match="a vocabulary of 512 and a tied head; a walk over 512 tokens"):
        Walking.of(directory, Walk.drawn(512, (0.5,)).guess, "cpu")


@pytest.mark.slow
def test_models_walk_whoever_drafts_and_drafts_are_accepted_as_often_as_wanted(tmp_path: Path) -> None:
    """Planted: the drafter's guesses for the target's successors, and the inverse of the walk."""
    plan = Plan(out=tmp_path, dry_run=True)
    walk = Walk.drawn(512, (0.9, 0.5))
    target = write_shape(tmp_path / "target", ON_CPU.target)
    draft = write_shape(tmp_path / "draft", ON_CPU.draft | {"tie_word_embeddings": False})
    opened = open_engine(
        plan,
        Wanted(
            target=target,
            draft=draft,
            sequences=4,
            context=32,
            rows=128,
            sources=lambda directory: Walking.of(
                directory, walk.successor if directory == target else walk.guess, "cpu"
            ),
            speculative={"method": "draft_model", "model": str(draft), "num_speculative_tokens": 1},
            costs=lane_costs(),
            overlap="auto",
        ),
    )
    engine, shares = opened.engine, []
    for policy in ("off", "fixed"):
        engine.use_policy(policy, None if policy == "off" else 1, overlap="off")
        for place in (0, 1):
            before = engine.stats().speculation
            prompts = walk.prompts(place, 4, 32)
            said = answers(
                engine, prompts, lambda _: SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)
            )
            for prompt, answer in zip(prompts, said, strict=True):
                line = (prompt[-1], *answer)
                assert [int(walk.successor[each]) for each in line[:-1]] == list(answer)
            after = engine.stats().speculation
            assert before is not None
            assert after is not None
            verified = sum(each.verified for each in after.methods) - sum(each.verified for each in before.methods)
            accepted = sum(each.accepted for each in after.methods) - sum(each.accepted for each in before.methods)
            shares.append(accepted / max(verified, 1))
    close(opened)
    assert shares[:2] == [0.0, 0.0]
    assert shares[2] == pytest.approx(0.9, abs=0.1)
    assert shares[3] == pytest.approx(0.5, abs=0.15)


def turns_of(rates: dict[str, float], round_: int) -> list[dict[str, object]]:
    cell = {"drafter": "1B", "partition": "sm", "acceptance": 0.8, "sequences": 4}
    return [
        {
            **cell,
            "round": round_,
            "policy": arm.name,
            "tokens_per_s": rates[arm.name],
            "ahead": 0.5,
            "accepted": 0.8,
        }
        for arm in ARMS
    ]


def test_ratios_are_to_serial_of_the_same_round_and_gains_to_the_best_other_way() -> None:
    """Planted: medians of rates before ratios; the gain over serial where plain steps were faster."""
    turns = [
        *turns_of({"off": 50.0, "serial": 100.0, "ahead": 120.0, "auto": 115.0}, 0),
        *turns_of({"off": 15.0, "serial": 10.0, "ahead": 18.0, "auto": 10.0}, 1),
        *turns_of({"off": 5.0, "serial": 10.0, "ahead": 11.0, "auto": 11.0}, 2),
        *turns_of({"off": 5.0, "serial": 10.0, "ahead": 11.0, "auto": 11.0}, 3)[:2],
    ]
    told = {"drafter": "1B", "partition": "sm", "acceptance": 0.8, "sequences": 4, "gain": 1.1}
    (row,) = rows_of(turns, [told])
    assert row["rounds"] == 3
    assert row["ahead"] == 1.2
    assert row["gain"] == 1.2
    assert row["off"] == 0.5
    assert row["expected_gain"] == 1.1
    found = promises([row])
    assert (found["promised"], found["of these above the bar"], found["auto below 0.98 of the best way"]) == (
        1,
        1,
        1,
    )
    drawn = pictures([row])
    assert set(drawn) == {"overlap-expected.svg", "overlap-1B-sm.svg"}
    assert "1.2" in lane_report.overlap({"rows": [row], "promises": found})


def test_what_is_expected_follows_what_lanes_cost() -> None:
    """Free lanes and a slow drafter: ahead pays. Lanes that cost half: it does not. Planted: lanes left out."""

    costs = CostModel(StepTimes.proportional(step_s=5e-3, row_s=2e-5, pass_s=1.5e-3))

    def lanes(slowdown: float) -> InterferenceTable:
        return InterferenceTable.constant(
            share=0.2, verify=slowdown, draft=slowdown, verify_alone=slowdown, draft_alone=slowdown
        )

    free, dear = (expected(costs, (lanes(slowdown),), 0.9, 4, 4096, 7) for slowdown in (1.0, 1.5))
    assert free["gain"] > 1.08
    assert dear["gain"] < 1.0
    assert free["before"] == dear["before"] > free["off"]


class FakeDriver:
    """Groups of eight. Notes what there is."""

    num_processors = 20

    def __init__(self) -> None:
        self.alive: list[object] = []
        self.number = 0

    def split(self, count: int) -> tuple[Group, Group]:
        part = -(-count // 8) * 8
        return Group(count=part, resource=None), Group(count=20 - part, resource=None)

    def context(self, group: Group) -> object:
        self.alive.append(f"context {group.count}")
        return self.alive[-1]

    def stream(self, _context: object, _priority: int) -> int:
        self.number += 1
        self.alive.append(self.number)
        return self.number

    def destroy_stream(self, stream: int) -> None:
        self.alive.remove(stream)

    def destroy_context(self, context: object) -> None:
        assert all(isinstance(each, str) for each in self.alive[self.alive.index(context) :]), "a stream was left"
        self.alive.remove(context)


class FakeLaneDevice:
    num_processors = 20

    def __init__(self) -> None:
        self.used: list[object] = []

    def stream(self, _priority: int) -> object:
        return "everything"

    def adopt(self, address: int) -> object:
        return address

    def on(self, stream: object) -> AbstractContextManager[object]:
        self.used.append(stream)
        return nullcontext()

    def event(self) -> DeviceEvent:
        raise AssertionError("nobody waits for single events here")

    def elapsed_s(self, _earlier: DeviceEvent, _later: DeviceEvent) -> float:
        raise AssertionError("times are a clock's here")

    def wait(self) -> None:
        self.used.append("waited")


def test_parts_of_a_device_are_made_once_and_given_back_streams_first() -> None:
    """Planted: a new context in every use; contexts destroyed before their streams."""
    driver, device = FakeDriver(), FakeLaneDevice()
    places = GreenPlaces(driver, device)
    assert places.widths() == (8, 16, 20)
    assert splits(places) == [{"wanted": 8, "part": 8, "left": 12}, {"wanted": 16, "part": 16, "left": 4}]
    for width in (8, 16, 8, 20):
        with places.on(width):
            pass
    assert device.used == [1, 2, 1, 2, 1, "everything"]
    assert driver.alive == ["context 8", 1, "context 16", 2]
    places.close()
    assert device.used[-1] == "waited"
    assert driver.alive == []


class Undivided(Plan):
    """A dry run without partitions."""

    @property
    def sizes(self) -> Sizes:
        return replace(ON_CPU, partitions=())


class Refuses(FakeDriver):
    """No context for groups of this size."""

    def __init__(self, refused: int) -> None:
        super().__init__()
        self.refused = refused

    def context(self, group: Group) -> object:
        if group.count == self.refused:
            raise GreenContextError("cuGreenCtxCreate: not enough")
        return super().context(group)


def test_a_part_that_the_driver_refuses_is_named_and_the_others_are_measured(tmp_path: Path) -> None:
    """Planted: one refusal that ends the evidence of all parts."""
    places = GreenPlaces(Refuses(8), FakeLaneDevice())
    found = splits(places)
    assert found == [
        {"wanted": 8, "says": "cuGreenCtxCreate: not enough"},
        {"wanted": 16, "part": 16, "left": 4},
    ]
    assert granted(places, found) == (16, 20)

    desk = Desk(Folder(tmp_path, dry_run=True), "lanes", 100.0, lambda _: None)
    run(Undivided(out=tmp_path, dry_run=True), desk, lambda _: GreenPlaces(Refuses(8), FakeLaneDevice()))
    result = desk.finish().result
    assert [row["processors"] for row in result["rates"]] == [16, 20] * 2
    assert result["refused"] is None
    assert "cuGreenCtxCreate: not enough" in lane_report.lanes(result)


def test_a_kernel_that_cannot_run_on_a_lane_is_named(tmp_path: Path) -> None:
    class NoClusters(Serial):
        def run_both(self, *_: Any) -> Any:
            raise RuntimeError("cluster launch failure\nCompile with …")

        def shares(self) -> tuple[float, ...]:
            return (0.5,)

        def resize(self, share: float) -> None:
            pass

    desk = Desk(Folder(tmp_path, dry_run=True), "lanes", 100.0, lambda _: None)
    pairs(Plan(out=tmp_path, dry_run=True), desk, NoClusters(), HostClock())
    assert {row["says"] for row in desk.finish().result["company"]} == {"cluster launch failure"}


def test_lanes_that_take_turns_gain_nothing() -> None:
    def busy() -> None:
        sum(range(20000))

    found = company(Serial(), HostClock(), busy, busy)
    assert found["together"] == 0.0
    assert 0.3 < found["speed_up"] < 3.0


def test_arrivals_say_which_of_their_inputs_is_missing(tmp_path: Path) -> None:
    """Planted: one for the other."""
    for plan, missing in (
        (Plan(out=tmp_path, smollm2=tmp_path), "no --trace was given"),
        (Plan(out=tmp_path, trace=tmp_path), "no --smollm2 was given"),
    ):
        desk = Desk(Folder(tmp_path, dry_run=False), "arrivals", 1.0, lambda _: None)
        arrivals.run(plan, desk)
        assert desk.result == {"not there": missing}


def test_runs_under_arrivals_fit_into_the_time(tmp_path: Path) -> None:
    """Planted: warming and capacity forgotten."""
    wanted = wanted_of(Plan(out=tmp_path), 300.0)
    assert wanted.num_runs == 24
    taken_s = 1.3 * wanted.num_runs * wanted.seconds + (len(wanted.arms) + 2) * wanted.warm_s
    assert taken_s == pytest.approx(300.0)
    assert wanted_of(Plan(out=tmp_path), 3000.0).seconds == 20.0


@pytest.mark.slow
@pytest.mark.skipif(len(core_numbers()) < 2, reason="two lanes take two cores")
def test_lanes_are_measured_on_cores_in_a_dry_run(tmp_path: Path) -> None:
    (phase,) = phases_named(["lanes"])
    plan = Plan(out=tmp_path, dry_run=True)
    record = run_here(plan, phase, 60.0, lambda _: None)
    assert record.error is None
    result = record.result
    assert [row["load"] for row in result["stays"]] == ["traffic", "product", "copy", "triton", "norm"]
    shares = {row["share"] for row in result["company"]}
    assert len(result["company"]) == 4 * len(shares)
    assert [(row["asked"], row["came"], row["refusal"]) for row in result["partitions"]] == [
        ("cores", "cores", None)
    ]
    assert all(row["a_second"] > 1e6 for row in result["rates"])
    assert [(row["part"], row["left"]) for row in result["splits"]] == [(1, 1)]
    assert len(result["matrix"]) == len(ON_CPU.lane_rows) * len(shares)
    assert "speed_up" in lane_report.lanes(result)


@pytest.mark.slow
@pytest.mark.skipif(len(core_numbers()) < 2, reason="two lanes take two cores")
def test_overlap_compares_all_ways_in_every_cell_of_a_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap, "LEAST_AHEAD", 0.0)  # how fast a tiny model is here decides nothing
    (phase,) = phases_named(["overlap"])
    record = run_here(Plan(out=tmp_path, dry_run=True), phase, 200.0, lambda _: None)
    assert record.error is None
    assert len(record.result["rows"]) == len(ON_CPU.overlap_acceptances) * len(ON_CPU.overlap_batches)
    assert record.result["lanes"][0]["came"] == "cores"
    assert len(record.result["gaps"]) == len(record.result["rows"])
    assert all(row["expected_gain"] is not None for row in record.result["rows"])
    serial = [turn for turn in record.result["turns"] if turn["policy"] in ("off", "serial")]
    assert {(turn["ahead"], turn["pairs"]) for turn in serial} == {(0.0, 0)}
    forced = [turn for turn in record.result["turns"] if turn["policy"] == "ahead"]
    assert sum(turn["ahead"] for turn in forced) > 0
    assert (tmp_path / "overlap-expected.svg").is_file()
