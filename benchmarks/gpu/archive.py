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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.gpu.phases import PHASES
from benchmarks.gpu.record import Folder, Json, Record, record_of
from benchmarks.gpu.report import page, summary
from faser.files import replacing, write_atomically

MOST_BYTES = 16 << 20  # of a file that comes back
_PATTERNS = ("*.json", "*.md", "*.log", "*.svg", "*.trace.gz")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Filed:
    """A phase's record, and on which device, with which versions and of which commit it was measured."""

    record: Record
    about: Json


def read_records(source: Path) -> dict[str, Filed]:
    """Read the phases of an archive, of a run's folder, or of a folder of results that `merge` has written.

    Raises ValueError that names what cannot be read.
    """
    run: Json = {}
    records: dict[str, Record] = {}
    own: dict[str, Json] = {}
    try:
        for name, content in _json_files(source):
            if name == "run":
                run = content
            elif name != "summary":
                records[name] = record_of(content)
                own[name] = {each: content[each] for each in ("run", *_ABOUT) if each in content}
    except (OSError, EOFError, tarfile.TarError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{source} cannot be read: {error}") from error
    given = records["environment"].result if "environment" in records else {}
    about = {"run": run, **{each: given[each] for each in _ABOUT if each in given}}
    return {name: Filed(record=each, about=own[name] or about) for name, each in records.items()}


def _json_files(source: Path) -> Iterator[tuple[str, Json]]:
    """Content by name, without .json, of those that lie directly in it."""
    if source.is_dir():
        for path in sorted(source.glob("*.json")):
            yield path.stem, json.loads(path.read_text("utf-8"))
        return
    with tarfile.open(source, "r:gz") as packed:
        for member in packed.getmembers():
            path, file = Path(member.name), packed.extractfile(member)
            if file is not None and len(path.parts) == 2 and path.suffix == ".json":
                yield path.stem, json.load(file)


_ABOUT = ("device", "versions", "commit", "system")


def merge(sources: Sequence[Path], out: Path, *, dry_run: bool = False) -> list[Record]:
    """Write PHASE.json, summary.json and report.md. Returns the records, in the phases' order.

    Raises ValueError for a source that cannot be read, has no results, is a dry run where others were wanted, or
    comes from another device than the rest.
    """
    found: dict[str, Filed] = {}
    names: set[str] = set()
    for source in sources:
        filed = read_records(source)
        if not filed:
            raise ValueError(f"{source} holds no results")
        for name, each in filed.items():
            if each.record.dry_run is not dry_run:
                raise ValueError(f"{source} is {'a dry run' if each.record.dry_run else 'a run on a device'}")
            names.add(str(each.about.get("device", {}).get("name", "unknown")))
            if len(names) > 1:
                raise ValueError(f"{source} is of another device than those before it: {sorted(names)}")
            if name not in found or _rank(each.record) > _rank(found[name].record):
                found[name] = each
    merged = [found[phase.name] for phase in PHASES if phase.name in found]
    records = [each.record for each in merged]
    folder = Folder(out, dry_run=dry_run)
    for each in merged:
        folder.write(f"{each.record.phase}.json", {**each.about, **asdict(each.record)})
    folder.write("summary.json", summary(records, dry_run))
    write_atomically(out / "report.md", page(records, dry_run))
    return records


def _rank(record: Record) -> tuple[bool, bool, float]:
    """A complete one before one that was stopped, before one that was skipped; the later one of equals."""
    return record.complete, record.skipped is None, record.saved_s
