"""Phase `lanes` of the bench programs for a GPU: how company and confinement are told from given times."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from benchmarks.gpu import report as lane_report
from benchmarks.gpu.lanes import lanes as lane_loads
from benchmarks.gpu.lanes.lanes import KINDS, Load, busy, company, confined, median_s, pairs, run
from benchmarks.gpu.lanes.matrix import Divided, beside, cells, steps_of
from benchmarks.gpu.lanes.places import ThreadPlaces
from benchmarks.gpu.plan import ON_CPU, Plan, Sizes
from benchmarks.gpu.record import Desk, Folder
from benchmarks.gpu.steps import batch_of
from faser.engine.execution.overlap.lanes import Lanes
from faser.engine.execution.overlap.partition import (
    EVERYTHING,
    Draft,
    OverlapResult,
    PendingResult,
    Serial,
    Verify,
)


class Ticking:
    """A DeviceClock: every mark is where `seconds` has come to."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.marks = 0

    def mark(self) -> float:
        self.marks += 1
        return self.seconds

    def between_s(self, marks: Sequence[float]) -> list[float]:
        return list(np.diff(marks))

    def wait(self) -> None:
        pass


class Beside:
    """See Partition. Runs both: from 3 to 9 s and from 4 to 8, after the first pair, which takes ages.

    The last two of six take longer, so that a median with the first one is another.
    """

    name, share = "sm", 0.125

    def __init__(self) -> None:
        self.pairs = 0
        self.used: set[float] = set()

    def shares(self) -> tuple[float, ...]:
        return (0.25, 0.5)

    def resize(self, share: float) -> None:
        self.share = share

    def run_both(self, draft: Draft[Any], verify: Verify[Any]) -> OverlapResult[Any, Any]:
        self.pairs += 1
        self.used.add(self.share)
        drafted, verified = draft(EVERYTHING, lambda: False), verify(EVERYTHING).wait()
        late = {1: 1000.0, 5: 100.0, 6: 100.0}.get(self.pairs, 0.0)
        return OverlapResult(
            drafted=drafted,
            verified=verified,
            began_s=0.0,
            draft_began_s=3.0,
            draft_ended_s=9.0 + late,
            verify_began_s=4.0,
            verify_ended_s=8.0 + late,
        )

    def close(self) -> None:
        pass


def working(clock: Ticking, seconds: float) -> Callable[[], None]:
    def work() -> None:
        clock.seconds += seconds

    return work


def test_company_is_told_by_the_devices_times_without_the_first_pair() -> None:
    """Planted: lanes swapped, the ratio upside down, the first pair counted, from the later beginning on."""
    clock, partition = Ticking(), Beside()
    found = company(partition, clock, working(clock, 5.0), working(clock, 2.0))
    assert partition.pairs == 6
    assert found == {
        "speed_up": pytest.approx(7 / 6, abs=1e-4),
        "draft_slowdown": 1.2,
        "verify_slowdown": 2.0,
        "together": pytest.approx(4 / 6, abs=1e-4),
    }


def test_company_is_looked_at_for_every_pair_of_kinds_at_every_share(tmp_path: Path) -> None:
    """Planted: a partition that is never resized."""

    class Running(Ticking):
        def mark(self) -> float:
            self.seconds += 1.0
            return super().mark()

    desk, partition = Desk(Folder(tmp_path, dry_run=True), "lanes", 60.0, lambda _: None), Beside()
    pairs(Plan(out=tmp_path, dry_run=True), desk, partition, Running())
    assert [row["share"] for row in desk.result["company"]] == [0.25, 0.5] * 4
    assert len({(row["draft"], row["verify"]) for row in desk.result["company"]}) == 4
    assert partition.used == {0.25, 0.5}


def test_a_lane_is_busy_for_about_as_long_whatever_it_does() -> None:
    """Planted: a single run of everything."""
    for seconds, count in ((0.5e-3, 6), (1e-3, 3), (1.0, 1)):
        clock = Ticking()
        work = busy(clock, Load(name="", run=working(clock, seconds), amount=1.0, unit=""))
        before = clock.seconds
        work()
        assert clock.seconds - before == pytest.approx(count * seconds)


class Closing(ThreadPlaces):
    is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Undivided(Plan):
    """A dry run that asks for no partition."""

    @property
    def sizes(self) -> Sizes:
        return replace(ON_CPU, partitions=())


def test_parts_of_a_device_are_given_back_when_they_have_been_measured(tmp_path: Path) -> None:
    places = Closing(1)
    desk = Desk(Folder(tmp_path, dry_run=True), "lanes", 60.0, lambda _: None)
    run(Undivided(out=tmp_path, dry_run=True), desk, lambda _plan: places)
    assert places.is_closed
    assert all(row["a_second"] > 1e6 for row in desk.result["rates"])


