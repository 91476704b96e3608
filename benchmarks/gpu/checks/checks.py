"""Phase `checks`: what is computed on the device is what the references say. Nothing is timed.

Each check stands alone: one that fails or breaks is noted, and the others still run.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.gpu.checks import answers, models, tokens
from benchmarks.gpu.common.children import run_child, tail_of
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


def _tests_environment() -> dict[str, str]:
    kept = {name: value for name, value in child_environment().items() if not name.startswith("PYTEST_")}
    return kept | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def _own_tests(plan: Plan, seconds: float) -> Json:
    """They choose the device by themselves. ok: None where pytest or what the tests need is missing.

    Another machine has plugins of pytest and versions of libraries that these tests were not written for:
    plugins stay out, and warnings are no errors.
    """
    cache, log = plan.out.resolve() / "pytest", plan.out.resolve() / "own-tests.log"
    command = [sys.executable, "-m", "pytest", "-q", "-W", "default", "-o", f"cache_dir={cache}"]
    status = run_child(
        [*command, plan.sizes.own_tests],
        environment=_tests_environment(),
        log=log,
        timeout_s=seconds,
        folder=_ROOT,
    )
    said = tail_of(log, _TAIL)
    if status is None:
        return {"ok": None, "says": f"not done after {seconds:.0f} s: {said}"}
    return {"ok": None if "No module named" in said else status == 0, "says": said}
