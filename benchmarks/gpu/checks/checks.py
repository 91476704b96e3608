"""Phase `checks`: what is computed on the device is what the references say. Nothing is timed.

Each check stands alone: one that fails or breaks is noted, and the others still run. One for which there was no
time, or not what it needs, is noted as not checked, and then the run is not green.
"""

from collections.abc import Callable
from functools import partial

from benchmarks.gpu.checks import answers, models, programs, tokens
from benchmarks.gpu.common.plan import Plan
from benchmarks.gpu.common.record import Desk, Json

Check = Callable[[Plan], Json]

_TAIL = 1500
_LEAST_S = 5.0  # a program is not begun with less time than that


def run(plan: Plan, desk: Desk) -> None:
    checks: dict[str, Check] = {
        "rope, append and attention": models.layers,
        "logits of whole models": models.logits,
        "chosen tokens": tokens.chosen,
        "guessed tokens": tokens.guessed,
        "verdicts": tokens.verdicts,
        "edited logits": tokens.edited,
        "law of chosen tokens": tokens.law_of_choice,
        "law of verified tokens": tokens.law_of_verification,
    }
    for name, check in checks.items():
        _begin(desk, name, partial(check, plan))
    answers.run(plan, desk, partial(_note, desk))
    for name, program in programs.PROGRAMS.items():
        _begin(desk, name, lambda program=program: program(plan, desk.left_s), needs_s=_LEAST_S)  # type: ignore[misc]
    there = {each["check"] for each in desk.result.get("checks", [])}
    for name in (*checks, *answers.NAMES, *programs.PROGRAMS):
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