class Backend:
    """Notes where it was told to compute."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def use(self, processors: object) -> None:
        self.told.append(processors)


def test_steps_beside_passes_are_told_alike_each_with_its_own_backend() -> None:
    """Planted: backends swapped; slowdown over the other lane's time; the first pair counted."""
    clock, target, draft = Ticking(), Backend(), Backend()
    lanes = Lanes(partition=Beside(), target=cast("Any", target), draft=cast("Any", draft))
    seen: list[tuple[str, int, int]] = []

    def work(name: str, seconds: float) -> Callable[[], PendingResult[None]]:
        def run() -> PendingResult[None]:
            seen.append((name, len(target.told) % 2, len(draft.told) % 2))
            clock.seconds += seconds
            return PendingResult(lambda: None)

        return run

    found = beside(lanes, clock, work("draft", 5.0), work("verify", 2.0))
    assert found == {
        "draft_ms": 5000.0,
        "verify_ms": 2000.0,
        "draft_slowdown": 1.2,
        "verify_slowdown": 2.0,
        "speed_up": pytest.approx(7 / 6, abs=1e-4),
    }
    assert seen[:4] == [("draft", 0, 0), ("verify", 0, 0), ("draft", 0, 1), ("verify", 1, 0)]


def test_a_work_is_as_many_steps_as_it_is_said_to_be() -> None:
    class Runner:
        forwards = 0

        def forward(self, _batch: object) -> None:
            self.forwards += 1

    class Chosen:
        waits = 0

        def wait(self) -> None:
            self.waits += 1

    batch = batch_of(sequences=2, rows_each=3, context=33, num_blocks=9, block_size=16, vocab_size=100)
    runner, chosen, rows = Runner(), Chosen(), []

    def choose(asked: Any, requests: Any) -> Any:
        rows.append((asked.tolist(), requests.positions.tolist()))
        return chosen

    given = steps_of(cast("Any", runner), choose, batch, 4)()
    assert (runner.forwards, chosen.waits) == (4, 0)
    given.wait()
    assert chosen.waits == 1
    assert rows == [([0, 1, 2, 3, 4, 5], [31, 32, 33] * 2)] * 4


class Forwards:
    """A runner. seen: of every forward, how many sequences of what length there were, and rows."""

    def __init__(self, clock: Ticking) -> None:
        self.seen: list[tuple[int, int, int]] = []
        self._clock = clock

    def forward(self, batch: Any) -> None:
        self._clock.seconds += 1.0
        (length,) = set(batch.layout.seq_len.tolist())
        self.seen.append((len(batch.layout.seq_len), length, len(batch.token_ids)))

    def sample(self, *_asked: object) -> Any:
        return self

    sample_drafts = sample

    def wait(self) -> None:
        pass


def test_a_cell_of_the_matrix_is_a_step_of_the_target_beside_passes_of_the_draft_model(tmp_path: Path) -> None:
    """Planted: one pass, the target's runner for both, another context, a partition that is never resized."""
    plan, clock = Plan(out=tmp_path, dry_run=True), Ticking()
    desk, partition = Desk(Folder(tmp_path, dry_run=True), "lanes", 60.0, lambda _: None), Beside()
    target, draft = Forwards(clock), Forwards(clock)
    lanes = Lanes(partition=partition, target=cast("Any", Backend()), draft=cast("Any", Backend()))
    opened = SimpleNamespace(
        lanes=lanes,
        runner=target,
        draft_runner=draft,
        info=SimpleNamespace(num_blocks=64, block_size=16, vocab_size=100),
    )
    cells(plan, desk, cast("Any", opened), Divided(asked="sm", partition=partition, refusal=None), clock)
    calls = 2 * 6 * len(partition.shares())  # alone and in company, in every round
    assert plan.sizes.lane_rows == ((1, 1), (2, 3))
    assert target.seen == [(1, 48, 1)] * calls + [(2, 48, 6)] * calls
    passes = calls * plan.sizes.cycle_gamma
    assert draft.seen == [(1, 48, 1)] * passes + [(2, 48, 2)] * passes
    assert partition.used == {0.25, 0.5}
    assert [(row["asked"], row["share"], row["rows_each"]) for row in desk.result["matrix"]] == [
        ("sm", share, rows) for rows in (1, 3) for share in (0.25, 0.5)
    ]


