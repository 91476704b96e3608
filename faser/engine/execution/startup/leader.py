"""Ranks: rank 0's side of a model that several processes hold. Starts the others, and ends them.

Under torchrun the others are started by that, on this machine or on others, and end with it.
"""

import contextlib
import logging
import os
import subprocess
import time
from pathlib import Path

from faser.config.engine import EngineConfig
from faser.config.environment import child_environment, rank_place
from faser.engine.contract.messages import Configure, to_text
from faser.engine.execution.ranks.group import RankGroup, meeting_place, torchrun_group
from faser.engine.execution.ranks.relay import LeadingRunner
from faser.errors import ConfigError, EngineError
from faser.logs import log_format
from faser.processes import python_command

FOLLOWER = "faser.engine.execution.startup.follower"
CONFIGURE, BLOCKS = "configure", "blocks"  # what rank 0 leaves for the others
_END_S = 2.0  # for a rank to end by itself
_NOTICE_S = 0.5  # until the system says that a process has ended whose connection has broken


def loaded(rank: int) -> str:
    """What this rank leaves when it has its part of the model: nothing, or what is wrong."""
    return f"loaded/{rank}"


class Ranks:
    """The other ranks of the target. Raises ConfigError where they cannot meet."""

    def __init__(self, config: EngineConfig, directory: Path) -> None:
        size, place = config.tensor_parallel_size, rank_place()
        self.runner: LeadingRunner | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        if place is None:
            store = meeting_place(0, size, 0)
            self.group = RankGroup(0, size, store, self._check)
            self._processes = [_start(rank, size, store.port) for rank in range(1, size)]
        elif place.size == size:
            self.group = torchrun_group(place)
        else:
            raise ConfigError(f"tensor_parallel_size is {size}, and torchrun has started {place.size} ranks")
        if self.group.has(CONFIGURE):
            raise EngineError("a rank has ended before; torchrun has to start all of them again (--max-restarts)")
        self.group.leave(CONFIGURE, to_text(Configure(config, str(directory))))

    def meet(self, num_blocks: int) -> None:
        """Wait until every rank has its part of the model, and tell it the blocks of the KV cache.

        Raises EngineError that names a rank that cannot load its part.
        """
        for rank in range(1, self.group.size):
            if problem := self.group.find(loaded(rank)):
                raise EngineError(f"rank {rank} cannot load its part of the model: {problem}")
        self.group.leave(BLOCKS, str(num_blocks))
        self.group.connect()

    def beat(self) -> None:
        """Raises EngineError if a rank has ended, or does not answer."""
        assert self.runner is not None, "the model has not been started"
        self.runner.beat()

    def close(self) -> None:
        """End the other ranks."""
        if self.runner is not None and all(each.poll() is None for each in self._processes):
            with contextlib.suppress(EngineError):
                self.runner.close()
        self.group.close()
        for each in self._processes:
            try:
                each.wait(_END_S)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()

    def _check(self) -> None:
        """Raises EngineError that names a rank that has ended."""
        until_s = time.monotonic() + _NOTICE_S
        while True:
            for rank, each in enumerate(self._processes, start=1):
                if (status := each.poll()) is not None:
                    how = f"signal {-status}" if status < 0 else f"exit status {status}"
                    raise EngineError(f"rank {rank} of the tensor-parallel model has ended ({how})")
            if time.monotonic() >= until_s:
                return
            time.sleep(_NOTICE_S / 10)


def _start(rank: int, size: int, port: int) -> subprocess.Popen[bytes]:
    level = logging.getLevelName(logging.getLogger("faser").getEffectiveLevel())
    command = python_command(FOLLOWER, level, log_format(), *map(str, (rank, size, port, os.getpid())))
    return subprocess.Popen(command, env=child_environment(), stdin=subprocess.DEVNULL)
