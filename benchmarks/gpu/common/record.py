"""What is kept of a run: a JSON file a phase, written as soon as there is anything to keep.

A phase whose file is complete is not run again. Knows no phase by what it measures.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

Json = dict[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What came of a phase. dry_run: on a CPU with tiny shapes, where no time means anything.

    complete: it came to its end. error: what stopped it. left_out: what there was no time for.
    """

    phase: str
    dry_run: bool
    seconds: float = 0.0
    complete: bool = False
    error: str | None = None
    left_out: tuple[str, ...] = ()
    result: Json = field(default_factory=dict)


class Folder:
    """Where the records of one run lie. Dry runs and others do not share one."""

    def __init__(self, path: Path, *, dry_run: bool) -> None:
        self.path = path
        self.dry_run = dry_run
        path.mkdir(parents=True, exist_ok=True)

    def load(self, phase: str) -> Record | None:
        """None where there is nothing. Raises ValueError for a record of the other kind of run."""
        file = self._file(phase)
        if not file.exists():
            return None
        content = json.loads(file.read_text("utf-8"))
        record = Record(**(content | {"left_out": tuple(content["left_out"])}))
        if record.dry_run is not self.dry_run:
            kinds = ("a dry run", "a run on a device")
            raise ValueError(
                f"{file} is of {kinds[not record.dry_run]}, this is {kinds[not self.dry_run]}; give another folder"
            )
        return record

    def save(self, record: Record) -> None:
        """A reader never sees half a record."""
        self.write(self._file(record.phase).name, asdict(record))

    def write(self, name: str, content: Json) -> None:
        beside = self.path / f"{name}.tmp"
        beside.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
        beside.replace(self.path / name)

    def discard(self, phase: str) -> None:
        """What an earlier try left is of no use."""
        self._file(phase).unlink(missing_ok=True)

    def stopped(self, phase: str, error: str, seconds: float) -> Record:
        """Note that a phase ended from outside; what it had kept by then stays."""
        found = self.load(phase) or Record(phase=phase, dry_run=self.dry_run)
        record = replace(found, complete=False, error=error, seconds=seconds)
        self.save(record)
        return record

    def _file(self, phase: str) -> Path:
        return self.path / f"{phase}.json"


class Desk:
    """Where one phase works: keeps its results, knows its time, says how far it is.

    budget_s: after that, `may_begin` refuses what is new. now: seconds of a clock.
    """

    def __init__(
        self, folder: Folder, phase: str, budget_s: float, say: Say, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self.folder = folder
        self._phase = phase
        self._budget_s = budget_s
        self._say = say
        self._now = now
        self._began_s = now()
        self._left_out: list[str] = []
        self.result: Json = {}

    @property
    def left_s(self) -> float:
        return self._budget_s - self._spent_s

    def say(self, text: str) -> None:
        self._say(f"[{self._phase} {self._spent_s:5.1f} s] {text}")

    def may_begin(self, what: str, *, needs_s: float = 0.0) -> bool:
        """Whether there is time; what there is none for is noted. needs_s: about how long it takes."""
        if self.left_s > needs_s:
            self.say(what)
            return True
        self._left_out.append(what)
        self.say(f"no time for {what}")
        return False

    def keep(self, name: str, value: Any) -> None:
        """value: of JSON, whole or so far."""
        self.result[name] = value
        self.folder.save(self._record())

    def append(self, name: str, row: Json) -> None:
        self.keep(name, [*self.result.get(name, []), row])

    def finish(self, error: str | None = None) -> Record:
        record = replace(self._record(), complete=error is None, error=error)
        self.folder.save(record)
        return record

    @property
    def _spent_s(self) -> float:
        return self._now() - self._began_s

    def _record(self) -> Record:
        return Record(
            phase=self._phase,
            dry_run=self.folder.dry_run,
            seconds=round(self._spent_s, 2),
            left_out=tuple(self._left_out),
            result=self.result,
        )
