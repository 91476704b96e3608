"""One file that holds all results of a run so far, for a machine from which few files come back.

Packed at every phase's end and every few seconds in between, under another name that then takes the archive's
place: a run that is killed at any moment leaves a whole one. Models and caches stay out.
"""

import io
import json
import tarfile
from pathlib import Path

from benchmarks.gpu.common.record import Json, Record, record_of
from faser.files import replacing

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
    """What run.json says, empty where there is none; and the phases' records by name.

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
