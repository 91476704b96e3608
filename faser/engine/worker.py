"""The engine's loop, in a child process or a thread: messages in, steps, deltas out.

Run by python_command with FD LEVEL FORMAT: the engine's end of the socket, and how it logs. The loop catches
exceptions once, at its top, and sends them to the front-end, which then fails every open request. When the
front-end closes the socket, the engine ends, also while it loads.
"""

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from queue import Empty, SimpleQueue

from faser.engine.adapter_loads import AdapterLoads, AdapterRead, LoadEnded
from faser.engine.contract.latency_model import Pace
from faser.engine.contract.messages import (
    Abort,
    AdapterLoaded,
    Configure,
    Deltas,
    DropAdapter,
    Failed,
    FromEngine,
    LoadAdapter,
    Loaded,
    Progress,
    Reclassify,
    Rejected,
    Shutdown,
    StateChange,
    Submit,
    ToEngine,
    WatchSteps,
    frame,
    receive,
)
from faser.engine.encoder_engine import StepLoop
from faser.engine.preparation import Preparation, Prepared
from faser.errors import ConfigError, FaserError, OverloadError, RequestError
from faser.logs import ENGINE, start_logging
from faser.optional import maybe
from faser.types.engine import EngineState
from faser.types.request import Request
from faser.types.statistics import EngineStats

_log = logging.getLogger("faser.engine")

_Inbox = SimpleQueue[ToEngine | Prepared | AdapterRead | None]

# An idle engine sends its statistics this often, so a longer silence means that it hangs.
HEARTBEAT_S = 2.0

# A busy one this often: counting takes as long as deciding about drafts for a step.
STATS_PERIOD_S = 0.1

# How often a busy one says how fast it is.
PACE_PERIOD_S = 1.0

# How long an engine that has to end while it loads may clean up; importing torch reports nothing for seconds.
# A compiler that does not end by itself takes one of them.
_LOADING_END_S = 2.0


class _LoadingStopped(Exception):
    """The front-end wants the engine no more, which is still loading."""


