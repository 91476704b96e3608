"""The phases that there are, the runs that are made of them, and how the phases of a run are run.

Each phase has a process of its own, within its share of the time: what breaks a device's context breaks the rest
of its process. The whole run ends in time whatever a phase does: one that takes too long is stopped, and one for
which too little is left is not begun. Everything a phase needs is imported when it runs.
"""

import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.gpu.plan import Plan
from benchmarks.gpu.record import Desk, Folder, Record, Say, run_child, tail_of
from faser.config.environment import child_environment, cuda_environment

_HERE = "benchmarks.gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """run: module and function, called with (plan, desk). share: of the time of a run, if all phases ran.

    least_s: with less time than that it is not begun: what it loads would take all of it. needs: field of Plan
    without which there is nothing to do. vital: where it fails, the phases behind it are skipped.
    """

    name: str
    run: tuple[str, str]
    share: float
    about: str
    least_s: float = 0.0
    needs: str | None = None
    vital: bool = False


def _phase(
    name: str, run: str, share: float, least_s: float, about: str, needs: str | None = None, *, vital: bool = False
) -> Phase:
    """Return a phase. run: module and function."""
    module, _, function = run.partition(":")
    place = f"{_HERE}.{module}", function
    return Phase(name=name, run=place, share=share, least_s=least_s, about=about, needs=needs, vital=vital)


PHASES = (
    _phase("environment", "decoding.environment:run", 0.02, 10.0, "device, versions, copy bandwidth", vital=True),
    _phase("checks", "checks.checks:run", 0.10, 40.0, "against the references"),
    _phase("plain", "decoding.plain:run", 0.09, 40.0, "decoding without speculation, 8B"),
    _phase("verify", "decoding.plain:run_verify", 0.05, 30.0, "cost of verification by rows, 8B"),
    _phase("attention", "decoding.attention:run", 0.03, 20.0, "attention by rows and tiles"),
    _phase("passes", "decoding.passes:run", 0.09, 60.0, "whole steps each way, and their kernels"),
    _phase("cycle", "decoding.cycle_gap:run", 0.05, 50.0, "drafting and verifying, and what the device waits"),
    _phase(
        "policies", "decoding.policies:run", 0.06, 60.0, "policies at given acceptance, 8B and its draft model"
    ),
    _phase("lanes", "decoding.lane_rates:run", 0.03, 30.0, "copies and passes on some of the processors"),
    _phase("overlap", "decoding.overlap:run", 0.09, 60.0, "drafting during verification, by mode"),
    _phase("vllm", "decoding.vllm_arm:run", 0.12, 75.0, "the same work by vLLM", "vllm"),
    _phase("family_checks", "checks.checks:run_families", 0.07, 40.0, "mixtures, sinks, windows, heads of 256"),
    _phase("mixtures", "decoding.mixtures:run", 0.06, 40.0, "steps of mixtures of experts"),
    _phase("few_rows", "decoding.few_rows:run", 0.02, 20.0, "products of up to 8 rows in 16 and 8 bits, each way"),
    _phase("products", "decoding.products:run", 0.02, 20.0, "products alone, by torch and FlashInfer"),
    _phase("few_row_mixtures", "decoding.few_row_mixtures:run", 0.03, 30.0, "mixtures of up to 8 rows, each way"),
    _phase("prompts", "decoding.prompts:run", 0.03, 40.0, "prompts alone, and in pieces beside decoding"),
    _phase("grammar", "decoding.grammar:run", 0.01, 20.0, "one request with a grammar among others"),
    _phase("heads", "decoding.heads:run", 0.01, 40.0, "passes of an EAGLE-3 head, 8B"),
    _phase("ranks", "decoding.ranks:run", 0.02, 40.0, "sums of two processes, and two GPUs with one model"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Phases of one call, in order, with about how long each takes there, which is a prediction.

    budget_s: of the whole call. More than the phases take: what is left over is for what takes longer.
    """

    about: str
    budget_s: float
    seconds: Mapping[str, float]


# Half an hour on a device in three calls, with their starts and transfers; `d` and `e` are of another day.
RUNS: Mapping[str, Run] = {
    "a": Run(
        about="whether it is right, and how near to the floor",
        budget_s=480.0,
        seconds={
            "environment": 20.0,
            "checks": 110.0,
            "verify": 35.0,
            "attention": 30.0,
            "passes": 100.0,
            "cycle": 60.0,
            "plain": 60.0,
        },
    ),
    "b": Run(
        about="products of few rows, policies, a head, and a grammar",
        budget_s=480.0,
        seconds={
            "environment": 15.0,
            "few_rows": 45.0,
            "products": 25.0,
            "grammar": 25.0,
            "heads": 45.0,
            "ranks": 40.0,
            "policies": 240.0,
        },
    ),
    "c": Run(
        about="whether drafting during verification can pay, prompts, and checks of mixtures",
        budget_s=480.0,
        seconds={"environment": 15.0, "lanes": 40.0, "overlap": 150.0, "prompts": 70.0, "family_checks": 100.0},
    ),
    "d": Run(
        about="vLLM and then FASER",
        budget_s=480.0,
        seconds={"environment": 15.0, "vllm": 240.0, "plain": 60.0},
    ),
    "e": Run(
        about="mixtures",
        budget_s=480.0,
        seconds={"environment": 15.0, "few_row_mixtures": 60.0, "family_checks": 100.0, "mixtures": 100.0},
    ),
}


def phases_of_run(run: Run) -> tuple[Phase, ...]:
    """In the run's own order, with their parts of its time."""
    known = {phase.name: phase for phase in PHASES}
    whole_s = sum(run.seconds.values())
    return tuple(replace(known[name], share=seconds / whole_s) for name, seconds in run.seconds.items())


