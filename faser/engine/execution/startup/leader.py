"""Ranks: rank 0's side of a model that several processes hold. Starts the others, and ends them.

Under torchrun the others are started by that, on this machine or on others, and end with it.
"""

import contextlib
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from faser.config.engine import EngineConfig
from faser.config.environment import child_environment, keep_on_loopback, rank_place, ranks_here
from faser.engine.contract.companion import Companion
from faser.engine.contract.messages import Configure, to_text
from faser.engine.execution.ranks.group import RankGroup, group_here, torchrun_group
from faser.engine.execution.ranks.meeting import open_meeting
from faser.engine.execution.ranks.relay import LeadingRunner
from faser.engine.execution.runner.runner import Runner
from faser.errors import ConfigError, EngineError
from faser.kernels.cuda.collectives import cuda_collectives
from faser.logs import log_format
from faser.machine import usable_cores
from faser.processes import python_command

FOLLOWER = "faser.engine.execution.startup.follower"
CONFIGURE = "configure"  # what rank 0 leaves for the others
_END_S = 2.0  # for ranks to end by themselves

_log = logging.getLogger("faser.engine")


def loaded(rank: int) -> str:
    """Return the name of the note that this rank leaves once it has its part of the model: empty, or the error."""
    return f"loaded/{rank}"


class NoRanks(Companion):
    """Stands for the other ranks of a target that is whole in this process."""

    @property
    def group(self) -> RankGroup | None:
        """Return the group of ranks; None: there is none."""
        return None

    def meet(self) -> None:
        """Wait until every rank has its part of the model, and connect to it.

        Raises EngineError that names a rank that cannot load its part.
        """

    def least_blocks(self, num_blocks: int) -> int:
        """Return how many blocks of the KV cache all ranks have room for. num_blocks: those of this one."""
        return num_blocks

    def lead(self, runner: Runner) -> None:
        """The model has been started with this runner."""


class Ranks(NoRanks):
    """The other ranks of the target. Raises ConfigError where they cannot meet.

    They end with the thread that makes it. The model in directory can be divided among them: see find_models.
    device: of rank 0.
    """

    def __init__(self, config: EngineConfig, directory: Path, device: torch.device) -> None:
        size, place = config.tensor_parallel_size, rank_place()
        self._device = device
        self._closed = threading.Event()
        self._runner: LeadingRunner | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        if device.type == "cpu":
            warn_of_few_cores(ranks_here(size), usable_cores())
        if place is None:
            meeting = open_meeting()
            self._group = group_here(0, size, meeting, self._check)
            give_device(self._group, config, device)
            self._start(size, meeting)
        elif place.size == size:
            self._group = torchrun_group(place)
            give_device(self._group, config, device)
        else:
            raise ConfigError(f"tensor_parallel_size is {size}, and torchrun has started {place.size} ranks")
        if self._group.has(CONFIGURE):
            raise EngineError("a rank has ended before; torchrun has to start all of them again (--max-restarts)")
        self._group.leave(CONFIGURE, to_text(Configure(config, str(directory))))
        if device.type == "cuda" and self._processes:
            watching = partial(watch, self._check, self._closed)
            threading.Thread(target=watching, name="faser-ranks", daemon=True).start()

    @property
    def group(self) -> RankGroup:
        return self._group

    def meet(self) -> None:
        for rank in range(1, self._group.size):
            if problem := self._group.find(loaded(rank)):
                raise EngineError(f"rank {rank} cannot load its part of the model: {problem}")
        connect(self._group, self._device)

    def least_blocks(self, num_blocks: int) -> int:
        return self._group.least(num_blocks)

    def lead(self, runner: Runner) -> None:
        assert isinstance(runner, LeadingRunner)
        self._group.begin()
        self._runner = runner

    def rest(self) -> None:
        """Raises EngineError if a rank has ended, or does not answer."""
        assert self._runner is not None, "the model has not been started"
        self._runner.beat()

    def close(self) -> None:
        """End the other ranks."""
        self._closed.set()
        until_s = time.monotonic()
        runner, self._runner = self._runner, None
        if runner is not None and not self._group.is_broken:
            with contextlib.suppress(EngineError):
                runner.close()
            until_s += _END_S
        self._group.close()
        for each in self._processes:
            try:
                each.wait(max(0.0, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()

    def _start(self, size: int, meeting: int) -> None:
        """Start the processes of the other ranks. Raises ConfigError if one cannot start; then none is left."""
        level = logging.getLevelName(logging.getLogger("faser").getEffectiveLevel())
        for rank in range(1, size):
            place = map(str, (rank, size, meeting, os.getpid()))
            command = python_command(FOLLOWER, level, log_format(), *place)
            try:
                self._processes.append(
                    subprocess.Popen(
                        command, env=child_environment(), stdin=subprocess.DEVNULL, pass_fds=[meeting]
                    )
                )
            except OSError as error:
                self.close()
                raise ConfigError(
                    f"tensor_parallel_size is {size}; the process of rank {rank} cannot be started: "
                    f"{error.strerror}"
                ) from None

    def _check(self) -> None:
        """Raises EngineError that names a rank that has ended."""
        for rank, each in enumerate(self._processes, start=1):
            if (status := each.poll()) is not None:
                how = f"signal {-status}" if status < 0 else f"exit status {status}"
                raise EngineError(f"rank {rank} of the tensor-parallel model has ended ({how})")


def watch(
    check: Callable[[], None],
    closed: threading.Event,
    end: Callable[[int], object] = os._exit,
    *,
    every_s: float = 0.5,
    grace_s: float = 5.0,
) -> None:
    """End this process if a rank has ended and the engine does not find out: it waits for a GPU that waits for it.

    check: raises EngineError that names an ended rank. closed: the engine has found out, or ends by itself. NCCL
    would end the process too, but minutes later.
    """
    while not closed.wait(every_s):
        try:
            check()
        except EngineError as error:
            if not closed.wait(grace_s):
                _log.critical("%s, and the GPU of rank 0 waits for it: the engine's process ends", error)
                end(1)
            return


def warn_of_few_cores(here: int, cores: int) -> None:
    """Log it if the ranks of this machine have to share its cores."""
    if here > cores:
        _log.warning(
            "tensor_parallel_size puts %d ranks on this machine, where FASER has %d cores: ranks that share a "
            "core wait for each other in every layer; use %d ranks or fewer here, or more machines (torchrun)",
            here,
            cores,
            cores,
        )


def give_device(group: RankGroup, config: EngineConfig, device: torch.device) -> None:
    """Let the group add up on GPUs if this rank has one. config: rank 0's.

    Raises ConfigError: see cuda_collectives.
    """
    if device.type != "cuda":
        return
    here = ranks_here(group.size)
    if here == group.size:
        keep_on_loopback()
    first = int(config.device.partition(":")[2] or 0)
    group.compute_on(
        cuda_collectives(
            group.store,
            group.rank,
            group.size,
            device,
            range(first, first + here),
            one_machine=here == group.size,
            one_shot=not config.disable_custom_all_reduce,
        )
    )


def connect(group: RankGroup, device: torch.device) -> None:
    """Connect to the other ranks. Raises EngineError where GPUs differ, whose kernels may round differently."""
    group.connect()
    if device.type == "cuda":
        group.agree(f"a model on {torch.cuda.get_device_name(device)} with torch {torch.__version__}")


def make_ranks(config: EngineConfig, directory: Path, device: torch.device) -> NoRanks:
    """Start the other ranks of the model in directory, if there are any. Raises ConfigError: see Ranks."""
    return NoRanks() if config.tensor_parallel_size == 1 else Ranks(config, directory, device)