def test_a_cpus_threads_are_as_many_as_before_when_a_part_is_left() -> None:
    before = torch.get_num_threads()
    with ThreadPlaces(before + 1).on(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


class TwoWidths:
    """Places of 8 and 132 processors. here: which of them is in use."""

    num_processors = 132

    def __init__(self) -> None:
        self.here = 132

    def widths(self) -> tuple[int, ...]:
        return (8, 132)

    def split(self, width: int) -> tuple[int, int]:
        return width, 132 - width

    @contextmanager
    def on(self, width: int) -> Iterator[None]:
        self.here = width
        yield
        self.here = 132

    def close(self) -> None:
        pass


@pytest.mark.parametrize("stays, recording_stays", [(True, True), (True, False), (False, False)])
def test_a_kernel_stays_on_a_part_where_it_takes_longer_there(stays: bool, recording_stays: bool) -> None:
    """Planted: the ratio upside down, the comparison turned, a replay that is timed on the part."""
    clock, places = Ticking(), TwoWidths()

    def run_at(width: int) -> None:
        clock.seconds += 1.0 if width == 132 else 4.0

    def record(_work: Callable[[], object]) -> Callable[[], None]:
        where = places.here
        return lambda: run_at(where if recording_stays else places.here)

    load = Load(name="probe", run=lambda: run_at(places.here if stays else 132), amount=1.0, unit="bytes")
    found = confined(places, clock, load, 8, 132, record)
    assert found == {
        "eager_ratio": 4.0 if stays else 1.0,
        "eager": stays,
        "recorded_ratio": 4.0 if recording_stays else 1.0,
        "recorded": recording_stays,
    }
    assert set(confined(places, clock, load, 8, 132, None)) == {"eager_ratio", "eager"}


def test_a_median_is_of_runs_behind_one_that_warms_up() -> None:
    """Planted: the first run counted."""
    clock, taken = Ticking(), iter((100.0, 1.0, 2.0, 3.0, 50.0, 60.0, 4.0, 70.0))

    def work() -> None:
        clock.seconds += next(taken)

    assert median_s(clock, work) == 4.0
    assert clock.marks == 8
    assert next(taken, None) is None


def test_loads_move_and_compute_what_they_say_and_keep_to_their_own_tensors(tmp_path: Path) -> None:
    """Planted: what is written not counted, products without additions, a load that writes to its source."""
    plan = Plan(out=tmp_path, dry_run=True)
    bytes_each = plan.sizes.copy_bytes
    assert KINDS["traffic"](plan).amount == bytes_each
    assert KINDS["copy"](plan).amount == bytes_each
    assert KINDS["product"](plan).amount == 2 * 64**3
    one = lane_loads.traffic(plan)
    first = cast("Any", one.run()).clone()
    assert bool((cast("Any", one.run()) == first).all())


def test_a_partition_that_came_for_one_that_is_asked_for_too_is_not_measured_twice() -> None:
    """Planted: left out where it is what was asked for; measured where both are asked for."""
    came = Divided(asked="sm", partition=Beside(), refusal=None)
    assert not came.is_measured_as_itself(("streams", "sm"))
    fallen = Divided(asked="sm", partition=Serial(), refusal="no")
    assert fallen.is_measured_as_itself(("serial", "sm"))
    assert not fallen.is_measured_as_itself(("sm",))
    assert came.about == {"asked": "sm", "came": "sm", "refusal": None, "shares": [0.25, 0.5]}


def test_tables_leave_out_what_no_row_has_and_say_what_was_refused() -> None:
    """Planted: columns only where all rows have them."""
    text = lane_report.lanes(
        {
            "refused": "no device | none",
            "stays": [{"load": "norm", "says": "no"}, {"load": "copy", "eager_ratio": 1.0, "eager": False}],
        }
    )
    assert "refuses to divide the device: no device" in text
    assert "| norm | – | – | no |" in text
    assert "recorded" not in text


def test_the_report_of_arrivals_has_each_figure_in_its_column() -> None:
    row = {
        "load": 0.8,
        "arm": "+lengths",
        "tokens_per_s": {"median": 1234.0},
        "throughput": {"median": 1.5},
        "latency": {"median": 2.5},
        "pruned_share": 0.25,
        "ahead_share": 0.5,
        "different": 3,
    }
    text = lane_report.arrivals({"rows": [row, row | {"throughput": None, "latency": None}]})
    assert "| 0.8 | +lengths | 1,234 | 1.50x | 2.50x | 25.0% | 50% | 3 |" in text
    assert "| 0.8 | +lengths | 1,234 | – | – |" in text
    assert lane_report.arrivals({"not there": "no --trace was given"}) == "no --trace was given"
