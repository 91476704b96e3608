"""The CPU backend, called `native`: packed weights, a paged cache in the kernels' layout, threads of its own.

Passes the addresses of tensors to the kernels in native/*.cpp. A row gets the same bits whatever other rows are in
the step, for any number of threads. Computes in bfloat16 and float32; products accumulate in float32.
"""

import ctypes
import mmap
import os
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from faser.errors import ConfigError
from faser.kernels.cpu import library as native_library
from faser.kernels.cpu.block_drafting import NativeBlockDrafting
from faser.kernels.cpu.blocks import DTYPES, NativeBlocks, experts_struct, heads_struct, is_grouped
from faser.kernels.cpu.delta_net import NativeStates, StepStructs, delta_net_struct, short_conv_struct
from faser.kernels.cpu.head_drafting import NativeHeadDrafting
from faser.kernels.cpu.library import LanePools, NativePool, full_pool
from faser.kernels.cpu.low_bit import LowBitLinear, pack_low_bit
from faser.kernels.cpu.sampling import CpuMaskKernel, CpuSamplingKernels
from faser.kernels.interface.blocks import Experts
from faser.kernels.interface.delta_net import DeltaNet
from faser.kernels.interface.experts import experts_one_by_one
from faser.kernels.interface.forward import SeparateBlocks, SeparateLayers, SeparateMixtures
from faser.kernels.interface.fp8 import Fp8Rows
from faser.kernels.interface.kv_cache import KvShape, check_cache_dtype
from faser.kernels.interface.low_bit.rows import LowBitRows
from faser.kernels.interface.mixers import Mixer, MixerShape, StateShape, StateStep
from faser.kernels.interface.shapes import AttentionPlan, AttentionShape, DeviceLane, Processors, RowLayout
from faser.kernels.interface.short_conv import ShortConv
from faser.memo import Memo
from faser.optional import maybe, or_else
from faser.types.activation import Activation

_KV_DTYPES = {**DTYPES, torch.int8: native_library.INT8}
_MOST_HEAD_DIM = 1024  # of a cache in int8: sums of products fit into 32 bits
_MULTIPLE = 16  # the kernels handle tokens of a block and channels of a head in groups of this size
_HUGE_PAGE_BYTES = 2 << 20
_SLAB_BYTES = 64 << 20  # small weights share a slab, so that huge pages cover them too


class _NativeLinear:
    """A packed weight. address: of its FaserLinear."""

    __slots__ = ("_kept", "address", "columns", "depth", "dtype")

    def __init__(self, panels: Tensor, bias: Tensor | None, columns: int, depth: int, dtype: torch.dtype) -> None:
        self.columns, self.depth, self.dtype = columns, depth, dtype
        struct = native_library.LinearStruct(
            panels.data_ptr(), maybe(Tensor.data_ptr, bias), columns, depth, DTYPES[dtype]
        )
        self.address = ctypes.addressof(struct)
        self._kept = (struct, panels, bias)


class _NativeCache:
    """A paged cache. address: of its FaserCaches, one for each layer."""

    __slots__ = ("_kept", "address", "shape")

    def __init__(self, data: Tensor, shape: KvShape) -> None:
        self.shape = shape
        layers = (native_library.CacheStruct * len(shape.heads))()
        start = data.data_ptr()
        for layer, heads, size in zip(layers, shape.heads, shape.layer_block_bytes, strict=True):
            layer.data, layer.block_size, layer.dtype = start, shape.block_size, _KV_DTYPES[shape.dtype]
            layer.num_kv_heads, layer.head_dim = heads
            start += shape.num_blocks * size
        self.address = ctypes.addressof(layers)
        self._kept = (layers, data)

    def parts(self) -> list[Tensor]:
        """See KvParts."""
        _, data = self._kept
        num_blocks, found, rest = self.shape.num_blocks, [], data
        for size in self.shape.layer_block_bytes:
            found.append(rest[: num_blocks * size].view(num_blocks, size))
            rest = rest[num_blocks * size :]
        return found

    def layer(self, number: int) -> int:
        """Address of the FaserCache of a layer."""
        assert 0 <= number < len(self.shape.heads), number
        return self.address + number * ctypes.sizeof(native_library.CacheStruct)


