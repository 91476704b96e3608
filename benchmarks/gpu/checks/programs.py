"""Checks that are programs of their own: a memory checker around a step, and the project's own tests."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.gpu.common.children import run_child, tail_of
from benchmarks.gpu.common.plan import Plan
from benchmarks.gpu.common.record import Json
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
    command += ["-m", "benchmarks.gpu.checks.one_step", str(plan.out), *(["--dry-run"] if plan.dry_run else [])]
    most_s = min(seconds, _SANITIZER_S)
    status = run_child(command, environment=child_environment(), log=log, timeout_s=most_s, folder=_ROOT)
    said = tail_of(log, _TAIL)
    if status is None:
        return {"ok": None, "says": f"not done after {most_s:.0f} s: {said}"}
    if _REFUSED in said:
        return {"ok": None, "skipped": said}
    return {"ok": status == 0, "says": said}


def own_tests(plan: Plan, seconds: float) -> Json:
    """They choose the device by themselves. ok: None where pytest or what the tests need is missing.

    Another machine has plugins of pytest and versions of libraries that these tests were not written for:
    plugins stay out, and warnings are no errors.
    """
    cache, log = plan.out.resolve() / "pytest", plan.out.resolve() / "own-tests.log"
    command = [sys.executable, "-m", "pytest", "-q", "-W", "default", "-o", f"cache_dir={cache}"]
    status = run_child(
        [*command, *plan.sizes.own_tests],
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


PROGRAMS: dict[str, Callable[[Plan, float], Json]] = {"memory of a step": memory_checked, "own tests": own_tests}
