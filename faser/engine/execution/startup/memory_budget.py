"""How a GPU's memory is divided: what models hold, what a step takes, and what is left for keys and values.

One step of the largest size is run to see what it takes. What a CPU gives its KV cache is in sizing.py. None of
this has run on a GPU yet.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from faser.config.declaration import show_bytes
from faser.config.engine import EngineConfig
from faser.errors import ConfigError
from faser.kernels.cuda.memory import DeviceMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """One device, and who has its memory.

    share: of the total, that this process may take. free: when the engine started, before anything was loaded.
    loaded: taken since then and kept: weights, compiled kernels, workspaces that are there already. step: taken on
    top of that while a step of step_rows rows runs. recordings, workspaces: what will be taken later.

        |          total                                                              |
        | others, CUDA | loaded | step | recordings | workspaces | left |   beyond share |
                       |          free                                                |
    """

    device: str
    total_bytes: int
    share: float
    free_bytes: int
    loaded_bytes: int
    step_bytes: int
    step_rows: int
    recordings_bytes: int
    workspaces_bytes: int

    @property
    def granted_bytes(self) -> int:
        """What this process may take in all: its share, or what was free where that is less."""
        return min(int(self.total_bytes * self.share), self.free_bytes)

    @property
    def taken_bytes(self) -> int:
        return self.loaded_bytes + self.step_bytes + self.recordings_bytes + self.workspaces_bytes

    @property
    def left_bytes(self) -> int:
        """For keys and values, within the share."""
        return max(0, self.granted_bytes - self.taken_bytes)

    @property
    def most_bytes(self) -> int:
        """For keys and values, if the share did not count."""
        return max(0, self.free_bytes - self.taken_bytes)

    def told(self) -> str:
        """All of it in a sentence, part by part."""
        parts = {
            "loaded": self.loaded_bytes,
            f"a step of {self.step_rows} rows": self.step_bytes,
            "recordings": self.recordings_bytes,
            "workspaces": self.workspaces_bytes,
        }
        listed = ", ".join(f"{name} {show_bytes(size)}" for name, size in parts.items())
        return (
            f"{self.device} has {show_bytes(self.total_bytes)}, of which {show_bytes(self.free_bytes)} were free; "
            f"--gpu-memory-utilization {self.share:g} grants {show_bytes(self.granted_bytes)}; {listed}; "
            f"left for the KV cache: {show_bytes(self.left_bytes)}"
        )


def measure_budget(
    config: EngineConfig,
    memory: DeviceMemory,
    free_at_start_bytes: int,
    step: Callable[[], None],
    *,
    recordings_bytes: int,
    workspaces_bytes: int,
) -> MemoryBudget:
    """Run step, and see what is left of the device beside it.

    Called when all models are loaded, and before caches are made. free_at_start_bytes: memory.free_bytes() before
    that. step: one forward of max_num_batched_tokens rows over a cache of its own, as small as can be, with as
    many logits as a step can have; of several models, of each. It may leave workspaces behind, which count as
    loaded. recordings_bytes, workspaces_bytes: what is not taken yet and will be.

    Raises ConfigError where that step has no room.
    """
    memory.release()
    memory.reset_peak()
    try:
        step()
    except torch.OutOfMemoryError as error:
        rows = config.max_num_batched_tokens
        raise ConfigError(
            f"--max-num-batched-tokens is {rows}; {memory.name} has no room for a step of {rows} rows beside the "
            f"models, which take {show_bytes(memory.held_bytes())}; {show_bytes(free_at_start_bytes)} were free"
        ) from error
    peak = memory.peak_bytes()
    memory.release()
    held = memory.held_bytes()
    return MemoryBudget(
        device=memory.name,
        total_bytes=memory.total_bytes,
        share=config.gpu_memory_utilization,
        free_bytes=free_at_start_bytes,
        # Kernels are loaded past torch's allocator, so the driver is asked; but others may have left meanwhile.
        loaded_bytes=max(held, free_at_start_bytes - memory.free_bytes()),
        step_bytes=max(0, peak - held),
        step_rows=config.max_num_batched_tokens,
        recordings_bytes=recordings_bytes,
        workspaces_bytes=workspaces_bytes,
    )
