"""Work of one kind each, to see where it runs, how fast, and what company costs it.

traffic   an addition over large tensors, bound by memory: a kernel, where a plain copy may be the copy engines'
product   a large product in bfloat16, bound by computing: cuBLAS
copy      the plain copy, for the record
triton    rows quantised to eight bits: a Triton kernel, bound by memory
norm      the RMS norm of a layer, bound by memory

Phase `lanes`: whether the device can be divided, what a part of it can do, and what two parts cost each other.

splits     what the driver makes of requests for 8, 16 … processors
rates      bytes and operations a second of a part, by its processors
stays      whether kernels of every kind stay on the part whose stream they were given to or recorded on: they then
           take longer on a small part than on everything; and the processors that the probe saw
partitions for each that is asked for: which one came, its shares, and the driver's words if another one came
company    two busy lanes against the same work in turns, by kinds, for every partition and share
matrix     steps of the target beside passes of the draft model, each over its time alone

What the driver refuses is a result here: a part that it refuses is left out and named; where it refuses all of
them, whatever takes parts is left out, and streams are measured, once. A lane on which a kernel cannot run is
named as well: what a split leaves over promises no thread block clusters.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu.lanes import matrix
from benchmarks.gpu.lanes.matrix import Divide, divide
from benchmarks.gpu.lanes.places import (
    MOST_PROCESSORS,
    GreenPlaces,
    Places,
    ThreadPlaces,
    count_blocks,
    processors_of,
)
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.record import Desk, Json
from benchmarks.gpu.steps import DeviceClock, clock_of
from faser.engine.execution.overlap.cores import core_numbers
from faser.engine.execution.overlap.partition import Partition, synchronous
from faser.errors import ConfigError
from faser.kernels.cuda.green_contexts import GreenContextError, open_green_driver
from faser.kernels.cuda.streams import CudaLaneDevice
from faser.kernels.cuda.triton.norm import rms_norm
from faser.kernels.cuda.triton.quantise import quantise_rows

_REPEATS = 7
_ROW = 4096
_PRODUCT_SIDE = {"cuda": 8192, "cpu": 64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """amount: bytes moved, or multiplications and additions, of one run."""

    name: str
    run: Callable[[], object]
    amount: float
    unit: str


def traffic(plan: Plan) -> Load:
    """Buffers of its own, as everything here: lanes share nothing but the device."""
    count = plan.sizes.copy_bytes // 4
    source = torch.randint(256, (count,), dtype=torch.int16, device=plan.device)
    target = torch.empty_like(source)
    return Load(name="traffic", run=lambda: torch.add(source, 1, out=target), amount=4.0 * count, unit="bytes")


def product(plan: Plan) -> Load:
    side = _PRODUCT_SIDE[plan.device]
    one, other = (torch.randn(side, side, device=plan.device).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(one)
    return Load(name="product", run=lambda: torch.mm(one, other, out=out), amount=2.0 * side**3, unit="operations")


def copy(plan: Plan) -> Load:
    source = torch.randint(256, (plan.sizes.copy_bytes // 2,), dtype=torch.uint8, device=plan.device)
    target = torch.empty_like(source)
    return Load(name="copy", run=lambda: target.copy_(source), amount=2.0 * len(source), unit="bytes")


def triton(plan: Plan) -> Load:
    rows = max(plan.sizes.copy_bytes // (4 * _ROW), 1) if plan.device == "cuda" else 2
    x = torch.randn(rows, _ROW, device=plan.device).to(torch.bfloat16)
    values = torch.empty(rows, _ROW, dtype=torch.float8_e4m3fn, device=plan.device)
    scales = torch.empty(rows, dtype=torch.float32, device=plan.device)
    return Load(
        name="triton", run=lambda: quantise_rows(x, values, scales), amount=3.0 * rows * _ROW, unit="bytes"
    )


def norm(plan: Plan) -> Load:
    rows = max(plan.sizes.copy_bytes // (4 * _ROW), 1) if plan.device == "cuda" else 2
    x = torch.randn(rows, _ROW, device=plan.device).to(torch.bfloat16)
    weight, out = torch.ones(_ROW, dtype=torch.bfloat16, device=plan.device), torch.empty_like(x)
    return Load(name="norm", run=lambda: rms_norm(x, weight, 1e-5, out), amount=4.0 * rows * _ROW, unit="bytes")


KINDS: dict[str, Callable[[Plan], Load]] = {
    "traffic": traffic,
    "product": product,
    "copy": copy,
    "triton": triton,
    "norm": norm,
}


def median_s(clock: DeviceClock, work: Callable[[], object]) -> float:
    """Seconds of one run on the current stream, of several, after one that only warms up."""
    work()
    marks = [clock.mark()]
    for _ in range(_REPEATS):
        work()
        marks.append(clock.mark())
    return statistics.median(clock.between_s(marks))


# Makes a recording of work on the current stream, and returns what replays it.
Record = Callable[[Callable[[], object]], Callable[[], None]]

_STAYS = 2.0  # times as long on the smallest part: 8 of 132 processors have a sixteenth of them
_BUSY_S = 3e-3  # about how long a lane works in a pair
_ROUNDS = 5
_PAIRS = (("product", "product"), ("traffic", "traffic"), ("product", "traffic"), ("traffic", "product"))


def run(
    plan: Plan, desk: Desk, open_places: Callable[[Plan], Places] | None = None, divide: Divide = divide
) -> None:
    """open_places: None: the device's; may raise GreenContextError. divide: may raise ConfigError."""
    clock = clock_of(plan.device)
    try:
        places = (open_places or places_of)(plan)
        found = splits(places)
        desk.keep("splits", found)
        widths = granted(places, found)
        desk.keep("refused", None if len(widths) > 1 else "no part of any size")
    except GreenContextError as refused:
        desk.keep("refused", str(refused))
    else:
        _rates(plan, desk, places, widths, clock)
        _stays(plan, desk, places, widths, clock)
        places.close()
    for name in plan.sizes.partitions:
        if desk.may_begin(f"company by {name}"):
            _company(plan, desk, name, clock, divide)
    matrix.run_matrix(plan, desk, divide)


