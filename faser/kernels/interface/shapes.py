"""Plain values between a model and a backend: the rows of a step, the heads of a layer, the processors in use."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from faser.errors import ConfigError

# Opaque handles: each backend returns objects of its own classes under these names; callers only pass them back.
PackedLinear = Any
KvCache = Any
AttentionPlan = Any
# About what a lane of a GPU takes besides its CUDA graphs: cuBLAS's workspace (32 MiB), and attention plans for
# decoding and for other steps that run kernel by kernel (8 MiB each). All lanes share attention's workspace.
LANE_BYTES = 48 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """The rows of a step, and where their keys and values are stored. CPU tensors, contiguous.

    query_start: [S + 1] int32; sequence s owns rows query_start[s] : query_start[s + 1].
    seq_len: [S] int32; tokens of s in the cache once this step's rows are appended.
    positions: [R] int32; position of each row in its sequence. Rows of one sequence have consecutive positions
        that end at seq_len - 1.
    block_table: [S, B] int32; block_table[s, p // block_size] holds position p. Entries past the end of a
        sequence are arbitrary.
    slots: [S]; whose recurrent state is each sequence's, in models that have states. Empty: a dummy layout.
    adapters: [S] int32; slot of each sequence's adapter, -1: none. None: no sequence has one.
    num_drafts: [S]; how many of its rows, the last ones, may be refused; read where a step begins.
    seen_to: [R] int32; the last position that each row attends to, rising within a sequence; None: its own. Of
        encoders, for backends that have encoder_kernels.

        position   0 ............ computed ............ seq_len
        sequence   |  in the cache   |  rows of this step  |
    """

    query_start: Tensor
    seq_len: Tensor
    positions: Tensor
    block_table: Tensor
    slots: Sequence[int] = ()
    adapters: Tensor | None = None
    num_drafts: Sequence[int] = ()
    seen_to: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Heads of one attention layer. Query head h reads KV head h // (num_heads // num_kv_heads).

    window: most positions that a row attends to, its own included; None: all. score_cap: c: a scaled score s
    becomes c tanh(s / c); None: it stays. gated: what a head gives is multiplied by σ of its gate. reads_other:
    keys and values are another layer's, so rows have queries alone.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    score_cap: float | None = None
    gated: bool = False
    reads_other: bool = False

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return self.q_size if self.reads_other else (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def columns(self) -> int:
        """Return the columns of a row: queries, keys, values, gates."""
        return self.qkv_size + self.gated * self.q_size


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


# CPU cores by number, or a part of a GPU.
Processors = tuple[int, ...] | DeviceLane


class LaneError(ConfigError):
    """A lane whose processors cannot run a model's kernels: names the lane, and the reason that was given."""
