"""How the phases of a run are run: each in a process of its own, within its share of the time.

What breaks a device's context breaks the rest of its process. The whole run ends in time whatever a phase does:
one that takes too long is stopped, and one for which too little is left is not begun.
"""

import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.gpu.common.children import run_child, tail_of
from benchmarks.gpu.common.plan import Plan
from benchmarks.gpu.common.record import Desk, Folder, Record, Say
from benchmarks.gpu.phases import Phase
from faser.config.environment import child_environment, cuda_environment

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
    """What is complete already is skipped. Time that a phase leaves goes to those behind it.

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
