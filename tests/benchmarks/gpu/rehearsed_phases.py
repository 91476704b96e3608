"""Phases that take no time, but for the one that FASER_TEST_STOP_AT names: that one never ends."""

import os
import time
from functools import partial

from benchmarks.gpu.phases import Phase
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.record import Desk

NAMES = ("environment", "checks", "plain", "verify")
PHASES = tuple(Phase(name=name, run=(__name__, f"run_{name}"), share=0.25, about="rehearsed") for name in NAMES)


def _run(name: str, plan: Plan, desk: Desk) -> None:
    desk.keep("kept before", name)
    (plan.out / f"{name}.pid").write_text(str(os.getpid()))
    while os.environ.get("FASER_TEST_STOP_AT") == name:
        time.sleep(0.1)
    desk.keep("kept at the end", name)


run_environment, run_checks, run_plain, run_verify = (partial(_run, name) for name in NAMES)
