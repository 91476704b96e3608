"""Checks and measures FASER on a CUDA device, in runs of a few minutes.

    python -m benchmarks.gpu run OUT --run a --archive FILE.tar.gz
    python -m benchmarks.gpu run OUT [--phases checks,plain] [--vllm DIR] [--dry-run]
    python -m benchmarks.gpu report OUT|ARCHIVE... -o FOLDER [--picture SVG]

See benchmarks/gpu/README.md.
"""

import argparse
import importlib
import json
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.gpu.archive import merge, pack
from benchmarks.gpu.phases import (
    PHASES,
    RUNS,
    Phase,
    phases_named,
    phases_of_run,
    run_all,
    run_apart,
    run_here,
    with_work,
)
from benchmarks.gpu.picture import picture
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.record import Folder, Record
from benchmarks.gpu.report import page, predictions, summary
from benchmarks.runner import command_line
from faser.files import write_atomically


def main(arguments: list[str]) -> int:
    """1 if a phase failed or was skipped, or a check did not hold or was not made."""
    asked = parser().parse_args(arguments)
    try:
        if asked.command == "report":
            return _report(asked)
        return _run(asked, arguments)
    except ValueError as error:
        sys.exit(str(error))


def _run(asked: argparse.Namespace, arguments: list[str]) -> int:
    """Raises ValueError for phases that there are not, and for a folder of the other kind of run."""
    plan = plan_of(asked)
    if asked.only_phase is not None:
        (phase,) = (each for each in phases_asked(asked) if each.name == asked.only_phase)
        plan = plan if plan.dry_run else replace(plan, memory_bytes=device_bytes())
        return 0 if run_here(plan, phase, asked.phase_s, _say).complete else 1
    phases = with_work(plan, phases_asked(asked))
    folder = Folder(plan.out, dry_run=plan.dry_run)
    _describe_run(folder, asked, arguments)
    keep = partial(_keep, folder, PHASES if asked.phases_of is None else phases, asked.archive)
    keep()  # there is an archive from the first moment on
    records = run_all(
        phases,
        folder,
        asked.budget_s,
        lambda phase, budget_s: run_apart(plan, phase, budget_s, arguments, keep),
        _say,
        keep=keep,
    )
    print((plan.out / "report.md").read_text("utf-8"), flush=True)
    return 1 if failed_checks(records) or not all(record.complete for record in records) else 0


def device_bytes() -> int:
    """Memory of the device. For a phase's process: the one that waits for it must hold none of the device."""
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory)


def phases_asked(asked: argparse.Namespace) -> tuple[Phase, ...]:
    """Raises ValueError for a phase that there is not, and for phases of a run that has its own."""
    names = [each for each in asked.phases.split(",") if each]
    if asked.phases_of is not None:
        found: tuple[Phase, ...] = importlib.import_module(asked.phases_of).PHASES
        return found
    if asked.run is None:
        return phases_named(names)
    if names:
        raise ValueError("--run names the phases already; give --phases or --run")
    return phases_of_run(RUNS[asked.run])


def failed_checks(records: list[Record]) -> list[str]:
    """Those that do not hold or were not checked, but for those that this machine cannot check."""
    return [
        check["check"]
        for record in records
        for check in record.result.get("checks", [])
        if check["ok"] is not True and "skipped" not in check
    ]


def plan_of(asked: argparse.Namespace) -> Plan:
    return Plan(
        out=asked.out,
        dry_run=asked.dry_run,
        vllm=asked.vllm,
        commit=asked.commit,
    )


def _describe_run(folder: Folder, asked: argparse.Namespace, arguments: list[str]) -> None:
    folder.write(
        "run.json",
        {
            "run": asked.run,
            "command": f"python -m benchmarks.gpu {' '.join(arguments)}",
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "budget_s": asked.budget_s,
        },
    )


def _keep(folder: Folder, phases: tuple[Phase, ...], archive: Path | None) -> None:
    """The page, the summary and the archive of all that there is."""
    there = [found for phase in phases if (found := folder.load(phase.name)) is not None]
    folder.write("summary.json", summary(there, folder.dry_run))
    write_atomically(folder.path / "report.md", page(there, folder.dry_run))
    if archive is not None:
        try:
            pack(folder.path, archive)
        except ValueError as error:  # the archive before this one stays, and the run goes on
            _say(str(error))


def _report(asked: argparse.Namespace) -> int:
    """Raises ValueError for results that do not belong together."""
    records = merge(asked.sources, asked.out, dry_run=asked.dry_run)
    for record in records:
        print(f"{record.phase}: {record.state}, {record.seconds:.0f} s")
    judged = predictions({record.phase: record.result for record in records})
    for row in judged:
        if row[""]:
            print(
                f"MISSED: {row['phase']}, {row['cell']}: {row['measured']} where {row['predicted']} was predicted"
            )
    print(f"{sum(not row[''] for row in judged)} of {len(judged)} predictions held")
    if asked.picture is not None:
        drawn = picture(records)
        if drawn is None:
            raise ValueError("neither decoding nor policies were measured: there is nothing to draw")
        asked.picture.write_text(drawn, "utf-8")
    print(json.dumps({"folder": str(asked.out)}))
    return 0


def _say(text: str) -> None:
    print(text, flush=True)


def parser() -> argparse.ArgumentParser:
    made = command_line(__doc__)
    commands = made.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure, into a folder")
    add = run.add_argument
    add("out", type=Path, metavar="OUT", help="folder of the results")
    add("--run", choices=tuple(RUNS), help="phases of one call, with their shares of its time")
    add("--phases", default="", help="some of them, by name, with commas between [all]")
    add("--budget-s", type=float, default=480.0, help="seconds after which nothing runs any more [480]")
    add("--archive", type=Path, metavar="FILE", help="pack all results there, at every phase's end [not packed]")
    add("--vllm", type=Path, metavar="DIR", help="folder to import vLLM from")
    add("--commit", metavar="TEXT", help="of this checkout [what git says]")
    add("--dry-run", action="store_true", help="tiny models on the CPU, to see that everything runs")
    add("--phases-of", help=argparse.SUPPRESS)  # a module with other PHASES, to rehearse how runs end
    add("--only-phase", help=argparse.SUPPRESS)  # of a process that runs one phase for another one
    add("--phase-s", type=float, default=60.0, help=argparse.SUPPRESS)
    told = commands.add_parser("report", help="join the results of several runs, and say which predictions missed")
    told.add_argument("sources", type=Path, nargs="+", metavar="OUT|ARCHIVE")
    told.add_argument("-o", "--out", type=Path, required=True, metavar="FOLDER")
    told.add_argument("--picture", type=Path, metavar="SVG", help="draw decoding and policies there")
    told.add_argument("--dry-run", action="store_true", help="results of dry runs are wanted")
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
