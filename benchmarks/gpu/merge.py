"""Joins the archives of several runs on one device into a folder of results.

Every phase gets a file that says for itself on which device, with which versions and of which commit it was
measured. Of a phase that several runs have, the latest complete one counts, else the latest.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.gpu.archive import read_records
from benchmarks.gpu.common.record import Folder, Json, Record
from benchmarks.gpu.phases import PHASES
from benchmarks.gpu.report import page, summary
from faser.files import write_atomically

_ABOUT = ("device", "versions", "commit", "system")


def merge(archives: Sequence[Path], out: Path, *, dry_run: bool = False) -> list[Record]:
    """Write PHASE.json, summary.json and report.md. Returns the records, in the phases' order.

    Raises ValueError for an archive that cannot be read, has no results, is a dry run where others were wanted, or
    comes from another device than the rest.
    """
    found: dict[str, Record] = {}
    about: dict[str, Json] = {}
    names: set[str] = set()
    for archive in archives:
        run, records = read_records(archive)
        if not records:
            raise ValueError(f"{archive} holds no results")
        for record in records.values():
            if record.dry_run is not dry_run:
                raise ValueError(f"{archive} is {'a dry run' if record.dry_run else 'a run on a device'}")
        place = _about(run, records)
        names.add(str(place.get("device", {}).get("name", "unknown")))
        if len(names) > 1:
            raise ValueError(f"{archive} is of another device than the archives before it: {sorted(names)}")
        for name, record in records.items():
            if name not in found or _rank(record) > _rank(found[name]):
                found[name], about[name] = record, place
    merged = [found[phase.name] for phase in PHASES if phase.name in found]
    folder = Folder(out, dry_run=dry_run)
    for record in merged:
        folder.write(f"{record.phase}.json", {**about[record.phase], **asdict(record)})
    folder.write("summary.json", summary(merged, dry_run))
    write_atomically(out / "report.md", page(merged, dry_run))
    return merged


def _about(run: Json, records: dict[str, Record]) -> Json:
    told = records["environment"].result if "environment" in records else {}
    return {"run": run, **{name: told[name] for name in _ABOUT if name in told}}


def _rank(record: Record) -> tuple[bool, bool, float]:
    """A complete one before one that was stopped, before one that was skipped; the later one of equals."""
    return record.complete, record.skipped is None, record.saved_s
