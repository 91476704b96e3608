"""Records of a run: a JSON file a phase, written as soon as there is anything; and the processes of phases.

A phase whose file is complete is not run again. A run may be killed at any moment, and a process that outlives it
would keep the device's memory from the next run: so processes end with the one that started them, however that one
ends.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from faser.files import write_atomically

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_TICK_S = 5.0


def die_with_parent() -> None:
    """To be called in a new process: the kernel kills it when its parent's starting thread ends. Linux only."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def run_child(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    log: Path,
    timeout_s: float,
    tick: Callable[[], None] = lambda: None,
    folder: Path | None = None,
) -> int | None:
    """Run a program; its exit status, or None where it was killed, with all it started, after timeout_s.

    What it prints goes to log, which is written anew. tick: called every few seconds while it runs.
    """
    with log.open("wb") as out:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            cwd=folder,
            process_group=0,
            preexec_fn=die_with_parent,
        )
        try:
            return _wait(child, timeout_s, tick)
        finally:
            _kill_group(child)


def _wait(child: subprocess.Popen[bytes], timeout_s: float, tick: Callable[[], None]) -> int | None:
    ends_s = time.monotonic() + timeout_s
    while (left_s := ends_s - time.monotonic()) > 0:
        try:
            return child.wait(min(left_s, _TICK_S))
        except subprocess.TimeoutExpired:
            tick()
    return None


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    """The child, and what it started and left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def tail_of(log: Path, most_chars: int) -> str:
    """The end of what a program printed; empty where it printed nothing."""
    if not log.exists():
        return ""
    return log.read_text("utf-8", errors="replace").strip()[-most_chars:]


Json = dict[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Record of a phase. dry_run: on a CPU with tiny shapes, where no time means anything.

    complete: it came to its end. error: what stopped it. skipped: why it was not begun; neither: it runs, or its
    run was killed. left_out: what there was no time for. saved_s: Unix seconds when this was written.
    """

    phase: str
    dry_run: bool
    seconds: float = 0.0
    complete: bool = False
    error: str | None = None
    skipped: str | None = None
    saved_s: float = 0.0
    left_out: tuple[str, ...] = ()
    result: Json = field(default_factory=dict)

    @property
    def state(self) -> str:
        """In a word, or in a line that says why it is not complete."""
        if self.complete:
            return "complete"
        if self.skipped is not None:
            return f"SKIPPED: {self.skipped}"
        return f"FAILED: {(self.error or 'broken off').strip().splitlines()[-1]}"


class Folder:
    """Folder of the records of one run. Dry runs and others do not share one."""

    def __init__(self, path: Path, *, dry_run: bool) -> None:
        self.path = path
        self.dry_run = dry_run
        path.mkdir(parents=True, exist_ok=True)

    def load(self, phase: str) -> Record | None:
        """None where there is nothing. Raises ValueError for a record of the other kind of run."""
        file = self._file(phase)
        if not file.exists():
            return None
        record = record_of(json.loads(file.read_text("utf-8")))
        if record.dry_run is not self.dry_run:
            kinds = ("a dry run", "a run on a device")
            raise ValueError(
                f"{file} is of {kinds[not record.dry_run]}, this is {kinds[not self.dry_run]}; give another folder"
            )
        return record

    def save(self, record: Record) -> Record:
        """Save a record; return it with the time. A reader never sees half a record."""
        saved = replace(record, saved_s=round(time.time(), 3))
        self.write(self._file(record.phase).name, asdict(saved))
        return saved

    def write(self, name: str, content: Json) -> None:
        write_atomically(self.path / name, json.dumps(content, indent=1) + "\n")

    def discard(self, phase: str) -> None:
        """Discard what an earlier try left."""
        self._file(phase).unlink(missing_ok=True)

    def stopped(self, phase: str, error: str, seconds: float) -> Record:
        """Note that a phase ended from outside; what it had kept by then stays."""
        found = self.load(phase) or Record(phase=phase, dry_run=self.dry_run)
        return self.save(replace(found, complete=False, error=error, seconds=seconds))

    def skip(self, phase: str, reason: str) -> Record:
        """Note that a phase was not begun."""
        return self.save(Record(phase=phase, dry_run=self.dry_run, skipped=reason))

    def _file(self, phase: str) -> Path:
        return self.path / f"{phase}.json"


def record_of(content: Json) -> Record:
    """Make a record of what a phase's file has, ignoring anything else. Raises KeyError for what is missing."""
    known = {each.name: content[each.name] for each in fields(Record)}
    return Record(**(known | {"left_out": tuple(known["left_out"])}))


class Desk:
    """Desk of one phase: keeps its results, knows its time, says how far it is.

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
        """Return whether there is time; note what there is none for. needs_s: about how long it takes."""
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
        return self.folder.save(replace(self._record(), complete=error is None, error=error))

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
