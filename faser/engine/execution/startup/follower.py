"""The process of a rank other than the first, which runs rank.py.

Run as `python -m faser.engine.execution.startup.follower LEVEL FORMAT [RANK SIZE MEETING PARENT]`: how it logs,
its place, the descriptor of the file where ranks meet, and the process that it ends with. Without a place torchrun
has given it one. It ends with its parent from the first moment, so it imports torch, which takes seconds, only
then.
"""

import logging
import os
import signal
import sys

from faser.errors import FaserError
from faser.logs import ENGINE, start_logging
from faser.processes import end_with_parent

_log = logging.getLogger("faser.engine")


def main() -> None:
    """Entry of the process. The front-end handles signals."""
    level, log_format, *given = sys.argv[1:]
    rank, size, meeting, parent = map(int, given) if given else (0, 0, 0, os.getppid())
    end_with_parent(parent)
    if given:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
    start_logging(level, log_format, ENGINE)
    from faser.config.environment import rank_place
    from faser.engine.execution.ranks.group import group_here, torchrun_group
    from faser.engine.execution.startup.rank import run

    if given:
        group = group_here(rank, size, meeting)
    else:
        place = rank_place()
        assert place is not None, "torchrun has not started this process"
        group = torchrun_group(place)
    try:
        run(group)
    except FaserError as error:
        _log.error("rank %d: %s", group.rank, error)
        sys.exit(1)
    os._exit(0)  # nothing to save


if __name__ == "__main__":
    main()