def places_of(plan: Plan) -> Places:
    """Raises GreenContextError where the driver cannot be asked."""
    if plan.dry_run:
        return ThreadPlaces(min(len(core_numbers()), 2))
    device = torch.device("cuda", torch.cuda.current_device())
    lanes = CudaLaneDevice(device)
    return GreenPlaces(open_green_driver(device), lanes)


def splits(places: Places) -> list[Json]:
    """What becomes of every wish for a part, in the driver's words where it refuses one."""
    found: list[Json] = []
    for width in places.widths()[:-1]:
        try:
            part, left = places.split(width)
            with places.on(width):
                found.append({"wanted": width, "part": part, "left": left})
        except GreenContextError as refused:
            found.append({"wanted": width, "says": str(refused)})
    return found


def granted(places: Places, found: Sequence[Json]) -> tuple[int, ...]:
    """Widths of parts that the driver makes, ascending; the last one is all. found: of splits."""
    refused = {each["wanted"] for each in found if "says" in each}
    return tuple(width for width in places.widths() if width not in refused)


def _rates(plan: Plan, desk: Desk, places: Places, widths: Sequence[int], clock: DeviceClock) -> None:
    for load in (traffic(plan), product(plan)):
        for width in widths:
            if not desk.may_begin(f"{load.name} on {width} processors"):
                continue
            with places.on(width):
                seconds = median_s(clock, load.run)
            desk.append("rates", {"load": load.name, "processors": width, "a_second": load.amount / seconds})


def _stays(plan: Plan, desk: Desk, places: Places, widths: Sequence[int], clock: DeviceClock) -> None:
    if len(widths) < 2:
        return
    narrow, wide = widths[0], widths[-1]
    for name, make in KINDS.items():
        if not desk.may_begin(f"where {name} runs"):
            continue
        try:
            load = make(plan)
        except ConfigError as error:
            desk.append("stays", {"load": name, "says": str(error)})
            continue
        record = None if plan.dry_run else _recorded
        desk.append("stays", {"load": name, **confined(places, clock, load, narrow, wide, record)})
    desk.keep("seen", _seen(plan, places, narrow))