class _NativePlan:
    """A digested layout. address: of its FaserPlan, which this object frees."""

    __slots__ = ("__weakref__", "address", "num_rows")

    def __init__(self, address: int, num_rows: int, library: ctypes.CDLL) -> None:
        self.address, self.num_rows = address, num_rows
        weakref.finalize(self, library.faser_plan_free, address)


class NativeBackend:
    """Backend of native code for CPUs. library: path from build.library_path. num_threads: the caller's included.

    full: the pool of num_threads threads to share with another instance; None: a new pool.
    """

    def __init__(self, library: Path, *, num_threads: int, full: NativePool | None = None) -> None:
        if num_threads < 1:
            raise ConfigError(f"the native backend needs at least 1 thread, not {num_threads}")
        self.device = torch.device("cpu")
        self.name = "native"
        self.has_fp8 = False
        self.has_low_bit = self.has_low_bit_experts = True
        self.has_experts = True
        self._read_one_by_one = 0  # experts
        self._num_packed: Counter[tuple[str, int]] = Counter()  # weights, by kind of product and dtype or form
        self.prefers_low_bit = True
        self.num_threads = num_threads
        self._path = library
        self._library = native_library.load(library)
        native_library.use_tiles(self._library)
        self._full = full_pool(self._library, num_threads) if full is None else full
        self._pools = LanePools(self._library, self._full, frozenset(os.sched_getaffinity(0)))
        self._slab = torch.empty(0, dtype=torch.uint8)  # the free rest of the newest slab of weights
        self._heads = Memo(heads_struct)
        self.sampling_kernels = CpuSamplingKernels(self._library, self._pools)
        self.mask_kernel = CpuMaskKernel(self._library, self._pools)
        self._state_steps = StepStructs()
        # A proxy: threads end with the backend, which a circle of references would keep alive.
        proxy = weakref.proxy(self)
        separate = SeparateBlocks(proxy)
        self.mixtures = SeparateMixtures(proxy)
        self.blocks = NativeBlocks(self._library, self._pools, separate, SeparateLayers(proxy, separate))
        self.layers = self.blocks
        self.head_drafting = NativeHeadDrafting(self._library, self._pools, self.blocks)
        self.block_drafting = NativeBlockDrafting(self._library, self._pools, self.blocks)
        self.graph_capture = None
        self.lane = None
        kernels = self._library  # the functions of every step are looked up once
        self._linear_call = kernels.faser_linear
        self._low_bit_call = kernels.faser_low_bit_linear
        self._rms_norm_call = kernels.faser_rms_norm
        self._gate_call = kernels.faser_gate
        self._rope_append_call = kernels.faser_rope_append
        self._attend_call = kernels.faser_attend

    @property
    def experts_read(self) -> int:
        """See Backend. A lane's pool has a count of its own."""
        return self._read_one_by_one + int(self._library.faser_experts_read(self._pools.address))

    def row_edges(self, most: int) -> tuple[int, ...]:
        """See Backend. Those of the products that most of the packed weights are in."""
        if not self._num_packed:
            return ()
        kind, kept_as = max(self._num_packed, key=self._num_packed.__getitem__)
        tiles = partial(getattr(self._library, f"faser_{kind}_tiles"), kept_as)
        return tuple(rows for rows in range(1, most) if tiles(rows + 1) != tiles(rows))

    def use(self, processors: Processors | None) -> None:
        """See Backend. Does not change any bits. Takes microseconds for a set of cores used before."""
        if isinstance(processors, DeviceLane):
            raise ConfigError(
                f"the native backend computes on cpu; it cannot use the {processors.name} lane of a GPU"
            )
        self._pools.use(processors)

    def concurrent_instance(self) -> "NativeBackend":
        """See Backend. Without `use` both run on the same pool, so idle threads of one never disturb the other."""
        return NativeBackend(self._path, num_threads=self.num_threads, full=self._full)

    def graph_capture_on(self, _lane: DeviceLane) -> None:
        """See Backend. None: a CPU has no graphs."""
        return

    def device_sampling_kernels(self, _max_rows: int, _width: int) -> None:
        """See Backend. None: `sampling_kernels` serves."""
        return

    def wait(self) -> None:
        """See Backend. Every call is synchronous."""

    def pack(
        self, weight: Tensor | Fp8Rows | LowBitRows, bias: Tensor | None = None
    ) -> _NativeLinear | LowBitLinear:
        """See Backend. Raises ConfigError for a dtype but bfloat16 and float32, and for odd K in bfloat16."""
        if isinstance(weight, LowBitRows):
            low_bit = pack_low_bit(self._library, self._pools.address, weight, bias, self._take)
            for form, count in low_bit.forms.items():
                self._num_packed["low_bit", form] += count * low_bit.depth
            return low_bit
        if isinstance(weight, Fp8Rows):
            raise ConfigError("the native backend has no fp8 products; the backends torch and flashinfer have")
        dtype = _checked_dtype("weight", weight.dtype)
        columns, depth = weight.shape
        self._num_packed["linear", dtype] += columns * depth
        if weight.dtype is torch.bfloat16 and depth % 2:
            raise ConfigError(
                f"the native backend multiplies bfloat16 in pairs: a weight's inputs, {depth}, are odd"
            )
        panels = self._take(self._library.faser_packed_bytes(columns, depth, dtype))
        wide = None
        if bias is not None:
            wide = torch.zeros(-(-columns // _MULTIPLE) * _MULTIPLE)
            wide[:columns] = bias
        linear = _NativeLinear(panels, wide, columns, depth, weight.dtype)
        source = weight.contiguous()
        self._library.faser_pack(self._pools.address, linear.address, source.data_ptr())
        return linear

    def linear(
        self, x: Tensor, packed: _NativeLinear | LowBitLinear, out: Tensor, *, residual: Tensor | None = None
    ) -> Tensor:
        if isinstance(packed, LowBitLinear) and packed.order is not None:
            x = x[:, packed.order]
        rows, stride = _rows(x, packed.depth)
        out_rows, out_stride = _rows(out, packed.columns)
        assert rows == out_rows, (rows, out_rows)
        address, residual_stride = None, 0
        if residual is not None:
            assert residual.dtype is out.dtype, (residual.dtype, out.dtype)
            address, residual_stride = residual.data_ptr(), residual.stride(0)
        if isinstance(packed, LowBitLinear):
            self._low_bit_call(
                self._pools.address,
                packed.address,
                x.data_ptr(),
                stride,
                DTYPES[x.dtype],
                rows,
                out.data_ptr(),
                out_stride,
                DTYPES[out.dtype],
                address,
                residual_stride,
                None,
            )
            return out
        assert x.dtype is packed.dtype, (x.dtype, packed.dtype)
        self._linear_call(
            self._pools.address,
            packed.address,
            x.data_ptr(),
            stride,
            rows,
            out.data_ptr(),
            out_stride,
            DTYPES[out.dtype],
            address,
            residual_stride,
        )
        return out

    def embed(self, token_ids: Tensor, packed: _NativeLinear | LowBitLinear, out: Tensor) -> Tensor:
        assert token_ids.dtype is torch.int64, token_ids.dtype
        assert token_ids.is_contiguous()
        assert out.is_contiguous()
        ids, count = token_ids.data_ptr(), token_ids.shape[0]
        assert out.shape == (count, packed.depth), out.shape
        if isinstance(packed, LowBitLinear):
            outside = self._library.faser_low_bit_embed(
                self._pools.address, packed.address, ids, count, out.data_ptr(), DTYPES[out.dtype]
            )
        else:
            assert out.dtype is packed.dtype, (out.dtype, packed.dtype)
            outside = self._library.faser_embed(self._pools.address, packed.address, ids, count, out.data_ptr())
        if outside >= 0:
            raise IndexError(f"token id {int(token_ids[outside])}; the embedding has {packed.columns} rows")
        if isinstance(packed, LowBitLinear) and packed.order is not None:
            out[:, packed.order] = out.clone()
        return out

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, out: Tensor, *, residual: Tensor | None = None
    ) -> Tensor:
        assert x.dtype is out.dtype, (x.dtype, out.dtype)
        assert weight.dtype is torch.float32, weight.dtype
        if residual is not None:
            assert residual.dtype is out.dtype, (residual.dtype, out.dtype)
            assert residual.stride() == out.stride(), (residual.stride(), out.stride())
        width = weight.shape[0]
        rows, stride = _rows(x, width)
        out_rows, out_stride = _rows(out, width)
        assert rows == out_rows, (rows, out_rows)
        self._rms_norm_call(
            self._pools.address,
            x.data_ptr(),
            stride,
            rows,
            width,
            weight.data_ptr(),
            eps,
            out.data_ptr(),
            out_stride,
            DTYPES[x.dtype],
            maybe(Tensor.data_ptr, residual),
        )
        return out

    def gate(self, gate_up: Tensor, out: Tensor, activation: Activation = Activation.SILU) -> Tensor:
        assert gate_up.dtype is out.dtype, (gate_up.dtype, out.dtype)
        width = out.shape[1]
        rows, stride = _rows(gate_up, 2 * width)
        out_rows, out_stride = _rows(out, width)
        assert rows == out_rows, (rows, out_rows)
        self._gate_call(
            self._pools.address,
            gate_up.data_ptr(),
            stride,
            rows,
            width,
            out.data_ptr(),
            out_stride,
            DTYPES[out.dtype],
            native_library.ACTIVATIONS[activation],
        )
        return out

    def count_experts(self) -> Callable[[], int]:
        count = self.experts_read
        return lambda: count

    def row_slots(self, _plan: AttentionPlan) -> None:
        """Return None: this backend pads no steps."""

    def experts(
        self,
        x: Tensor,
        block: Experts,
        hidden: Tensor,
        routed_by: Tensor | None = None,
        *,
        slots: Tensor | None = None,
    ) -> None:
        assert slots is None, "steps are not padded"
        of_router = or_else(routed_by, x)
        assert x.is_contiguous()
        assert of_router.is_contiguous()
        assert of_router.dtype is x.dtype, (of_router.dtype, x.dtype)
        assert hidden.is_contiguous()
        assert x.shape == hidden.shape, (x.shape, hidden.shape)
        assert x.dtype is hidden.dtype, (x.dtype, hidden.dtype)
        if not is_grouped(block):
            outputs = attrgetter("columns")
            self._read_one_by_one += experts_one_by_one(self, x, block, hidden, routed_by, outputs=outputs)
            return
        struct = experts_struct(block)
        self._library.faser_experts(
            self._pools.address,
            ctypes.addressof(struct),
            x.data_ptr(),
            of_router.data_ptr(),
            x.shape[0],
            hidden.data_ptr(),
            DTYPES[x.dtype],
        )

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> None:
        assert x.is_contiguous()
        assert x.dtype is gate.dtype, (x.dtype, gate.dtype)
        rows, stride = _rows(gate, x.shape[1])
        self._library.faser_sigmoid_gate(
            self._pools.address, x.data_ptr(), rows, x.shape[1], gate.data_ptr(), stride, DTYPES[x.dtype]
        )

    def allocate_states(self, shape: StateShape) -> NativeStates:
        return NativeStates(shape, _allocate)

    def mixes(self, _shape: MixerShape) -> bool:
        return True

    def mix(self, x: Tensor, rates: Tensor | None, mixer: Mixer, layer: int, step: StateStep, out: Tensor) -> None:
        """Compute a mixer, in torch where it has no native kernel. See Backend."""
        if not isinstance(mixer, DeltaNet | ShortConv):
            mixer.mix(x, rates, step.states.layers[layer], step, out)
            return
        for each in (x, out):
            assert each.is_contiguous()
        assert x.dtype is out.dtype, (x.dtype, out.dtype)
        assert x.shape[1] == mixer.shape.columns, (x.shape, mixer.shape)
        states, step_address = step.states.layer(layer), self._state_steps.address(step)
        pools, dtype = self._pools.address, DTYPES[x.dtype]
        if isinstance(mixer, ShortConv):
            weights = ctypes.addressof(short_conv_struct(mixer))
            self._library.faser_short_conv(
                pools, weights, states, step_address, x.data_ptr(), out.data_ptr(), dtype
            )
            return
        assert rates is not None, "a delta net has rates"
        assert rates.is_contiguous()
        assert rates.dtype is torch.float32, rates.dtype
        weights = ctypes.addressof(delta_net_struct(mixer))
        self._library.faser_delta_net(
            pools, weights, states, step_address, x.data_ptr(), rates.data_ptr(), out.data_ptr(), dtype
        )

    def allocate_kv(self, shape: KvShape) -> _NativeCache:
        """See Backend. Raises ConfigError for a block_size or head_dim that is no multiple of 16, and a dtype."""
        check_cache_dtype(self.name, shape.dtype, tuple(_KV_DTYPES))
        sizes = sorted({head_dim for _, head_dim in shape.heads})
        for name, value in (("block_size", shape.block_size), *(("head_dim", each) for each in sizes)):
            if value < 1 or value % _MULTIPLE:
                raise ConfigError(
                    f"the native backend needs a {name} that is a multiple of {_MULTIPLE}, not {value}"
                )
        if shape.dtype is torch.int8 and sizes[-1] > _MOST_HEAD_DIM:
            raise ConfigError(
                f"the native backend keeps heads of up to {_MOST_HEAD_DIM} in int8; head_dim is {sizes[-1]}"
            )
        return _NativeCache(_allocate(shape.total_bytes), shape)

    def plan(self, layout: RowLayout, block_size: int) -> _NativePlan:
        starts, positions, table = (
            np.ascontiguousarray(part.numpy(), dtype=np.int32)
            for part in (layout.query_start, layout.positions, layout.block_table)
        )
        num_sequences, width = table.shape
        address = self._library.faser_plan_new(
            starts.ctypes.data,
            positions.ctypes.data,
            None,
            table.ctypes.data,
            num_sequences,
            len(positions),
            width,
            block_size,
        )
        return _NativePlan(address, len(positions), self._library)

    def rope_append(
        self,
        qkv: Tensor,
        angles: Tensor | None,
        cache: _NativeCache,
        layer: int,
        shape: AttentionShape,
        plan: _NativePlan,
        *,
        query_angles: Tensor | None = None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        v_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        assert cache.shape.dtype in (qkv.dtype, torch.int8), (qkv.dtype, cache.shape.dtype)
        rows, stride = _rows(qkv, shape.qkv_size)
        assert rows == plan.num_rows, (rows, plan.num_rows)
        num_kv_heads = 0 if shape.reads_other else shape.num_kv_heads
        assert cache.shape.heads[layer] == (num_kv_heads, shape.head_dim), (cache.shape.heads[layer], shape)
        self._rope_append_call(
            self._pools.address,
            cache.layer(layer),
            plan.address,
            shape.num_heads,
            qkv.data_ptr(),
            stride,
            *(maybe(Tensor.data_ptr, each) for each in (angles, query_angles, q_norm, k_norm, v_norm)),
            eps,
            DTYPES[qkv.dtype],
        )
        return qkv[:, : shape.num_heads * shape.head_dim]

    def attend(
        self,
        q: Tensor,
        cache: _NativeCache,
        layer: int,
        shape: AttentionShape,
        plan: _NativePlan,
        out: Tensor,
        *,
        sinks: Tensor | None = None,
    ) -> Tensor:
        width = shape.num_heads * shape.head_dim
        rows, stride = _rows(q, width)
        out_rows, out_stride = _rows(out, width)
        assert rows == out_rows == plan.num_rows, (rows, out_rows, plan.num_rows)
        assert q.dtype is out.dtype, (q.dtype, out.dtype)
        assert cache.shape.dtype in (q.dtype, torch.int8), (q.dtype, cache.shape.dtype)
        heads = self._heads[shape] if sinks is None else heads_struct(shape, sinks)
        self._attend_call(
            self._pools.address,
            cache.layer(layer),
            plan.address,
            ctypes.addressof(heads),
            q.data_ptr(),
            stride,
            out.data_ptr(),
            out_stride,
            DTYPES[q.dtype],
        )
        return out

    def _take(self, num_bytes: int) -> Tensor:
        """A piece of the current slab. Pieces keep their slab alive."""
        rounded = -(-num_bytes // 64) * 64
        if len(self._slab) < rounded:
            self._slab = _allocate(max(rounded, _SLAB_BYTES))
        piece, self._slab = self._slab[:num_bytes], self._slab[rounded:]
        return piece


def _allocate(num_bytes: int) -> Tensor:
    """Zeroed bytes at a huge page boundary, in huge pages if available. Untouched pages cost no memory."""
    # Private: shared memory, the default, gets no huge pages.
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE_BYTES
    return whole[start : start + num_bytes]


def _rows(x: Tensor, width: int) -> tuple[int, int]:
    """The number of rows of x and their stride in values; asserts that each row is `width` contiguous values."""
    (rows, columns), (stride, step) = x.shape, x.stride()
    assert columns == width, (columns, width)
    assert step == 1, step
    return rows, stride


def _checked_dtype(what: str, dtype: torch.dtype) -> int:
    if dtype not in DTYPES:
        names = " and ".join(str(each).removeprefix("torch.") for each in (torch.bfloat16, torch.float32))
        raise ConfigError(f"the native backend computes in {names}; the {what} is {dtype}".replace("torch.", ""))
    return DTYPES[dtype]
