"""The learner's process: tasks in, a trained head after the other, and what became of it.

Run as `python -m faser.distill.online_worker FD PARENT LEVEL FORMAT`: its end of the socket, the process that it
ends with, and how it logs. Says Started before it loads anything, since it may be stopped from then on. It
computes when nothing else does, and ends with its parent: Linux alone has SCHED_IDLE, prctl and /proc.
"""

import contextlib
import os
import socket
import sys
from pathlib import Path

from faser.engine.contract.messages import Configure, Learn, Started, Unable, frame, receive_task
from faser.errors import FaserError
from faser.logs import ENGINE, start_logging
from faser.processes import end_with_parent

_OOM_SCORE = Path("/proc/self/oom_score_adj")
_FIRST_TO_GO = "1000"  # where memory runs out, the kernel ends this process before any other


def serve(connection: socket.socket) -> int:
    """Do what is asked until the front-end closes the socket. Returns the exit status."""
    connection.sendall(frame(Started()))
    configure = receive_task(connection)
    try:
        if isinstance(configure, Configure):
            _learn_all(connection, configure)
    except FaserError as error:
        connection.sendall(frame(Unable(str(error))))
        return 1
    return 0


def _learn_all(connection: socket.socket, configure: Configure) -> None:
    learner = None
    while isinstance(task := receive_task(connection), Learn):
        if learner is None:
            from faser.distill.online_learner import load_learner  # imports torch, once there is something to do

            learner = load_learner(configure.config, Path(configure.directory))
        connection.sendall(frame(learner.learn(task)))


def stay_behind() -> None:
    """Take processor time that nothing else wants, and give memory back first."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError):  # a container without /proc of its own
        _OOM_SCORE.write_text(_FIRST_TO_GO)


def main() -> None:
    """Entry of the child process."""
    end_with_parent(int(sys.argv[2]))
    stay_behind()
    start_logging(sys.argv[3], sys.argv[4], ENGINE)
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        status = serve(connection)
    sys.exit(status)


if __name__ == "__main__":
    main()
