"""Phase `checks`: what is computed on the device is what the references say. Nothing is timed.

Each check stands alone: one that fails or breaks is noted, and the others still run. One for which there was no
time, or not what it needs, is noted as not checked, and then the run is not green. Two checks are programs of
their own: a memory checker around a step, and files of the project's tests.
"""

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.gpu.checks import answers, families, models, tokens
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.record import Desk, Json, run_child, tail_of
from faser.config.environment import child_environment

SANITIZER = "compute-sanitizer"
FOUND = 9  # exit status of a memory checker that found something
_SANITIZER_S = 30.0
_REFUSED = "Device not supported"  # says the checker on some machines
_ROOT = Path(__file__).parents[3]
_TAIL = 1500


def memory_checked(plan: Plan, seconds: float, which: Callable[[str], str | None] = shutil.which) -> Json:
    """One eager step of two layers under compute-sanitizer: no kernel may touch what is not its own.

    skipped: why, where there is no such tool or it refuses this device; that is no fault of the run.
    """
    tool = which(SANITIZER)
    if tool is None:
        return {"ok": None, "skipped": f"{SANITIZER} is not there"}
    log = plan.out.resolve() / "sanitizer.log"
    command = [tool, "--tool", "memcheck", f"--error-exitcode={FOUND}", "--print-limit=5", sys.executable]
    command += ["-m", "benchmarks.gpu.checks.models", str(plan.out), *(["--dry-run"] if plan.dry_run else [])]
    most_s = min(seconds, _SANITIZER_S)
    status = run_child(command, environment=child_environment(), log=log, timeout_s=most_s, folder=_ROOT)
    said = tail_of(log, _TAIL)
    if status is None:
        return {"ok": None, "says": f"not done after {most_s:.0f} s: {said}"}
    if _REFUSED in said:
        return {"ok": None, "skipped": said}
    return {"ok": status == 0, "says": said}


def own_tests(plan: Plan, seconds: float, files: Sequence[str] | None = None) -> Json:
    """They choose the device by themselves. ok: None where pytest or what the tests need is missing.

    files: None: those of the plan.

    Another machine has plugins of pytest and versions of libraries that these tests were not written for:
    plugins stay out, and warnings are no errors.
    """
    cache, log = plan.out.resolve() / "pytest", plan.out.resolve() / "own-tests.log"
    command = [sys.executable, "-m", "pytest", "-q", "-W", "default", "-o", f"cache_dir={cache}"]
    status = run_child(
        [*command, *(plan.sizes.own_tests if files is None else files)],
        environment=_tests_environment(),
        log=log,
        timeout_s=seconds,
        folder=_ROOT,
    )
    said = tail_of(log, _TAIL)
    if status is None:
        return {"ok": None, "says": f"not done after {seconds:.0f} s: {said}"}
    return {"ok": None if "No module named" in said else status == 0, "says": said}


def _tests_environment() -> dict[str, str]:
    kept = {name: value for name, value in child_environment().items() if not name.startswith("PYTEST_")}
    return kept | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


Programs = Mapping[str, Callable[[Plan, float], Json]]
PROGRAMS: Programs = {"memory of a step": memory_checked, "own tests": own_tests}


Check = Callable[[Plan], Json]

_LEAST_S = 5.0  # a program is not begun with less time than that


def run(plan: Plan, desk: Desk) -> None:
    usual: dict[str, Check] = {
        "rope, append and attention": models.layers,
        "logits of whole models": models.logits,
        "chosen tokens": tokens.chosen,
        "guessed tokens": tokens.guessed,
        "verification": tokens.verification,
        "edited logits": tokens.edited,
        "distribution of chosen tokens": tokens.distribution_of_choice,
        "distribution of verified tokens": tokens.distribution_of_verification,
    }
    make(plan, desk, usual, partial(answers.run, plan, desk), PROGRAMS)


def run_families(plan: Plan, desk: Desk) -> None:
    """Phase `family_checks`: of mixtures of experts, sinks, windows, capped scores and heads of 256."""
    tests = partial(own_tests, files=plan.sizes.family_tests)
    make(
        plan,
        desk,
        {
            "experts": families.experts,
            "rope, append and attention": partial(models.layers, configs=plan.sizes.families),
            "logits of whole models": families.logits,
        },
        partial(answers.run, plan, desk, config=plan.sizes.answering),
        {"own tests": tests},
    )


def make(
    plan: Plan, desk: Desk, usual: Mapping[str, Check], answer: Callable[[answers.Note], None], programs: Programs
) -> None:
    """Each of them, and those of answers; what there was no time for is noted as not checked."""
    for name, check in usual.items():
        _begin(desk, name, partial(check, plan))
    answer(partial(_note, desk))
    for name, program in programs.items():
        _begin(desk, name, lambda program=program: program(plan, desk.left_s), needs_s=_LEAST_S)  # type: ignore[misc]
    there = {each["check"] for each in desk.result.get("checks", [])}
    for name in (*usual, *answers.NAMES, *programs):
        if name not in there:
            desk.append("checks", {"check": name, "ok": None, "says": "no time was left"})


def _begin(desk: Desk, name: str, check: Callable[[], Json], needs_s: float = 0.0) -> None:
    if desk.may_begin(name, needs_s=needs_s):
        _note(desk, name, check)


def _note(desk: Desk, name: str, check: Callable[[], Json]) -> None:
    """found: {"ok": whether it holds, None: it was not checked, …}; skipped: why this machine cannot check it."""
    try:
        found = check()
    except Exception as error:  # any failure is a result here
        found = {"ok": False, "error": f"{type(error).__name__}: {error}"[:_TAIL]}
    state = {True: "as it should be", False: f"WRONG {found}", None: f"NOT CHECKED {found}"}[found["ok"]]
    desk.say(f"{name}: {state}")
    desk.append("checks", {"check": name, **found})