def phases_named(names: Sequence[str]) -> tuple[Phase, ...]:
    """In their usual order; none: all. Raises ValueError for a name that there is not."""
    known = [phase.name for phase in PHASES]
    for name in names:
        if name not in known:
            raise ValueError(f"there is no phase {name}; there are {', '.join(known)}")
    return tuple(phase for phase in PHASES if not names or phase.name in names)


def with_work(plan: Plan, phases: Sequence[Phase]) -> tuple[Phase, ...]:
    """The same phases; without a share where they have nothing to do. A dry run needs no least time."""
    found = []
    for phase in phases:
        idle = phase.needs is not None and getattr(plan, phase.needs) is None
        share, least_s = (0.0, 0.0) if idle else (phase.share, phase.least_s)
        found.append(replace(phase, share=share, least_s=0.0 if plan.dry_run else least_s))
    return tuple(found)


GRACE = 1.3  # times its share, and a little, is what a phase gets before it is stopped from outside
GRACE_S = 15.0
_ROOT = Path(__file__).parents[2]
_MOST_ERROR_CHARS = 4000

Launch = Callable[[Phase, float], Record]


def run_here(plan: Plan, phase: Phase, budget_s: float, say: Say) -> Record:
    """In this process. An exception is kept as the phase's error."""
    desk = Desk(Folder(plan.out, dry_run=plan.dry_run), phase.name, budget_s, say)
    module, function = phase.run
    try:
        getattr(importlib.import_module(module), function)(plan, desk)
    except Exception:  # whatever it was: the other phases are worth something without this one
        error = traceback.format_exc()[-_MOST_ERROR_CHARS:]
        desk.say(error)
        return desk.finish(error)
    return desk.finish()


def run_all(
    phases: Sequence[Phase],
    folder: Folder,
    budget_s: float,
    launch: Launch,
    say: Say,
    *,
    keep: Callable[[], None] = lambda: None,
    now: Callable[[], float] = time.perf_counter,
) -> list[Record]:
    """Run the phases that are not complete. Time that a phase leaves goes to those behind it.

    launch: runs one phase within a number of seconds. keep: called after each of them.
    """
    ends_s = now() + budget_s
    missing = [phase for phase in phases if not _is_done(folder, phase)]
    records: list[Record] = []
    broken: str | None = None
    for phase in phases:
        if phase not in missing:
            say(f"{phase.name}: there already")
            records.append(_there(folder, phase))
            continue
        left_s = ends_s - now()
        given_s = None if broken else time_of(phase, missing[missing.index(phase) :], left_s)
        if given_s is None:
            records.append(folder.skip(phase.name, broken or f"{max(left_s, 0.0):.0f} s of the run were left"))
            say(f"{phase.name}: SKIPPED, {records[-1].skipped}")
        else:
            say(f"{phase.name}: {phase.about}; {given_s:.0f} s of {left_s:.0f} s")
            records.append(launch(phase, given_s))
            say(f"{phase.name}: {records[-1].state}, {records[-1].seconds:.0f} s")
            if phase.vital and not records[-1].complete:
                broken = f"{phase.name} failed"
        keep()
    return records


def time_of(phase: Phase, waiting: Sequence[Phase], left_s: float) -> float | None:
    """Seconds for the first of those that wait; None: too few for it.

    However long it takes, it ends within what is left, stopped from outside if need be.
    """
    most_s = (left_s - GRACE_S) / GRACE
    if most_s < phase.least_s or most_s < 0:
        return None
    if not phase.share:
        return 0.0
    fair_s = left_s * phase.share / sum(each.share for each in waiting)
    return min(max(fair_s, phase.least_s), most_s)


def run_apart(
    plan: Plan, phase: Phase, budget_s: float, arguments: Sequence[str], tick: Callable[[], None] = lambda: None
) -> Record:
    """In a process of its own, which is stopped with all that it started when it takes much too long.

    arguments: of this run's command line. tick: called every few seconds meanwhile.
    """
    folder, began_s = Folder(plan.out, dry_run=plan.dry_run), time.perf_counter()
    folder.discard(phase.name)
    log = plan.out / f"{phase.name}.log"
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    command += ["--only-phase", phase.name, "--phase-s", f"{budget_s:.1f}"]
    limit_s = budget_s * GRACE + GRACE_S
    status = run_child(command, environment=_environment(plan), log=log, timeout_s=limit_s, tick=tick)
    taken_s = round(time.perf_counter() - began_s, 1)
    if status is None:
        return folder.stopped(phase.name, f"stopped after {taken_s:.0f} s", taken_s)
    found = folder.load(phase.name)
    if found is not None and (found.complete or found.error):
        return found
    said = tail_of(log, _MOST_ERROR_CHARS)
    return folder.stopped(phase.name, f"{said}\nits process ended with status {status}".strip(), taken_s)


def _environment(plan: Plan) -> dict[str, str]:
    """With this very checkout first on the path, wherever this process was started.

    On a CPU kernels run in Triton's interpreter, which has to be said before Triton is imported.
    """
    environment = child_environment() | {"PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_ROOT), environment.get("PYTHONPATH"))))
    if plan.dry_run:
        return environment | {"TRITON_INTERPRET": "1"}
    cuda_environment(environment, compile_kernels=False)  # some phases start CUDA before they build an engine
    return environment


def _is_done(folder: Folder, phase: Phase) -> bool:
    found = folder.load(phase.name)
    return found is not None and found.complete


def _there(folder: Folder, phase: Phase) -> Record:
    found = folder.load(phase.name)
    assert found is not None, f"{phase.name} was there a moment ago"
    return found
