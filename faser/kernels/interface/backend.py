"""The seam between models and arithmetic: what every backend promises.

A backend chooses the layout of packed weights and of the KV cache; its callers must not assume either. All tensors
live on the backend's device. Activations are [R, ...], where R counts the rows of one step; `out` arguments are
written in place and returned. Rows are independent: a backend gives a row the same bits whatever other rows are in
the step. Backends on torch's matrix products cannot promise that; their docstrings say so.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from faser.kernels.interface.block_drafting import BlockDrafting
from faser.kernels.interface.blocks import (
    Blocks,
    Experts,
    HeadDrafting,
    Layers,
    Mixtures,
)
from faser.kernels.interface.fp8 import Fp8Rows
from faser.kernels.interface.graph_capture import GraphCapture
from faser.kernels.interface.kv_cache import KvShape
from faser.kernels.interface.low_bit.rows import LowBitRows
from faser.kernels.interface.mixers import Mixer, MixerShape, States, StateShape, StateStep
from faser.kernels.interface.sampling import DeviceSamplingKernels, MaskKernel, SamplingKernels
from faser.kernels.interface.shapes import (
    AttentionPlan,
    AttentionShape,
    DeviceLane,
    KvCache,
    PackedLinear,
    Processors,
    RowLayout,
)
from faser.types.activation import Activation


class Backend(Protocol):
    """Arithmetic of one device. An instance serves one thread at a time; several runners may share it in turn."""

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def sampling_kernels(self) -> SamplingKernels | None:
        """Kernels that sample tokens from logits; None: the engine uses tensor operations."""
        ...

    @property
    def mask_kernel(self) -> MaskKernel | None:
        """Masks logits on the host; None: the engine uses tensor operations."""
        ...

    def use(self, processors: Processors | None) -> None:
        """Run on these processors from the next call on; None: on all of them.

        The calling thread must be in place already: the overlap partition moves it there and back. On a CPU the
        backend runs one thread on each core; the caller counts as the first thread, and runs on the first core or
        anywhere among the cores. On a GPU the caller's current stream is the lane's stream.

        Raises ConfigError for processors that this backend cannot use.
        """
        ...

    @property
    def lane(self) -> DeviceLane | None:
        """The part of a GPU in use; None: all of it, or no GPU."""
        ...

    def concurrent_instance(self) -> "Backend":
        """A second instance on this device, for a runner that may run concurrently with those of this one.

        While both run, each uses processors of its own. Either instance accepts the handles of the other.
        """
        ...

    @property
    def has_fp8(self) -> bool:
        """Return whether pack takes weights in 8-bit floats."""
        ...

    @property
    def has_low_bit(self) -> bool:
        """Return whether pack takes low-bit weights."""
        ...

    @property
    def has_low_bit_experts(self) -> bool:
        """Return whether experts may have low-bit weights."""
        ...

    @property
    def has_experts(self) -> bool:
        """Return whether mixtures of experts are supported."""
        ...

    def mixes(self, shape: MixerShape) -> bool:
        """Return whether mixers of this kind are supported."""
        ...

    @property
    def experts_read(self) -> int:
        """Count the experts' weights read so far; those of each layer and each call count by themselves.

        Shared ones do not count: every call reads them. Waits for the device; count_experts does not.
        """
        ...

    def count_experts(self) -> Callable[[], int]:
        """Return a call that gives experts_read as of now, and waits until all work launched so far is done."""
        ...

    def row_edges(self, most: int) -> tuple[int, ...]:
        """Row counts below `most` that fill the tiles of its products: one row more begins another tile.

        Or goes to another kernel. Of the packed weights, and in ascending order; empty: nothing is known of tiles.
        """
        ...

    @property
    def prefers_low_bit(self) -> bool:
        """Return whether low-bit weights are multiplied faster as they are than dequantised."""
        ...

    @property
    def graph_capture(self) -> GraphCapture | None:
        """Captures CUDA graphs of this instance's work on the whole device; None: the device has no graphs."""
        ...

    def graph_capture_on(self, lane: DeviceLane) -> GraphCapture | None:
        """Captures CUDA graphs of this instance's work on one lane; the same object for the same lane.

        Its graphs are replayed while that lane is in use. It shares plans, workspace and memory pool with no other
        lane and no other instance: two lanes may replay their graphs at the same time.
        """
        ...

    def device_sampling_kernels(self, max_rows: int, width: int) -> DeviceSamplingKernels | None:
        """New kernels that sample up to max_rows rows of `width` logits on the device; None: it has none."""
        ...

    @property
    def blocks(self) -> Blocks:
        """Units of layers, in the fewest launches that this backend has for them."""
        ...

    @property
    def mixtures(self) -> Mixtures:
        """Mixtures of experts, in the fewest launches."""
        ...

    @property
    def layers(self) -> Layers:
        """Whole layers, in the fewest calls."""
        ...

    @property
    def head_drafting(self) -> HeadDrafting | None:
        """Drafts of EAGLE-3 heads in one call; None: nothing is better than a pass after another."""
        ...

    @property
    def block_drafting(self) -> BlockDrafting | None:
        """Drafts of block drafters in one call; None: nothing is better than single operations."""
        ...

    def wait(self) -> None:
        """Return when the device has finished all its work. For profiles and tests: no step needs it."""
        ...

    def pack(self, weight: Tensor | Fp8Rows | LowBitRows, bias: Tensor | None = None) -> PackedLinear:
        """Prepare a product with weight [N, K] (and bias [N]) for `linear` and `embed`.

        Copies: the argument may be freed. The product's input has the dtype of the weight. A quantised weight
        takes any input of the backend's types and quantises it (interface/fp8.py, interface/low_bit/product.py);
        one in 8-bit floats is for `linear` only.

        Raises ConfigError for a quantised weight where has_fp8 or has_low_bit is False, or whose sizes have no
        kernel.
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
        """out[r] = weight[token_ids[r]]. token_ids: [R] int64.

        out: [R, K] in the weight's dtype; of a low-bit weight in any. Raises IndexError on a CPU for an id that
        the weight has no row for.
        """
        ...

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, out: Tensor, *, residual: Tensor | None = None
    ) -> Tensor:
        """out[r] = x[r] / sqrt(mean(x[r]²) + eps) * weight (+ residual[r]), inner arithmetic in float32.

        x, out: [R, D], rows at any distance; out may be x. weight: [D] float32. residual: [R, D] in the type of
        both, as far apart as out; may be out.
        """
        ...

    def allocate_kv(self, shape: KvShape) -> KvCache:
        """A zeroed cache of shape.total_bytes bytes. Block 0 is an ordinary block.

        Raises ConfigError for a dtype or sizes without kernels.
        """
        ...

    def plan(self, layout: RowLayout, block_size: int) -> AttentionPlan:
        """Digest a layout once per step; every layer of the step uses the result. Copies what it keeps."""
        ...

    def row_slots(self, plan: AttentionPlan) -> Tensor | None:
        """Return where the cache stores each row, [R] int64 on the device: below 0 for padding.

        None: no row of any plan is padding.
        """
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
        query_angles: Tensor | None = None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        v_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        """Normalise and rotate queries and keys; store keys and values in the cache, rounded to its dtype.

        qkv: [R, (Hq + 2 Hkv) * D], queries, then keys, then values; overwritten. Of a shape that reads another
        layer's keys: queries alone, and nothing is stored. angles: [P, D] float32, cosines of the D/2 pairs then
        their sines, indexed by position; channel i is paired with i + D/2. None rotates nothing. query_angles:
        those of queries, where they differ. q_norm, k_norm, v_norm: [D] float32, RMS-norm weights applied to each
        head before rotating; None: no norm.
        Returns queries [R, Hq * D], a view of qkv.
        """
        ...

    def attend(
        self,
        q: Tensor,
        cache: KvCache,
        layer: int,
        shape: AttentionShape,
        plan: AttentionPlan,
        out: Tensor,
        *,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of every row over its sequence's cached positions. q: view of qkv; out: [R, Hq * D].

        sinks: [Hq] float32, one more score of each head, whose weight counts in the sum and has no value.
        """
        ...

    def gate(self, gate_up: Tensor, out: Tensor, activation: Activation = Activation.SILU) -> Tensor:
        """out = activation(gate) * up, with gate_up [R, 2 F] = gate then up; out: [R, F]."""
        ...

    def experts(
        self,
        x: Tensor,
        block: Experts,
        hidden: Tensor,
        routed_by: Tensor | None = None,
        /,
        *,
        slots: Tensor | None = None,
    ) -> None:
        """hidden[r] += the sum of w * down(gate(gate_up(x[r]))) over the chosen experts of row r.

        Weights w are the router's softmax, in float32, over all experts, or over the chosen ones alone where they
        are renormalised, times the scales; or sigmoids, see Experts. routed_by: [R, H], what the router sees;
        None: x. Of equal logits the lower expert is chosen. The sum is in float32, in the order of the weights,
        the shared expert last, and is rounded once. x, hidden: [R, H]. slots: see row_slots; padding reads no
        experts, and what hidden becomes there is arbitrary. Raises ConfigError where has_experts is False.
        """
        ...

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> None:
        """x *= σ(gate). x, gate: [R, N], rows of the gate at any distance."""
        ...

    def allocate_states(self, shape: StateShape) -> States:
        """States of about shape.total_bytes bytes. Raises ConfigError for sizes without kernels."""
        ...

    def mix(self, x: Tensor, rates: Tensor | None, mixer: Mixer, layer: int, step: StateStep, out: Tensor) -> None:
        """Write what the mixer gives for every row to out; the step's rows are kept.

        x: [R, shape.columns]. rates: [R, shape.rate_columns] float32; None: it has none. layer: number in the
        states. out: [R, shape.q_size]. A chunk that the step's rows complete, but for those that may be refused,
        enters the state. Only for a mixer of which `mixes` is True.
        """
        ...
