"""A rank other than the first: loads its part of the target, then does what rank 0's runner does.

Run as `python -m faser.engine.execution.startup.follower LEVEL FORMAT [RANK SIZE PORT PARENT]`: how it logs, its
place, where rank 0 keeps the store, and the process that it ends with. Without a place torchrun has given it one.
"""

import logging
import os
import signal
import sys
from pathlib import Path

import torch

from faser.config.environment import rank_place
from faser.engine.contract.messages import Configure, from_text
from faser.engine.execution.ranks.group import RankGroup, meeting_place, torchrun_group
from faser.engine.execution.ranks.relay import follow
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.startup.executor import engine_backend
from faser.engine.execution.startup.files import target_files
from faser.engine.execution.startup.leader import BLOCKS, CONFIGURE, loaded
from faser.engine.execution.startup.models import LoadedModel, load_model
from faser.errors import FaserError
from faser.kernels.interface.kv_cache import KvShape
from faser.logs import ENGINE, start_logging
from faser.processes import end_with_parent

_log = logging.getLogger("faser.engine")


def run(group: RankGroup) -> None:
    """Until rank 0 ends, or the group breaks. Raises FaserError for what cannot be loaded."""
    configure = from_text(group.find(CONFIGURE))
    try:
        target = _load(configure, group)
    except FaserError as error:
        group.leave(loaded(group.rank), str(error))
        raise
    group.leave(loaded(group.rank), "")
    num_blocks = int(group.find(BLOCKS))
    kv = KvShape(
        heads=target.decoder.spec.kv_heads,
        num_blocks=num_blocks,
        block_size=configure.config.block_size,
        dtype=target.files.kv_dtype,
    )
    runner = Runner(target.decoder, target.backend, kv)
    group.connect()
    _log.info("rank %d of %d has %d MB of weights", group.rank, group.size, target.weight_bytes // 10**6)
    follow(runner, group)


def _load(configure: Configure, group: RankGroup) -> LoadedModel:
    config, directory = configure.config, Path(configure.directory)
    torch.set_num_threads(config.threads)

    def ignore(_stage: str, _done: int, _total: int) -> None: ...

    files, backend = target_files(config, directory), engine_backend(config, ignore)
    return load_model(config, files, backend, ignore, group=group)


def main() -> None:
    """Entry of the process. The front-end handles signals."""
    level, log_format, *given = sys.argv[1:]
    start_logging(level, log_format, ENGINE)
    if given:
        rank, size, port, parent = map(int, given)
        end_with_parent(parent)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        group = RankGroup(rank, size, meeting_place(rank, size, port))
    else:
        place = rank_place()
        assert place is not None, "torchrun has not started this process"
        end_with_parent(os.getppid())
        group = torchrun_group(place)
    try:
        run(group)
    except FaserError as error:
        _log.error("rank %d: %s", group.rank, error)
        sys.exit(1)
    os._exit(0)  # nothing to save


if __name__ == "__main__":
    main()