class StatsReport:
    """When an engine's statistics leave it: with the first step and with the last, and every STATS_PERIOD_S.

    now: the clock, in seconds. watched: they leave after every step.
    """

    def __init__(self, engine: StepLoop, now: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._now = now
        self._due_s = self._pace_due_s = now()
        self.watched = False

    def due(self) -> EngineStats | None:
        """After a step: what is to be sent; None: nothing yet."""
        now_s, works = self._now(), self._engine.has_work()
        if works and now_s < self._due_s and not self.watched:
            return None
        self._due_s = now_s + STATS_PERIOD_S if works else now_s
        return self._engine.stats()

    def due_pace(self) -> Pace | None:
        """The same of the engine's pace; None: nothing yet, or it has none."""
        if (now_s := self._now()) < self._pace_due_s:
            return None
        self._pace_due_s = now_s + PACE_PERIOD_S
        return self._engine.pace()


def serve(connection: socket.socket, *, own_process: bool) -> None:
    """Load what the first message names, then run until a Shutdown or until the front-end closes the socket.

    own_process: the interpreter runs nothing but the engine, so the garbage collector may be tuned.
    """
    with contextlib.suppress(ConnectionError, _LoadingStopped):
        try:
            _serve(connection, own_process)
        except ConfigError as error:
            connection.sendall(frame(Failed(str(error), operator_error=True)))
        except (ConnectionError, _LoadingStopped):
            raise
        except BaseException as error:
            _log.exception("the engine failed")
            connection.sendall(frame(Failed(words_for_clients(error), operator_error=False)))
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # wakes the inbox thread


def words_for_clients(error: BaseException) -> str:
    """Describe an error for clients. Texts of libraries may name files of this machine: the log has them."""
    return str(error) if isinstance(error, FaserError) else f"{type(error).__name__}; the log has the details"


def _serve(connection: socket.socket, own_process: bool) -> None:
    inbox: _Inbox = SimpleQueue()
    told_to_end, loaded = threading.Event(), threading.Event()
    threading.Thread(
        target=_read_all, args=(connection, inbox, told_to_end), name="faser-inbox", daemon=True
    ).start()
    if own_process:
        threading.Thread(target=_end_loading, args=(told_to_end, loaded), name="faser-end", daemon=True).start()
        import_module("faser.engine.build")  # takes seconds, in which the front-end gets ready to configure it
    first = inbox.get()
    if not isinstance(first, Configure):
        return
    engine = _load(connection, first, told_to_end)
    loaded.set()
    _send(connection, StateChange(EngineState.READY))
    if own_process:
        _freeze_garbage()
    preparation = Preparation(engine.prepare, inbox.put)
    loads = AdapterLoads(engine, inbox.put, max_loaded=first.config.num_cpu_loras)
    stats = StatsReport(engine)
    try:
        while _take_messages(engine, inbox, preparation, loads, stats, connection):
            deltas = engine.step()
            for request, late in loads.rest():
                _reject(connection, request, late)
            newest, pace = maybe(loads.add_to, stats.due()), stats.due_pace()
            uncomputed = {} if pace is None else engine.uncomputed_prompts()
            _send(connection, Deltas(deltas, newest, pace, uncomputed))
    finally:
        preparation.close()
        loads.close()
        engine.close()


def _load(connection: socket.socket, configure: Configure, told_to_end: threading.Event) -> StepLoop:
    """Raises _LoadingStopped soon after told_to_end is set; downloads and compilers end with it."""
    from faser.engine.build import build_served  # torch is imported here, after the socket is served

    def report(stage: str, done: int, total: int) -> None:
        if told_to_end.is_set():
            raise _LoadingStopped
        try:
            _send(connection, Progress(stage, done, total))
        except ConnectionError:
            raise _LoadingStopped from None

    engine, info = build_served(configure.config, Path(configure.directory), report)
    _send(connection, Loaded(info))
    return engine


def _take_messages(
    engine: StepLoop,
    inbox: _Inbox,
    preparation: Preparation,
    loads: AdapterLoads,
    stats: StatsReport,
    connection: socket.socket,
) -> bool:
    """Apply all messages that have arrived; without work, wait for one. False: the engine is to end.

    Returns after an abort too, even if no work is left, so that the freed blocks are reported; and after
    HEARTBEAT_S without a message.
    """
    block = not engine.has_work()
    wait_s = engine.idle_wait_s() if block else None
    timeout_s = HEARTBEAT_S if wait_s is None else min(wait_s, HEARTBEAT_S)
    while True:
        try:
            message = inbox.get(block=block, timeout=timeout_s)
        except Empty:
            return True
        match message:
            case Submit(request) if request.sampling.structured_output is not None:
                preparation.begin(request)
            case Submit(request):
                if not loads.holds(request):
                    _add(engine, request, (), connection)
            case Prepared(request, error):
                aborts = preparation.end(request)
                if error is not None:
                    _reject(connection, request, error)
                elif all(abort.index is not None for abort in aborts) and not loads.holds(request, aborts):
                    _add(engine, request, aborts, connection)
            case AdapterRead() as read:
                _end_load(engine, loads.ended(read), connection)
            case LoadAdapter(adapter) if loads.load(adapter):
                _send(connection, AdapterLoaded(adapter.digest, None))
            case LoadAdapter():
                pass  # until it is read
            case DropAdapter(digest):
                loads.drop(digest)
            case Reclassify(request) if not loads.reclassify(request):
                engine.reclassify(request)
            case Reclassify():
                pass  # it waits for its adapter
            case Abort(request_id, index) if not (preparation.abort(message) or loads.abort(message)):
                engine.abort(request_id, index)
            case Abort():
                pass  # until it is prepared
            case WatchSteps(watched):
                stats.watched = watched
            case Shutdown() | None:
                return False
            case Configure():
                raise AssertionError("an engine is configured once")
        block = False


def _add(engine: StepLoop, request: Request, aborts: Iterable[Abort], connection: socket.socket) -> None:
    """Add a request but for those of its samples that have been aborted meanwhile."""
    try:
        engine.add(request)
    except RequestError as error:
        _reject(connection, request, error)
    for abort in aborts:
        engine.abort(abort.request_id, abort.index)


def _end_load(engine: StepLoop, ended: LoadEnded, connection: socket.socket) -> None:
    """An adapter is in memory, or cannot be: add the requests that waited for it, or reject them."""
    if ended.answers:
        _send(connection, AdapterLoaded(ended.adapter.digest, maybe(str, ended.error)))
    for each in ended.held:
        if ended.error is None:
            _add(engine, each.request, each.aborts, connection)
        else:
            _reject(connection, each.request, ended.error)


def _reject(connection: socket.socket, request: Request, error: RequestError | OverloadError) -> None:
    param = error.param if isinstance(error, RequestError) else None
    retry_after_s = error.retry_after_s if isinstance(error, OverloadError) else None
    _send(connection, Rejected(request.request_id, str(error), param, retry_after_s))


def _end_loading(told_to_end: threading.Event, loaded: threading.Event) -> None:
    """End this process if it has to end while it loads, and does not."""
    told_to_end.wait()
    if not loaded.wait(_LOADING_END_S):
        os._exit(0)


def _read_all(connection: socket.socket, inbox: _Inbox, told_to_end: threading.Event) -> None:
    while (message := receive(connection)) is not None:
        if isinstance(message, Shutdown):
            told_to_end.set()
        inbox.put(message)
    told_to_end.set()
    inbox.put(None)


def _send(connection: socket.socket, message: FromEngine) -> None:
    connection.sendall(frame(message))


def _freeze_garbage() -> None:
    """Exempt the hundreds of thousands of objects that loading leaves from every later full collection."""
    gc.collect()
    gc.freeze()
    gc.enable()


def main() -> None:
    """Entry of the child process. The front-end handles signals."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which compilers and downloads would inherit
    gc.disable()  # until the engine is loaded: imports make objects that stay
    start_logging(sys.argv[2], sys.argv[3], ENGINE)
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        serve(connection, own_process=True)
    sys.stderr.flush()
    os._exit(0)  # nothing to save; interpreter shutdown would wait for the inbox thread


if __name__ == "__main__":
    main()
