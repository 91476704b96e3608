"""The work of a rank other than the first: loads its part of the target, then does what rank 0's runner does."""

import logging
import time
from dataclasses import replace
from pathlib import Path

import torch

from faser.config.engine import EngineConfig
from faser.config.environment import cuda_environment, rank_place
from faser.engine.contract.messages import Configure, from_text
from faser.engine.execution.overlap.lanes import DeviceLanes
from faser.engine.execution.ranks.adapters import follow_loads
from faser.engine.execution.ranks.group import ANSWER_S, RankGroup
from faser.engine.execution.ranks.relay import follow
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.startup.device import device_of_rank
from faser.engine.execution.startup.executor import engine_backend, make_adapters
from faser.engine.execution.startup.files import target_files
from faser.engine.execution.startup.leader import CONFIGURE, connect, give_device, loaded
from faser.engine.execution.startup.memory import kv_shapes
from faser.engine.execution.startup.models import LoadedModel, load_model, make_runner
from faser.engine.execution.startup.warm_up import profile_memory
from faser.errors import EngineError, FaserError
from faser.kernels.cuda.device import CudaMemory, DeviceMemory
from faser.kernels.interface.kv_cache import KvShape

_MOST_BLOCKS = 1 << 40  # of a rank on a CPU, whose memory rank 0 divides

_log = logging.getLogger("faser.engine")


def run(group: RankGroup) -> None:
    """Until rank 0 ends, or the group breaks. Raises FaserError for what cannot be loaded."""
    configure: Configure = from_text(group.find(CONFIGURE))
    given, directory = configure.config, Path(configure.directory)
    config = replace(given, device=device_of_rank(given.device, _local(group)))
    memory, free_bytes = None, 0
    try:
        torch.set_num_threads(config.threads)
        if config.on_gpu:
            cuda_environment(compile_kernels=config.compile_kernels)
        backend = engine_backend(config, _ignore)
        give_device(group, given, backend.device)
        if backend.device.type == "cuda":
            memory = CudaMemory(backend.device)
            free_bytes = memory.free_bytes()
        files = target_files(config, directory, group.rank)
        target = load_model(config, files, backend, _ignore, group=group)
    except FaserError as error:
        group.leave(loaded(group.rank), str(error))
        raise
    group.leave(loaded(group.rank), "")
    adapters = make_adapters(config, target) if config.enable_lora else None
    if adapters is not None:
        follow_loads(adapters, group)
    connect(group, backend.device)
    _log.info("rank %d of %d has %d MB of weights", group.rank, group.size, target.weight_bytes // 10**6)
    runner = start(config, target, group, memory, free_bytes)
    try:
        follow(runner, group, adapters)
    except EngineError:
        time.sleep(ANSWER_S)  # rank 0 finds out which rank is gone, and would find this one too
        raise


def start(
    config: EngineConfig, target: LoadedModel, group: RankGroup, memory: DeviceMemory | None, free_bytes: int
) -> Runner:
    """Return a runner of this rank's part, with a cache of as many blocks as all ranks have room for.

    memory: of this rank's device; None: on a CPU. free_bytes: of it, before anything was loaded. The order of the
    sums and captures is that of load_parts in executor.py. Raises FaserError where there is too little memory.
    """
    room = _MOST_BLOCKS
    if memory is not None:
        budget = profile_memory(config, [target], memory, free_bytes, DeviceLanes())
        (shape,) = kv_shapes(config, [target.files], target.files.max_positions, budget)
        room = shape.num_blocks
    kv = KvShape(
        heads=target.decoder.spec.kv_heads,
        num_blocks=group.least(room),
        block_size=config.block_size,
        dtype=target.files.kv_dtype,
    )
    return make_runner(config, target, kv, _ignore, group=group)


def _local(group: RankGroup) -> int:
    """Return this rank's number among those of its machine."""
    place = rank_place()
    return group.rank if place is None else place.local


def _ignore(_stage: str, _done: int, _total: int) -> None: ...
