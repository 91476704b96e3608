"""Finished answers in a file for `faser distill`.

RequestTraffic gathers the answers to one request and decides which may be kept; TrafficRecorder writes them.
"""

import errno
import fcntl
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

from faser.types.answer import FinishReason, OutputDelta
from faser.types.request import Request

_ENDED = (FinishReason.STOP, FinishReason.LENGTH)

_log = logging.getLogger("faser.traffic")
_MOST_WAITING = 1 << 21  # tokens to be written, 20 MiB at most; a disk takes as many in a second
_RETRY_S = 10.0  # between tries while a disk takes nothing
Outcome = Literal["recorded", "withheld", "dropped", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedAnswer:
    """One sample. ended_at: in Unix seconds."""

    request: Request
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None
    ended_at: int

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.token_ids)


class RequestTraffic:
    """The answers to one request, while they grow.

    Requests of clients that keep them apart, by a cache_salt or a key, are withheld, and so are those that say
    `store: false`. Answers of an adapter are too: drafters learn the model without one.
    """

    def __init__(self, request: Request, recorder: "TrafficRecorder | None") -> None:
        """recorder: None where no answer is recorded."""
        self._request = request
        self._recorder = recorder
        self._may_record = request.may_record and request.cache_salt is None and request.adapter is None
        self._token_ids: list[list[int]] = [[] for _ in range(request.sampling.n)]

    def add(self, delta: OutputDelta) -> None:
        """One step of one sample."""
        if self._recorder is None:
            return
        token_ids = self._token_ids[delta.index]
        if self._may_record:
            token_ids += delta.token_ids
        if delta.finish_reason not in _ENDED:
            return
        if not self._may_record:
            self._recorder.withhold()
        elif token_ids:
            self._recorder.put(
                FinishedAnswer(
                    request=self._request,
                    token_ids=tuple(token_ids),
                    finish_reason=delta.finish_reason,
                    stop_reason=delta.stop_reason,
                    ended_at=int(time.time()),
                )
            )


class TrafficRecorder:
    """Appends finished answers to a file, as JSON lines that `faser distill --from-traffic` reads.

    A line has the tokens of one sample and of its prompt:

        {"prompt_token_ids": [...], "answer_token_ids": [...], "temperature": 0.8, "finish_reason": "stop",
         "time": 5}

    time: of the end, in Unix seconds. "stop_reason" is there where a stop string or a token of stop_token_ids
    ended the sample; an answer without it that has finish_reason "stop" ends with the model's own end token.

    A thread writes. What it cannot take in time is dropped and counted: neither the event loop nor a step ever
    waits for the disk. A disk that is full interrupts the recording: the file is closed, and opened again for the
    first answer that ends _RETRY_S later or more. No other process records to the file. Use this object from one
    thread.

    count: called with what became of each finished sample; also called by the writing thread. now: the clock, in
    seconds. Raises OSError if the file cannot be opened, and BlockingIOError if another process records to it.
    """

    def __init__(
        self, path: Path, count: Callable[[Outcome], None], *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = path
        self._count = count
        self._now = now
        self._file: int | None = _open_private(path)  # None: the recording is interrupted
        self._retry_at_s = 0.0
        self._num_missed = 0  # since it is
        self._queue: SimpleQueue[FinishedAnswer | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0  # tokens
        self._thread = threading.Thread(target=self._write_all, name="faser-traffic", daemon=True)
        self._thread.start()

    def put(self, answer: FinishedAnswer) -> None:
        """Record an answer, or drop it if too many wait."""
        with self._lock:
            fits = self._waiting + answer.num_tokens <= _MOST_WAITING
            if fits:
                self._waiting += answer.num_tokens
        if fits:
            self._queue.put(answer)
        else:
            self._count("dropped")

    def withhold(self) -> None:
        """A sample has ended that must not be recorded."""
        self._count("withheld")

    def close(self, timeout_s: float) -> None:
        """Write what waits, for timeout_s at most. No answer may follow."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning("answers are not recorded: %s did not take them within %g s", self._path, timeout_s)

    def _write_all(self) -> None:
        while (answer := self._queue.get()) is not None:
            outcome: Outcome = "recorded" if self._record(_line(answer)) else "failed"
            with self._lock:
                self._waiting -= answer.num_tokens
            self._count(outcome)
        if self._file is not None:
            os.close(self._file)

    def _record(self, line: bytes) -> bool:
        """Write a line. False: the disk does not take it, and nothing of it is left in the file."""
        was_interrupted = self._file is None
        if was_interrupted and self._now() < self._retry_at_s:
            self._num_missed += 1
            return False
        try:
            if self._file is None:
                self._file = _open_private(self._path)  # the operator may have moved the old one away
            _append(self._file, line)
        except OSError as error:
            self._interrupt(error, is_new=not was_interrupted)
            return False
        if was_interrupted:
            _log.warning("answers are recorded again: %s; %d were not", self._path, self._num_missed)
            self._num_missed = 0
        return True

    def _interrupt(self, error: OSError, *, is_new: bool) -> None:
        """Close the file until the next try. Only the first of several tries that fail is logged."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._num_missed += 1
        self._retry_at_s = self._now() + _RETRY_S
        if is_new:
            _log.warning(
                "answers are not recorded: %s: %s; tried again every %g s", self._path, error.strerror, _RETRY_S
            )


def _append(file: int, line: bytes) -> None:
    """Write a whole line at the end. Raises OSError where it does not fit; then nothing of it is left."""
    end = os.fstat(file).st_size
    remaining = memoryview(line)
    try:
        while remaining:
            remaining = remaining[os.write(file, remaining) :]
    except OSError:
        with suppress(OSError):
            os.ftruncate(file, end)
        raise


def _line(answer: FinishedAnswer) -> bytes:
    record = {
        "prompt_token_ids": answer.request.prompt_token_ids,
        "answer_token_ids": answer.token_ids,
        "temperature": answer.request.sampling.temperature,
        "finish_reason": answer.finish_reason.value,
        "time": answer.ended_at,
    }
    if answer.stop_reason is not None:
        record["stop_reason"] = answer.stop_reason
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def _open_private(path: Path) -> int:
    """A regular file to append to, which only its owner can read, and whose last line is complete.

    A link is refused: who may write in the folder could have the prompts appended to any file of this user.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(error.errno, "it is a link; name the file itself") from None
        raise
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(0, "it is not a regular file")
        if found.st_nlink > 1:
            raise OSError(0, f"the file has {found.st_nlink} names; it must have one")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.fchmod(file, 0o600)
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            os.write(file, b"\n")
    except BaseException:
        os.close(file)
        raise
    return file
