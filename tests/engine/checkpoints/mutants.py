"""Loads damaged models in another process, which they may end or hang (load_mutants.py)."""

import json
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

_MOST_WAITED_S = 300.0  # the process ends itself much sooner, unless it waits for something


class MutantLoader:
    """A process that loads models, one after the other; another one takes its place when it has ended."""

    def __init__(self, folder: Path) -> None:
        """folder: for what the process writes to standard error."""
        self._errors = (folder / "errors.txt").open("a+")
        self._process = self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _start(self) -> subprocess.Popen[str]:
        program = [sys.executable, "-m", "tests.engine.checkpoints.load_mutants"]
        return subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )

    def outcome(self, path: Path, *, tokenizer: bool = False) -> tuple[str, str]:
        """refused, answered, escaped (an exception of another kind) or died; and a message."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"path": str(path), "tokenizer": tokenizer}) + "\n")
        process.stdin.flush()
        timer = threading.Timer(_MOST_WAITED_S, process.kill)
        timer.daemon = True
        timer.start()
        line = process.stdout.readline()
        timer.cancel()
        if line:
            kind, message = json.loads(line)
            return kind, message
        ended = -process.wait()
        process.communicate()
        self._process = self._start()
        return "died", signal.Signals(ended).name if ended > 0 else f"exit status {-ended}"

    def outcomes(self, mutants: Iterable[Callable[[], Path]], *, tokenizer: bool = False) -> Counter[str]:
        """How many mutants were refused, and how many answered. mutants: each writes a model and says where.

        Fails where one has ended the process, or raised something other than ConfigError.
        """
        counts: Counter[str] = Counter()
        failures = []
        for number, write in enumerate(mutants):
            kind, message = self.outcome(write(), tokenizer=tokenizer)
            counts[kind] += 1
            if kind not in ("refused", "answered"):
                failures.append(f"mutant {number}: {kind}: {message}")
        assert not failures, "\n".join(failures)
        return counts
