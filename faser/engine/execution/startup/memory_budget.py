"""How a GPU's memory is divided: models, the largest step, CUDA graphs, and what is left for keys and values.

A value; memory_profile.py measures it. The KV cache of a CPU is sized in sizing.py.
"""

from dataclasses import dataclass

from faser.config.declaration import show_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """The memory of one device.

    share: the part of the total that this process may take. free: before anything was loaded. loaded: taken since
    then and kept: weights, compiled kernels, existing workspaces. step: taken on top while a step of step_rows
    rows runs. graphs, workspaces: taken later, by CUDA graphs and by further workspaces.

        |          total                                                                  |
        | other processes, CUDA | loaded | step | graphs | workspaces | left | beyond share |
                                |          free                                           |
    """

    device: str
    total_bytes: int
    share: float
    free_bytes: int
    loaded_bytes: int
    step_bytes: int
    step_rows: int
    graph_bytes: int
    workspaces_bytes: int

    @property
    def granted_bytes(self) -> int:
        """What this process may take: its share, or what was free if that is less."""
        return min(int(self.total_bytes * self.share), self.free_bytes)

    @property
    def taken_bytes(self) -> int:
        return self.loaded_bytes + self.step_bytes + self.graph_bytes + self.workspaces_bytes

    @property
    def left_bytes(self) -> int:
        """For keys and values within the share."""
        return max(0, self.granted_bytes - self.taken_bytes)

    @property
    def most_bytes(self) -> int:
        """For keys and values if the share did not count."""
        return max(0, self.free_bytes - self.taken_bytes)

    def describe(self) -> str:
        """One sentence with every part."""
        parts = {
            "loaded": self.loaded_bytes,
            f"a step of {self.step_rows} rows": self.step_bytes,
            "CUDA graphs": self.graph_bytes,
            "workspaces": self.workspaces_bytes,
        }
        listed = ", ".join(f"{name} {show_bytes(size)}" for name, size in parts.items())
        return (
            f"{self.device} has {show_bytes(self.total_bytes)}, of which {show_bytes(self.free_bytes)} were free; "
            f"--gpu-memory-utilization {self.share:g} grants {show_bytes(self.granted_bytes)}; {listed}; "
            f"left for the KV cache: {show_bytes(self.left_bytes)}"
        )
