"""Which processors a lane has: what a backend is told before it computes there. Plain values."""

from dataclasses import dataclass

# About what a part of a GPU takes beside its recordings: a workspace of products (32 MiB), and plans of attention
# that is launched kernel by kernel, in decoding and in other steps (8 MiB each). The workspace of attention is one
# for all parts.
PLACE_BYTES = 48 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLane:
    """The part of a GPU that a lane has. name: "draft" or "verify"; share: of the GPU's processors, 0 to 1.

    num_processors: how many there are for it; with plain streams all, which the lanes then compete for.
    stream: torch's stream, opaque here. There is one object for each name and share until the partition is closed.
    Work on it runs on these processors, and what is recorded on it stays with them wherever it is replayed.
    """

    name: str
    share: float
    num_processors: int
    stream: object


# Cores of a CPU by number, or the part of a GPU.
Processors = tuple[int, ...] | DeviceLane
