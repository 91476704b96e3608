"""The CUDA backend: FlashInfer's paged attention and fused kernels, torch's matrix products. bfloat16 and float16.

Owns the cache's layout and one set of attention wrappers with its workspace; where kernels come from is in
flashinfer_library, what only CUDA has is in cuda_device. A step is planned once for each kind of attention layer
that a model has, from arrays on the host. Only planning waits for the device, until it has copied what was planned
before. Like torch's, its products may give a row other bits in another batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from faser.errors import ConfigError
from faser.kernels.backend import AttentionShape, KvShape, RowLayout
from faser.kernels.cuda_device import Accelerator, Fence
from faser.kernels.flashinfer_library import FlashInfer, PagedAttention
from faser.kernels.paged_layout import PagedLayout, paged_layout
from faser.kernels.token_choice import TokenChoice

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128)  # the sizes that kernels are compiled for
_WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends for the partial results of split sequences
# From this many query heads a KV head on, a row of them fills a tile of the tensor cores well enough.
_TENSOR_CORE_GROUP = 4


@dataclass(frozen=True, slots=True)
class _Linear:
    weight: Tensor  # [N, K]
    bias: Tensor | None  # [N]


@dataclass(frozen=True, slots=True)
class _Cache:
    """data: [L, blocks, 2, block_size, Hkv, D], keys then values: kernels want the same strides for both."""

    data: Tensor

    @property
    def block_size(self) -> int:
        return self.data.shape[3]


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """A digested layout. `host` is read when attention is planned, `device` by kernels."""

    host: PagedLayout
    device: PagedLayout
    block_size: int


@dataclass(frozen=True, slots=True)
class _Kind:
    """What one wrapper is planned for, beside the layout."""

    shape: AttentionShape
    dtype: torch.dtype
    one_row_each: bool


@dataclass(slots=True)
class _Planned:
    """A wrapper, and the layout it is planned for. copied: behind the copy of what planning left in its buffer."""

    wrapper: PagedAttention
    plan: _Plan | None = None
    copied: Fence | None = None


class FlashInferBackend:
    """See Backend. Nothing is allocated on the device before it is needed."""

    def __init__(self, accelerator: Accelerator, library: FlashInfer) -> None:
        self.device = accelerator.device
        self.name = "flashinfer"
        self.token_choice: TokenChoice | None = None
        self._accelerator = accelerator
        self._library = library
        self._workspace: Tensor | None = None
        self._planned: dict[_Kind, _Planned] = {}

    def use(self, cores: tuple[int, ...] | None) -> None:
        """See Backend. A GPU has no cores to be named: only None is possible."""
        if cores is not None:
            raise ConfigError(f"the flashinfer backend computes on {self.device}; it cannot use cores {cores}")

    def beside(self) -> "FlashInferBackend":
        """See Backend. The other one has wrappers and a workspace of its own."""
        return FlashInferBackend(self._accelerator, self._library)

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> _Linear:
        """See Backend. Raises ConfigError for dtypes but bfloat16 and float16."""
        _check_dtype("weight", weight.dtype)
        return _Linear(
            weight.to(self.device, copy=True).contiguous(),
            None if bias is None else bias.to(self.device, weight.dtype, copy=True),
        )

    def linear(self, x: Tensor, packed: _Linear, out: Tensor, *, residual: Tensor | None = None) -> Tensor:
        weight, bias = packed.weight.t(), packed.bias
        if out.dtype is not x.dtype:
            into = out if residual is None else torch.empty_like(out)
            product = self._accelerator.wide_product(x, weight, into)
            if bias is not None:
                product += bias
            return product if residual is None else torch.add(product, residual, out=out)
        start = bias if residual is None else residual
        if start is None:
            return torch.mm(x, weight, out=out)
        torch.addmm(start, x, weight, out=out)
        if residual is not None and bias is not None:
            out += bias
        return out

    def embed(self, token_ids: Tensor, packed: _Linear, out: Tensor) -> Tensor:
        return torch.index_select(packed.weight, 0, token_ids.to(self.device, non_blocking=True), out=out)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        return self._library.rmsnorm(input=x, weight=weight, eps=eps, out=out)

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> Tensor:
        return self._library.silu_and_mul(input=gate_up, out=out)

    def allocate_kv(self, shape: KvShape) -> _Cache:
        """See Backend. Raises ConfigError for a dtype or head size without kernels."""
        _check_dtype("KV cache", shape.dtype)
        if shape.head_dim not in HEAD_DIMS:
            sizes = " and ".join(map(str, HEAD_DIMS))
            raise ConfigError(f"the flashinfer backend has kernels for heads of {sizes}, not {shape.head_dim}")
        size = (shape.num_layers, shape.num_blocks, 2, shape.block_size, shape.num_kv_heads, shape.head_dim)
        return _Cache(torch.zeros(size, dtype=shape.dtype, device=self.device))

    def plan(self, layout: RowLayout, block_size: int) -> _Plan:
        """See Backend. One transfer; attention is planned when the first layer of a kind comes."""
        host = paged_layout(layout, block_size, self._accelerator.host_numbers)
        return _Plan(host, host.within(self._accelerator.upload(host.packed)), block_size)

    def rope_append(
        self,
        qkv: Tensor,
        angles: Tensor | None,
        cache: _Cache,
        layer: int,
        shape: AttentionShape,
        plan: _Plan,
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        heads = qkv.view(len(qkv), -1, shape.head_dim)
        first_value = shape.num_heads + shape.num_kv_heads
        queries, keys, values = heads.tensor_split((shape.num_heads, first_value), dim=1)
        for part, weight in ((queries, q_norm), (keys, k_norm)):
            if weight is not None:
                self._library.rmsnorm(input=part, weight=weight, eps=eps, out=part)
        q_width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        rows = plan.device
        if angles is not None:
            self._library.apply_rope_with_cos_sin_cache_inplace(
                positions=rows.positions,
                query=qkv[:, :q_width],
                key=qkv[:, q_width : q_width + kv_width],
                head_size=shape.head_dim,
                cos_sin_cache=angles,
                is_neox=True,
            )
        self._library.append_paged_kv_cache(
            append_key=keys,
            append_value=values,
            batch_indices=rows.sequences,
            positions=rows.positions,
            paged_kv_cache=cache.data[layer],
            kv_indices=rows.page_indices,
            kv_indptr=rows.page_indptr,
            kv_last_page_len=rows.last_page_len,
            kv_layout="NHD",
        )
        return qkv[:, :q_width]

    def attend(
        self, q: Tensor, cache: _Cache, layer: int, shape: AttentionShape, plan: _Plan, out: Tensor
    ) -> Tensor:
        assert plan.block_size == cache.block_size, (plan.block_size, cache.block_size)
        assert out.is_contiguous(), out.stride()
        wrapper = self._wrapper(_Kind(shape, cache.data.dtype, plan.host.one_row_each), plan)
        size = (len(q), shape.num_heads, shape.head_dim)
        wrapper.run(q=q.view(size), paged_kv_cache=cache.data[layer], out=out.view(size))
        return out

    def copy_blocks(self, cache: _Cache, pairs: list[tuple[int, int]]) -> None:
        if not pairs:
            return
        sources, targets = torch.tensor(pairs, device=self.device).unbind(1)
        cache.data[:, targets] = cache.data[:, sources]

    def _wrapper(self, kind: _Kind, plan: _Plan) -> PagedAttention:
        """The wrapper of a kind, planned for plan."""
        planned = self._planned.get(kind)
        if planned is None:
            planned = self._planned[kind] = _Planned(self._new_wrapper(kind))
        if planned.plan is not plan:
            if planned.copied is not None:
                planned.copied.wait()
            _plan_attention(planned.wrapper, kind, plan)
            planned.plan, planned.copied = plan, self._accelerator.fence()
        return planned.wrapper

    def _new_wrapper(self, kind: _Kind) -> PagedAttention:
        """fa2 by name: what FlashInfer chooses on its own may be a kernel that was not compiled."""
        if self._workspace is None:
            self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        make: Callable[..., PagedAttention] = self._library.BatchPrefillWithPagedKVCacheWrapper
        options: dict[str, Any] = {}
        if kind.one_row_each:
            make = self._library.BatchDecodeWithPagedKVCacheWrapper
            group = kind.shape.num_heads // kind.shape.num_kv_heads
            options["use_tensor_cores"] = group >= _TENSOR_CORE_GROUP
        return make(float_workspace_buffer=self._workspace, kv_layout="NHD", backend="fa2", **options)


def _plan_attention(wrapper: PagedAttention, kind: _Kind, plan: _Plan) -> None:
    """Plan from host arrays; only the page numbers, which no planner reads, are the device's."""
    host, shape = plan.host, kind.shape
    # FlashInfer counts the positions to the left of a row, ours counts the row itself too.
    options: dict[str, Any] = {
        "num_qo_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "page_size": plan.block_size,
        "sm_scale": shape.scale,
        "window_left": -1 if shape.window is None else shape.window - 1,
        "q_data_type": kind.dtype,
        "kv_data_type": kind.dtype,
        "seq_lens": host.seq_len,
    }
    if kind.one_row_each:
        wrapper.plan(
            indptr=host.page_indptr,
            indices=plan.device.page_indices,
            last_page_len=host.last_page_len,
            head_dim=shape.head_dim,
            **options,
        )
    else:
        wrapper.plan(
            qo_indptr=host.query_indptr,
            paged_kv_indptr=host.page_indptr,
            paged_kv_indices=plan.device.page_indices,
            paged_kv_last_page_len=host.last_page_len,
            head_dim_qk=shape.head_dim,
            causal=True,
            **options,
        )


def _check_dtype(what: str, dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        names = " and ".join(map(str, DTYPES))
        raise ConfigError(
            f"the flashinfer backend computes in {names}; the {what} is {dtype}".replace("torch.", "")
        )
