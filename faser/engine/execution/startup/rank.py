"""The work of a rank other than the first: loads its part of the target, then does what rank 0's runner does."""

import logging
import time
from pathlib import Path

import torch

from faser.engine.contract.messages import Configure, from_text
from faser.engine.execution.ranks.adapters import follow_loads
from faser.engine.execution.ranks.group import ANSWER_S, RankGroup
from faser.engine.execution.ranks.relay import follow
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.startup.executor import engine_backend, make_adapters
from faser.engine.execution.startup.files import target_files
from faser.engine.execution.startup.leader import BLOCKS, CONFIGURE, loaded
from faser.engine.execution.startup.models import LoadedModel, load_model
from faser.errors import EngineError, FaserError
from faser.kernels.interface.kv_cache import KvShape

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
    adapters = make_adapters(configure.config, target) if configure.config.enable_lora else None
    if adapters is not None:
        follow_loads(adapters, group)
    group.connect()
    _log.info("rank %d of %d has %d MB of weights", group.rank, group.size, target.weight_bytes // 10**6)
    try:
        follow(runner, group, adapters)
    except EngineError:
        time.sleep(ANSWER_S)  # rank 0 finds out which rank is gone, and would find this one too
        raise


def _load(configure: Configure, group: RankGroup) -> LoadedModel:
    config, directory = configure.config, Path(configure.directory)
    torch.set_num_threads(config.threads)

    def ignore(_stage: str, _done: int, _total: int) -> None: ...

    files, backend = target_files(config, directory), engine_backend(config, ignore)
    return load_model(config, files, backend, ignore, group=group)