def confined(
    places: Places, clock: DeviceClock, load: Load, narrow: int, wide: int, record: Record | None
) -> Json:
    """Its time on the narrow part over that on everything: given there; recorded there and replayed elsewhere.

    record: None: nothing can be recorded.
    """
    with places.on(wide):
        whole_s = median_s(clock, load.run)
    with places.on(narrow):
        part_s = median_s(clock, load.run)
        replay = None if record is None else record(load.run)
    found = {"eager_ratio": round(part_s / whole_s, 2), "eager": part_s > _STAYS * whole_s}
    if replay is not None:
        with places.on(wide):
            replayed_s = median_s(clock, replay)
        found |= {"recorded_ratio": round(replayed_s / whole_s, 2), "recorded": replayed_s > _STAYS * whole_s}
    return found


def _recorded(work: Callable[[], object]) -> Callable[[], None]:
    """On the current stream. What a kernel needs was made by a run before."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        work()
    torch.cuda.synchronize()
    return graph.replay


def _seen(plan: Plan, places: Places, narrow: int) -> Json:
    """Processors that the probe saw: on everything, on the narrow part, recorded there and replayed elsewhere."""
    if plan.dry_run:
        return {"says": "a CPU has no such processors"}
    with places.on(places.num_processors):
        everywhere = processors_of(torch.cuda.current_stream())
    with places.on(narrow):
        here = processors_of(torch.cuda.current_stream())
        counts = torch.zeros(MOST_PROCESSORS, dtype=torch.int32, device=plan.device)
        replay = _recorded(lambda: count_blocks(counts, places.num_processors))
    with places.on(places.num_processors):
        replay()
        torch.cuda.synchronize()
        replayed = [processor for processor, count in enumerate(counts.tolist()) if count]
    return {"everywhere": sorted(everywhere), "narrow": sorted(here), "recorded": replayed}


def _company(plan: Plan, desk: Desk, name: str, clock: DeviceClock, divide: Divide) -> None:
    try:
        divided = divide(plan, name)
    except ConfigError as error:
        desk.append("partitions", {"asked": name, "came": None, "refusal": str(error), "shares": []})
        return
    desk.append("partitions", divided.about)
    if not divided.is_measured_as_itself(plan.sizes.partitions):
        pairs(plan, desk, divided.partition, clock)
    divided.partition.close()


def pairs(plan: Plan, desk: Desk, partition: Partition, clock: DeviceClock) -> None:
    for drafting, verifying in _PAIRS:
        draft, verify = (busy(clock, KINDS[each](plan)) for each in (drafting, verifying))
        for share in partition.shares():
            if not desk.may_begin(f"{drafting} beside {verifying}, {partition.name}, share {share:.3f}"):
                continue
            partition.resize(share)
            row = {"partition": partition.name, "share": round(share, 4), "draft": drafting, "verify": verifying}
            try:
                found = company(partition, clock, draft, verify)
            except RuntimeError as error:
                found = {"says": str(error).partition("\n")[0]}
            desk.append("company", {**row, **found})


def company(
    partition: Partition, clock: DeviceClock, draft: Callable[[], None], verify: Callable[[], None]
) -> Json:
    """speed_up: in turns on everything over side by side; slowdown: on a lane over alone on everything."""
    rounds = []
    for _ in range(_ROUNDS + 1):
        marks = [clock.mark()]
        for work in (draft, verify):
            work()
            marks.append(clock.mark())
        draft_s, verify_s = clock.between_s(marks)
        joined = partition.run_both(lambda _lane, _done: draft(), synchronous(lambda _lane: verify()))
        both_s = max(joined.draft_ended_s, joined.verify_ended_s) - min(
            joined.draft_began_s, joined.verify_began_s
        )
        rounds.append(
            {
                "speed_up": (draft_s + verify_s) / both_s,
                "draft_slowdown": (joined.draft_ended_s - joined.draft_began_s) / draft_s,
                "verify_slowdown": (joined.verify_ended_s - joined.verify_began_s) / verify_s,
                "together": joined.overlap_s / both_s,
            }
        )
    return matrix.medians(rounds[1:])


def busy(clock: DeviceClock, load: Load) -> Callable[[], None]:
    """So many runs that they take about as long as those of other loads."""
    count = max(round(_BUSY_S / median_s(clock, load.run)), 1)

    def work() -> None:
        for _ in range(count):
            load.run()

    return work
