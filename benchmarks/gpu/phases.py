"""The phases that there are, in order, and the runs that are made of them.

Everything a phase needs is imported when it runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.gpu.common.plan import Plan

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


PHASES = (
    Phase(
        name="environment",
        run=(f"{_HERE}.decoding.environment", "run"),
        share=0.02,
        least_s=10.0,
        vital=True,
        about="device, versions, copy bandwidth",
    ),
    Phase(
        name="checks",
        run=(f"{_HERE}.checks.checks", "run"),
        share=0.10,
        least_s=40.0,
        about="against the references",
    ),
    Phase(
        name="plain",
        run=(f"{_HERE}.decoding.plain", "run"),
        share=0.07,
        least_s=40.0,
        about="decoding without speculation, 8B",
    ),
    Phase(
        name="verify",
        run=(f"{_HERE}.decoding.verify_cost", "run"),
        share=0.03,
        least_s=30.0,
        about="cost of verification by rows, 8B",
    ),
    Phase(
        name="draft",
        run=(f"{_HERE}.decoding.plain", "run_draft"),
        share=0.03,
        least_s=25.0,
        about="passes of the draft model",
    ),
    Phase(
        name="cycle",
        run=(f"{_HERE}.decoding.cycle", "run"),
        share=0.03,
        least_s=35.0,
        about="drafting and verifying against their floors",
    ),
    Phase(
        name="policies",
        run=(f"{_HERE}.decoding.policies", "run"),
        share=0.11,
        least_s=60.0,
        about="policies at given acceptance, 8B and its draft model",
    ),
    Phase(
        name="real_text",
        run=(f"{_HERE}.decoding.real_text", "run"),
        share=0.06,
        least_s=60.0,
        about="policies over text",
        needs="smollm2",
    ),
    Phase(
        name="lanes",
        run=(f"{_HERE}.lanes.lanes", "run"),
        share=0.12,
        least_s=25.0,
        about="processors divided: rates, places, company",
    ),
    Phase(
        name="overlap",
        run=(f"{_HERE}.lanes.overlap", "run"),
        share=0.26,
        least_s=60.0,
        about="drafting beside verification, by mode",
    ),
    Phase(
        name="arrivals",
        run=(f"{_HERE}.decoding.arrivals", "run"),
        share=0.12,
        least_s=60.0,
        about="each part of speculation under a trace",
        needs="trace",
    ),
    Phase(
        name="vllm",
        run=(f"{_HERE}.decoding.vllm_arm", "run"),
        share=0.05,
        least_s=75.0,
        about="the same work by vLLM",
        needs="vllm",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Phases of one call to a lent machine, in order, with about how long each takes there, which is a prediction.

    budget_s: of the whole call. More than the phases take: what is left over is for what takes longer.
    """

    about: str
    budget_s: float
    seconds: Mapping[str, float]


# Half an hour on a device: 22 minutes of phases, and three starts and transfers.
RUNS: Mapping[str, Run] = {
    "a": Run(
        about="whether it is right, how near to the floor, and how the device can be divided",
        budget_s=480.0,
        seconds={
            "environment": 20.0,
            "checks": 150.0,
            "plain": 70.0,
            "verify": 35.0,
            "draft": 30.0,
            "cycle": 40.0,
            "lanes": 60.0,
        },
    ),
    "b": Run(
        about="vLLM and FASER in turns, and the policies with what is left",
        budget_s=480.0,
        seconds={"environment": 15.0, "vllm": 260.0, "policies": 120.0},
    ),
    "c": Run(
        about="drafting beside verification, at the costs that run a measured",
        budget_s=360.0,
        seconds={"environment": 15.0, "overlap": 290.0},
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
