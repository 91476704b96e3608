"""The phases of a run, in order, each with its share of the time; and how one of them is run.

A phase runs in a process of its own: what breaks a device's context breaks the rest of that process. Everything a
phase needs is imported when it runs.
"""

import importlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.gpu.common.plan import Plan
from benchmarks.gpu.common.record import Desk, Folder, Record, Say
from faser.config.environment import child_environment, cuda_environment

_ROOT = Path(__file__).parents[2]
_GRACE = 1.3  # times its share, and a little, is what a phase gets before it is stopped from outside
_GRACE_S = 15.0
_MOST_ERROR_CHARS = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """run: module and function, called with (plan, desk). share: of the time of a run, if all phases ran.

    needs: field of Plan without which there is nothing to do.
    """

    name: str
    run: tuple[str, str]
    share: float
    about: str
    needs: str | None = None


PHASES = (
    Phase(
        name="environment",
        run=("benchmarks.gpu.decoding.environment", "run"),
        share=0.02,
        about="device, versions, copy bandwidth",
    ),
    Phase(name="checks", run=("benchmarks.gpu.checks.checks", "run"), share=0.10, about="against the references"),
    Phase(
        name="plain",
        run=("benchmarks.gpu.decoding.plain", "run"),
        share=0.07,
        about="decoding without speculation, 8B",
    ),
    Phase(
        name="verify",
        run=("benchmarks.gpu.decoding.verify_cost", "run"),
        share=0.03,
        about="cost of verification by rows, 8B",
    ),
    Phase(
        name="draft",
        run=("benchmarks.gpu.decoding.plain", "run_draft"),
        share=0.03,
        about="passes of the draft model, 1B",
    ),
    Phase(
        name="cycle",
        run=("benchmarks.gpu.decoding.cycle", "run"),
        share=0.03,
        about="drafting and verifying against their floors",
    ),
    Phase(
        name="policies",
        run=("benchmarks.gpu.decoding.policies", "run"),
        share=0.11,
        about="policies at given acceptance, 8B and 1B",
    ),
    Phase(
        name="real_text",
        run=("benchmarks.gpu.decoding.real_text", "run"),
        share=0.06,
        about="policies over text",
        needs="smollm2",
    ),
    Phase(
        name="lanes",
        run=("benchmarks.gpu.lanes.lanes", "run"),
        share=0.12,
        about="processors divided: rates, places, company",
    ),
    Phase(
        name="overlap",
        run=("benchmarks.gpu.lanes.overlap", "run"),
        share=0.26,
        about="drafting beside verification, by mode",
    ),
    Phase(
        name="arrivals",
        run=("benchmarks.gpu.decoding.arrivals", "run"),
        share=0.12,
        about="each part of speculation under a trace",
        needs="trace",
    ),
    Phase(
        name="vllm",
        run=("benchmarks.gpu.decoding.vllm_arm", "run"),
        share=0.05,
        about="the same work by vLLM",
        needs="vllm",
    ),
)


def phases_named(names: Sequence[str]) -> tuple[Phase, ...]:
    """In their usual order; none: all. Raises ValueError for a name that there is not."""
    known = [phase.name for phase in PHASES]
    for name in names:
        if name not in known:
            raise ValueError(f"there is no phase {name}; there are {', '.join(known)}")
    return tuple(phase for phase in PHASES if not names or phase.name in names)


def phases_of(plan: Plan, names: Sequence[str]) -> tuple[Phase, ...]:
    """Those named, or all; without a share where they have nothing to do."""
    return tuple(
        replace(phase, share=0.0) if phase.needs and getattr(plan, phase.needs) is None else phase
        for phase in phases_named(names)
    )


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
    launch: Callable[[Phase, float], Record],
    say: Say,
    now: Callable[[], float] = time.perf_counter,
) -> list[Record]:
    """What is complete already is skipped. Time that a phase leaves goes to those behind it.

    launch: runs one phase within so many seconds.
    """
    ends_s = now() + budget_s
    missing = [phase for phase in phases if not _is_done(folder, phase)]
    records = []
    for phase in phases:
        if phase not in missing:
            say(f"{phase.name}: there already")
            records.append(_there(folder, phase))
            continue
        waiting = missing[missing.index(phase) :]
        all_shares = sum(each.share for each in waiting)
        share_s = max(ends_s - now(), 0.0) * phase.share / all_shares if phase.share else 0.0
        say(f"{phase.name}: {phase.about}; {share_s:.0f} s")
        records.append(launch(phase, share_s))
    return records


def run_overlapped(plan: Plan, phase: Phase, budget_s: float, arguments: Sequence[str]) -> Record:
    """In a process of its own, which is stopped with all that it started when it takes much too long.

    arguments: of this run's command line.
    """
    folder, began_s = Folder(plan.out, dry_run=plan.dry_run), time.perf_counter()
    folder.discard(phase.name)
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    command += ["--only-phase", phase.name, "--phase-s", f"{budget_s:.1f}"]
    child = subprocess.Popen(command, env=_environment(plan), start_new_session=True)
    try:
        status = child.wait(timeout=budget_s * _GRACE + _GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        taken_s = time.perf_counter() - began_s
        return folder.stopped(phase.name, f"stopped after {taken_s:.0f} s", round(taken_s, 1))
    found = folder.load(phase.name)
    if found is not None and (found.complete or found.error):
        return found
    taken_s = time.perf_counter() - began_s
    return folder.stopped(phase.name, f"its process ended with status {status}", round(taken_s, 1))


def _environment(plan: Plan) -> dict[str, str]:
    """With this very checkout first on the path, wherever this process was started.

    On a CPU kernels run in Triton's interpreter, which has to be said before Triton is imported.
    """
    environment = child_environment()
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
