"""Which processors a backend computes on. Plain values."""

from dataclasses import dataclass

from faser.errors import ConfigError

# About what a lane of a GPU takes besides its CUDA graphs: cuBLAS's workspace (32 MiB), and attention plans for
# decoding and for other steps that run kernel by kernel (8 MiB each). All lanes share attention's workspace.
LANE_BYTES = 48 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLane:
    """A lane's part of a GPU: work enqueued on its stream runs on its processors.

    A CUDA graph captured on the stream stays on these processors, whichever stream replays it. There is one object
    for each name and share until the partition is closed.

    name: "draft" or "verify". share: of the GPU's processors, 0 to 1. num_processors: how many it has; with plain
    streams all, for which both lanes compete. stream: a torch.cuda.Stream, opaque here.
    """

    name: str
    share: float
    num_processors: int
    stream: object


class LaneError(ConfigError):
    """A lane whose processors cannot run a model's kernels: names the lane, and the reason that was given."""


# CPU cores by number, or a part of a GPU.
Processors = tuple[int, ...] | DeviceLane
