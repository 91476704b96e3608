"""Checks and measures FASER on a CUDA device, in one run of a few minutes.

    python -m benchmarks.gpu OUT [--phases checks,plain] [--budget-s 560] [--smollm2 DIR] [--prompts FILE]
        [--trace CSV] [--vllm DIR] [--dry-run]

OUT gets a JSON file a phase, summary.json and report.md. A phase whose file is complete is skipped, so a run that
was broken off goes on where it was; one that failed is tried again. --dry-run runs every phase with tiny models on
the CPU; nothing that it writes says anything of a device. See benchmarks/gpu/README.md.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

from benchmarks.gpu.common.plan import Plan
from benchmarks.gpu.common.record import Folder, Record
from benchmarks.gpu.phases import PHASES, Phase, phases_named, phases_of, run_all, run_here, run_overlapped
from benchmarks.gpu.report import page, summary


def main(arguments: list[str]) -> int:
    """1 if a phase failed or a check did not hold."""
    asked = parser().parse_args(arguments)
    plan = plan_of(asked)
    try:
        phases = phases_of(plan, [each for each in asked.phases.split(",") if each])
        folder = Folder(plan.out, dry_run=plan.dry_run)
        if asked.only_phase is not None:
            (phase,) = phases_named([asked.only_phase])
            return 0 if run_here(plan, phase, asked.phase_s, _say).complete else 1
        launch = partial(_launch, plan, arguments)
        records = run_all(phases, folder, asked.budget_s, launch, _say)
    except ValueError as error:
        sys.exit(str(error))
    there = [found for phase in PHASES if (found := folder.load(phase.name)) is not None]
    folder.write("summary.json", summary(there, plan.dry_run))
    text = page(there, plan.dry_run)
    (plan.out / "report.md").write_text(text, "utf-8")
    print(text, flush=True)
    return 0 if all(record.complete for record in records) and not failed_checks(records) else 1


def failed_checks(records: list[Record]) -> list[str]:
    return [
        check["check"] for record in records for check in record.result.get("checks", []) if check["ok"] is False
    ]


def plan_of(asked: argparse.Namespace) -> Plan:
    return Plan(
        out=asked.out,
        dry_run=asked.dry_run,
        smollm2=asked.smollm2,
        prompts=asked.prompts,
        vllm=asked.vllm,
        trace=asked.trace,
    )


def _launch(plan: Plan, arguments: list[str], phase: Phase, budget_s: float) -> Record:
    return run_overlapped(plan, phase, budget_s, arguments)


def _say(text: str) -> None:
    print(text, flush=True)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("out", type=Path, metavar="OUT", help="folder of the results")
    add("--phases", default="", help="some of them, by name, with commas between [all]")
    add("--budget-s", type=float, default=560.0, help="seconds that the run should take [560]")
    add("--smollm2", type=Path, metavar="DIR", help="checkpoint of SmolLM2-135M-Instruct, for real text")
    add("--prompts", type=Path, metavar="FILE", help="questions, as of Spec-Bench [built-in ones]")
    add("--trace", type=Path, metavar="CSV", help="an Azure LLM inference trace, for arrivals")
    add("--vllm", type=Path, metavar="DIR", help="folder to import vLLM from")
    add("--dry-run", action="store_true", help="tiny models on the CPU, to see that everything runs")
    add("--only-phase", help=argparse.SUPPRESS)  # of a process that runs one phase for another one
    add("--phase-s", type=float, default=60.0, help=argparse.SUPPRESS)
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
