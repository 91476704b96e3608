"""Phase `checks`: what is computed on the device is what the references say. Nothing is timed.

Each check stands alone: one that fails or breaks is noted, and the others still run.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.gpu.checks import answers, models, tokens
from benchmarks.gpu.common.plan import Plan
from benchmarks.gpu.common.record import Desk, Json
from faser.config.environment import child_environment

Check = Callable[[Plan], Json]

_ROOT = Path(__file__).parents[3]
_LEAST_S = 5.0  # the project's own tests are not begun with less time than that
_TAIL = 1500


def run(plan: Plan, desk: Desk) -> None:
    checks: dict[str, Check] = {
        "rope, append and attention": models.layers,
        "logits of whole models": models.logits,
        "chosen tokens": tokens.chosen,
        "guessed tokens": tokens.guessed,
        "verdicts": tokens.verdicts,
        "law of chosen tokens": tokens.law_of_choice,
        "law of verified tokens": tokens.law_of_verification,
    }
    for name, check in checks.items():
        if desk.may_begin(name):
            _note(desk, name, lambda check=check: check(plan))  # type: ignore[misc]
    answers.run(plan, desk, lambda name, found: _note(desk, name, found))
    if desk.may_begin("the project's own tests of its kernels", needs_s=_LEAST_S):
        _note(desk, "own tests", lambda: _own_tests(plan, desk.left_s))


def _note(desk: Desk, name: str, check: Callable[[], Json]) -> None:
    """found: {"ok": whether it holds, None: only to be read, …}."""
    try:
        found = check()
    except Exception as error:  # any failure is a result here
        found = {"ok": False, "error": f"{type(error).__name__}: {error}"[:_TAIL]}
    desk.say(f"{name}: {'as it should be' if found['ok'] is not False else f'WRONG {found}'}")
    desk.append("checks", {"check": name, **found})


def _own_tests(plan: Plan, seconds: float) -> Json:
    """They choose the device by themselves. ok: None where pytest or what the tests need is missing."""
    cache = plan.out.resolve() / "pytest"
    command = [sys.executable, "-m", "pytest", "-q", "-o", f"cache_dir={cache}", plan.sizes.own_tests]
    try:
        ended = subprocess.run(
            command,
            cwd=_ROOT,
            capture_output=True,
            text=True,
            timeout=seconds,
            env=child_environment(),
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        said = expired.stdout.decode("utf-8", "replace") if isinstance(expired.stdout, bytes) else ""
        return {"ok": None, "says": f"not done after {seconds:.0f} s: {said[-_TAIL:]}"}
    if "No module named" in ended.stderr:
        return {"ok": None, "says": ended.stderr.strip()[-_TAIL:]}
    return {"ok": ended.returncode == 0, "says": (ended.stdout + ended.stderr).strip()[-_TAIL:]}
