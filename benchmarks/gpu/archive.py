"""One file with all results of a run so far, for a machine from which few files come back; and their merging.

Packed at every phase's end and every few seconds in between, under another name that then takes the archive's
place: a run that is killed at any moment leaves a whole one. Models and caches stay out. Archives of several runs
on one device become one folder of results, where every phase's file says on which device, with which versions and
of which commit it was measured. Of a phase that several runs have, the latest complete one counts, else the
latest.
"""

import io
import json
import tarfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.gpu.phases import PHASES
from benchmarks.gpu.record import Folder, Json, Record, record_of
from benchmarks.gpu.report import page, summary
from faser.files import replacing, write_atomically

MOST_BYTES = 16 << 20  # of a file that comes back
_PATTERNS = ("*.json", "*.md", "*.log", "*.svg", "*.trace.gz", "arrivals/*")
_MOST_LOG_BYTES = 200_000  # of each log: its end


def pack(folder: Path, archive: Path) -> None:
    """Everything of a results folder, as NAME/… where NAME is the archive's without .tar.gz.

    Raises ValueError for more than MOST_BYTES: nothing of it would come back.
    """
    name = archive.name.removesuffix(".tar.gz")
    archive.parent.mkdir(parents=True, exist_ok=True)
    with replacing(archive) as new:
        with tarfile.open(new, "w:gz", compresslevel=6) as packed:
            for path in files_of(folder):
                _add(packed, path, f"{name}/{path.relative_to(folder)}")
        new.chmod(0o644)
        if (size := new.stat().st_size) > MOST_BYTES:
            raise ValueError(f"{archive} would have {size} bytes; {MOST_BYTES} come back at most")


def files_of(folder: Path) -> list[Path]:
    found = {path for pattern in _PATTERNS for path in folder.glob(pattern)}
    return sorted(path for path in found if path.is_file() and not path.name.startswith("."))


def _add(packed: tarfile.TarFile, path: Path, name: str) -> None:
    content = path.read_bytes()
    if path.suffix == ".log":
        content = content[-_MOST_LOG_BYTES:]
    about = tarfile.TarInfo(name)
    about.size, about.mtime = len(content), int(path.stat().st_mtime)
    packed.addfile(about, io.BytesIO(content))


def read_records(archive: Path) -> tuple[Json, dict[str, Record]]:
    """Read run.json, empty where there is none, and the phases' records by name.

    Raises ValueError that names an archive which cannot be read.
    """
    about: Json = {}
    records: dict[str, Record] = {}
    try:
        with tarfile.open(archive, "r:gz") as packed:
            for member in packed.getmembers():
                path, file = Path(member.name), packed.extractfile(member)
                if file is None or len(path.parts) != 2 or path.suffix != ".json":
                    continue
                content = json.load(file)
                if path.name == "run.json":
                    about = content
                elif path.name != "summary.json":
                    records[path.stem] = record_of(content)
    except (OSError, EOFError, tarfile.TarError, ValueError, TypeError) as error:
        raise ValueError(f"{archive} cannot be read: {error}") from error
    return about, records


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
    given = records["environment"].result if "environment" in records else {}
    return {"run": run, **{name: given[name] for name in _ABOUT if name in given}}


def _rank(record: Record) -> tuple[bool, bool, float]:
    """A complete one before one that was stopped, before one that was skipped; the later one of equals."""
    return record.complete, record.skipped is None, record.saved_s
