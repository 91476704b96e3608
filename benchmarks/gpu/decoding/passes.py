"""Phase `passes`: whole steps of the runner by how they are computed, and the kernels that they launch.

    separate    every product, norm and gate in a launch of its own: the ways of always
    chosen      what was measured to be fastest when the engine started: up to 8 rows, layers of few launches
    fp8         chosen, with products in 8 bits
    fp8 keys    chosen, with keys and values in 8 bits

The 8B each way, its draft model the first two. `kernels` has what the device's profiler saw: launches of a step by
name, and `profiles` how much of a step no kernel ran. Each way has a floor of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.decoding.plain import bare_batch, bare_cells
from benchmarks.gpu.engines import Opened, Wanted, draft_of, made_up, target_of, with_engine
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.record import Desk, Json
from benchmarks.gpu.steps import WARM_STEPS, DeviceClock, clock_of, steps_s
from faser.kernels.cuda import choices

_LOADING_S = 15.0
_PROFILED_STEPS = 5
_MOST_KERNELS = 12  # listed of a step; those that take longest
_NAME_CHARS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Way to compute the steps of a model. separate: no kernel is chosen by its time."""

    model: str
    name: str
    separate: bool = False
    quantization: str | None = None
    kv_cache_dtype: str = "auto"


WAYS = (
    Way(model="draft", name="separate", separate=True),
    Way(model="draft", name="chosen"),
    Way(model="target", name="separate", separate=True),
    Way(model="target", name="chosen"),
    Way(model="target", name="fp8", quantization="fp8"),
    Way(model="target", name="fp8 keys", kv_cache_dtype="fp8"),
)


def run(plan: Plan, desk: Desk) -> None:
    for way in WAYS:
        about = {"model": way.model, "way": way.name}
        if not desk.may_begin(f"loading {way.model}, {way.name}", needs_s=0.0 if plan.dry_run else _LOADING_S):
            continue
        directory = draft_of(plan) if way.model == "draft" else target_of(plan)
        with only_references() if way.separate else nullcontext():
            with_engine(plan, _wanted(plan, way, directory), partial(_cells, plan, desk, way, about))


def _wanted(plan: Plan, way: Way, directory: Path) -> Wanted:
    sizes = plan.sizes
    return Wanted(
        target=directory,
        sequences=max(sizes.pass_batches),
        context=sizes.context,
        rows=max(sizes.pass_batches),
        sources=made_up(plan),
        quantization=way.quantization,
        kv_cache_dtype=way.kv_cache_dtype,
        graph_rows=tuple(sorted(sizes.pass_batches)),
    )


@contextmanager
def only_references() -> Iterator[None]:
    """Have engines that are built meanwhile take every reference, as where nothing can be timed."""
    measuring = choices.device_choices
    choices.device_choices = lambda *_: choices.Choices()
    try:
        yield
    finally:
        choices.device_choices = measuring


def _cells(plan: Plan, desk: Desk, way: Way, about: Json, opened: Opened) -> None:
    bare_cells(
        plan,
        desk,
        "rows",
        plan.sizes.pass_batches,
        opened,
        about=about,
        product_bytes=1 if way.quantization else 2,
        kv_share=0.5 if way.kv_cache_dtype == "fp8" else 1.0,
    )
    clock = clock_of(plan.device)
    for sequences in sorted(plan.sizes.pass_batches):
        if desk.may_begin(f"{about}: kernels of {sequences} rows"):
            kernels, whole = profiled(plan, opened, sequences, clock)
            cell = {**about, "sequences": sequences}
            desk.append("profiles", cell | whole)
            for kernel in kernels:
                desk.append("kernels", cell | kernel)


def profiled(plan: Plan, opened: Opened, sequences: int, clock: DeviceClock) -> tuple[list[Json], Json]:
    """Return the kernels of a step that take longest, and all of them together. On a CPU: torch's operators."""
    device = torch.profiler.ProfilerActivity.CPU if plan.dry_run else torch.profiler.ProfilerActivity.CUDA
    batch = bare_batch(plan, opened, sequences)
    steps_s(opened.runner, batch, clock, 1)
    with torch.profiler.profile(activities=[device]) as seen:
        taken_s = steps_s(opened.runner, batch, clock, _PROFILED_STEPS)
    steps = len(taken_s) + WARM_STEPS
    found = [
        (each.key, each.count, each.self_cpu_time_total if plan.dry_run else each.self_device_time_total)
        for each in seen.key_averages()
    ]
    found = sorted((each for each in found if each[2]), key=lambda each: -each[2])
    kernels = [
        {
            "kernel": name[:_NAME_CHARS],
            "launches": round(count / steps, 2),
            "us_each": round(us / count, 2),
            "us_a_step": round(us / steps, 2),
        }
        for name, count, us in found[:_MOST_KERNELS]
    ]
    busy_ms = sum(us for _, _, us in found) / steps / 1e3
    step_ms = 1e3 * sum(taken_s) / len(taken_s)
    whole = {
        "launches": round(sum(count for _, count, _ in found) / steps, 1),
        "step_ms": round(step_ms, 4),
        "kernels_ms": round(busy_ms, 4),
        "idle_ms": round(max(step_ms - busy_ms, 0.0), 4),
    }
    return kernels, whole
