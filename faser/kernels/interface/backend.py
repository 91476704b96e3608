"""The seam between the models and the arithmetic: what every backend promises.

A backend owns the layout of packed weights and of the KV cache; nobody above it may assume either. All
tensors live on the backend's device. Activations are [R, ...] where R counts the rows of one step; `out`
arguments are written in place and returned. Rows are independent of each other: a backend must give a row
the same bits whatever other rows are in the step (torch_backend may not; its docstring says so).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from faser.kernels.interface.fp8 import Fp8Rows
from faser.kernels.interface.logits_processor_kernels import LogitsProcessorKernels
from faser.kernels.interface.processors import DeviceLane, Processors
from faser.kernels.interface.rejection_kernels import RejectionKernels
from faser.kernels.interface.sampling_kernels import DeviceSamplingKernels, SamplingKernels

if TYPE_CHECKING:
    from faser.kernels.interface.graph_capture import GraphCapture


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """Which rows a step has, and where their keys and values live. CPU tensors, contiguous.

    query_start: [S + 1] int32; sequence s owns rows query_start[s] : query_start[s + 1].
    seq_len: [S] int32; tokens of s in the cache once this step's rows are appended.
    positions: [R] int32; position of each row in its sequence. Rows of one sequence are consecutive
        positions and end at seq_len - 1.
    block_table: [S, B] int32; block_table[s, p // block_size] holds position p. Entries past the end of a
        sequence are arbitrary.

        position   0 ............ computed ............ seq_len
        sequence   |  in the cache   |  rows of this step  |
    """

    query_start: Tensor
    seq_len: Tensor
    positions: Tensor
    block_table: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """Size of a paged KV cache, in which bytes count keys and values of all layers.

    dtype: what is stored, the type of the activations or float8_e4m3fn: see kernels/fp8_cache.
    """

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        return 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Heads of one attention layer. window: a row sees at most this many positions, itself included; None: all.

    query head h reads KV head h // (num_heads // num_kv_heads).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None


# Handles: each backend has its own classes behind these names; callers only pass them back.
PackedLinear = Any
KvCache = Any
AttentionPlan = Any


class Backend(Protocol):
    """Arithmetic of one device. One instance serves one thread at a time, and all runners that take turns."""

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def sampling_kernels(self) -> SamplingKernels | None:
        """Kernels that choose tokens from logits; None where there are none, and tensor operations have to do."""
        ...

    @property
    def logits_processor_kernels(self) -> LogitsProcessorKernels | None:
        """Kernels that edit logits before that; None as there."""
        ...

    @property
    def rejection_kernels(self) -> RejectionKernels | None:
        """Kernels that judge drafts which were sampled; None as there."""
        ...

    def use(self, processors: Processors | None) -> None:
        """From the next call on, run on these processors; None: on all, wherever.

        Said by the thread that makes the calls, once it is where they are: who divides the processors puts it
        there (Partition), and brings it back. On a CPU there is a thread on each of the cores; the caller is the
        first of them, and is on the first core or anywhere among them. On a GPU the caller's current stream is
        the lane's.

        Raises ConfigError for processors that this backend cannot use.
        """
        ...

    @property
    def place(self) -> DeviceLane | None:
        """The part of a GPU that is used; None: all of it, or no GPU."""
        ...

    def beside(self) -> "Backend":
        """Another instance on this device, for a runner that may run at the same time as those of this one.

        Of two at the same time each must use processors of its own. Handles of one are as good as the other's.
        """
        ...

    @property
    def has_fp8(self) -> bool:
        """Whether pack takes quantised weights."""
        ...

    @property
    def capture(self) -> "GraphCapture | None":
        """Recordings of this instance's work on the whole device; None where it has none."""
        ...

    def capture_on(self, place: DeviceLane) -> "GraphCapture | None":
        """Recordings of this instance's work on a part of the device, the same for the same place; or None.

        They are replayed while that place is used. Their plans, their workspace and their pool are not those of
        any other place, nor of another instance: two lanes may replay theirs at the same time.
        """
        ...

    def device_sampling_kernels(self, max_rows: int, width: int) -> DeviceSamplingKernels | None:
        """A new chooser of tokens where the logits are, for so many rows; None: sampling_kernels has to do."""
        ...

    def wait(self) -> None:
        """Return when everything given to the device is done. For profiles and tests: no step needs it."""
        ...

    def pack(self, weight: Tensor | Fp8Rows, bias: Tensor | None = None) -> PackedLinear:
        """Prepare a product with weight [N, K] (and bias [N]) for `linear` and `embed`.

        Copies: the argument may be freed. The dtype of the weight is the dtype of the product's input. A quantised
        weight is for `linear` only, takes any input of the backend's types, and quantises it: see
        kernels/interface/fp8.py.

        Raises ConfigError for a quantised weight where has_fp8 is False, or whose sizes have no kernel.
        """
        ...

    def linear(self, x: Tensor, packed: PackedLinear, out: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """out[r] = weight @ x[r] + bias (+ residual[r]), accumulated in float32.

        With a quantised weight x[r] is quantised too.

        x: [R, K], rows contiguous. out: [R, N], dtype of x or float32 (logits). residual: [R, N] in out's
        dtype; may be `out` itself. x and out do not overlap.
        """
        ...

    def embed(self, token_ids: Tensor, packed: PackedLinear, out: Tensor) -> Tensor:
        """out[r] = weight[token_ids[r]]. token_ids: [R] int64; out: [R, K] in the weight's dtype."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        """out[r] = x[r] / sqrt(mean(x[r]²) + eps) * weight, inner arithmetic in float32. x, out: [R, D]."""
        ...

    def allocate_kv(self, shape: KvShape) -> KvCache:
        """A zeroed cache of shape.total_bytes bytes. Block 0 is an ordinary block.

        Raises ConfigError for a type of numbers, or sizes, without kernels.
        """
        ...

    def plan(self, layout: RowLayout, block_size: int) -> AttentionPlan:
        """Digest a layout once per step; every layer of the step uses the result. Copies what it keeps."""
        ...

    def rope_append(
        self,
        qkv: Tensor,
        angles: Tensor | None,
        cache: KvCache,
        layer: int,
        shape: AttentionShape,
        plan: AttentionPlan,
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        """Normalise, rotate and store: queries come back, keys and values go to the cache, rounded to its type.

        qkv: [R, (Hq + 2 Hkv) * D], queries, then keys, then values; overwritten. angles: [P, D] float32,
        cosines of the D/2 pairs then their sines, indexed by position; channel i is paired with i + D/2.
        None rotates nothing. q_norm, k_norm: [D] RMS-norm weights applied to each head before rotating.
        Returns queries [R, Hq * D], a view of qkv.
        """
        ...

    def attend(
        self, q: Tensor, cache: KvCache, layer: int, shape: AttentionShape, plan: AttentionPlan, out: Tensor
    ) -> Tensor:
        """Causal attention of every row over its sequence's cached positions. q: view of qkv; out: [R, Hq * D]."""
        ...

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> Tensor:
        """out = silu(gate) * up, with gate_up [R, 2 F] = gate then up; out: [R, F]."""
        ...

    def copy_blocks(self, cache: KvCache, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target) in all layers; no target is another pair's source."""
        ...
