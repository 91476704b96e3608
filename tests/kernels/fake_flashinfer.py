"""FlashInfer's paged attention in plain torch, from its documentation, and a device that is the CPU.

Every call is bound to the real signatures first, so a wrong name or a missing argument fails here too. Wrappers
read only what plan and run were given, and check what the real ones check, or silently get wrong: types, memory
order, pages that do not exist, a plan that another one has overwritten before it was copied.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.kernels.flashinfer_signatures import signature


@dataclass
class FakeFence:
    owner: "FakeAccelerator"
    number: int

    def wait(self) -> None:
        self.owner.done = max(self.owner.done, self.number)


@dataclass
class FakeAccelerator:
    """given: pieces of work given to the device so far; done: how many are known to be done."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    given: int = 0
    done: int = 0
    uploads: int = 0

    def host_numbers(self, count: int) -> Tensor:
        return torch.full((count,), -7, dtype=torch.int32)

    def upload(self, numbers: Tensor) -> Tensor:
        self.uploads += 1
        return numbers.clone()

    def fence(self) -> FakeFence:
        return FakeFence(self, self.given)

    def wide_product(self, x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        assert x.dtype is weight.dtype, (x.dtype, weight.dtype)
        assert out.dtype is torch.float32, out.dtype
        return torch.mm(x.float(), weight.float(), out=out)


def bound(name: str, arguments: tuple[Any, ...], options: dict[str, Any], *understood: str) -> dict[str, Any]:
    """What a call gives, by parameter. An argument that the emulation does not understand fails."""
    given = signature(name).bind(*arguments, **options).arguments
    given.pop("self", None)
    strange = set(given) - set(understood)
    assert not strange, f"{name} is emulated without {strange}"
    return given


def check_indices(*arrays: Tensor) -> None:
    for each in arrays:
        assert each.dtype is torch.int32, each.dtype
        assert each.is_contiguous()
        assert each.ndim == 1


class FakeFlashInfer:
    """calls: how often each function, and each wrapper's plan and run, was called."""

    def __init__(self, accelerator: FakeAccelerator) -> None:
        self.accelerator = accelerator
        self.calls: Counter[str] = Counter()
        self.wrappers: list[FakeWrapper] = []

    def rmsnorm(self, *arguments: Any, **options: Any) -> Tensor:
        self.calls["rmsnorm"] += 1
        given = bound("rmsnorm", arguments, options, "input", "weight", "eps", "out")
        x, weight, out = given["input"], given["weight"], given["out"]
        assert x.dtype is weight.dtype is out.dtype, (x.dtype, weight.dtype, out.dtype)
        assert x.ndim in (2, 3)
        assert x.shape == out.shape, (x.shape, out.shape)
        assert x.stride(-1) == out.stride(-1) == 1
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + given["eps"]) * weight.float()
        return out.copy_(scaled)  # type: ignore[no-any-return]

    def silu_and_mul(self, *arguments: Any, **options: Any) -> Tensor:
        self.calls["silu_and_mul"] += 1
        given = bound("silu_and_mul", arguments, options, "input", "out")
        x, out = given["input"], given["out"]
        assert x.dtype is out.dtype, (x.dtype, out.dtype)
        assert x.is_contiguous()
        assert out.is_contiguous()
        assert x.shape == (len(out), 2 * out.shape[1]), (x.shape, out.shape)
        gate, up = x.float().chunk(2, dim=-1)
        return out.copy_(functional.silu(gate) * up)  # type: ignore[no-any-return]

    def apply_rope_with_cos_sin_cache_inplace(self, *arguments: Any, **options: Any) -> None:
        self.calls["rope"] += 1
        name = "apply_rope_with_cos_sin_cache_inplace"
        given = bound(
            name, arguments, options, "positions", "query", "key", "head_size", "cos_sin_cache", "is_neox"
        )
        positions, angles, size = given["positions"], given["cos_sin_cache"], given["head_size"]
        check_indices(positions)
        assert angles.dtype is torch.float32
        assert angles.is_contiguous()
        assert given.get("is_neox", True), "pairs of neighbours are not emulated"
        for part in (given["query"], given["key"]):
            heads = part.view(len(positions), -1, size)
            cos, sin = angles[positions.long()][:, None].chunk(2, dim=-1)
            first, second = heads.float().chunk(2, dim=-1)
            heads.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), -1))

    def append_paged_kv_cache(self, *arguments: Any, **options: Any) -> None:
        self.calls["append"] += 1
        given = bound(
            "append_paged_kv_cache",
            arguments,
            options,
            "append_key",
            "append_value",
            "batch_indices",
            "positions",
            "paged_kv_cache",
            "kv_indices",
            "kv_indptr",
            "kv_last_page_len",
            "kv_layout",
        )
        assert given.get("kv_layout", "NHD") == "NHD"
        cache, pages, starts = given["paged_kv_cache"], given["kv_indices"], given["kv_indptr"]
        last, owners, positions = given["kv_last_page_len"], given["batch_indices"], given["positions"]
        check_indices(pages, starts, last, owners, positions)
        page_size, owner = cache.shape[2], owners.long()
        lengths = (starts.diff() - 1) * page_size + last
        assert (positions < lengths[owner]).all(), "a position is appended behind the end of its sequence"
        found = pages[starts[owner] + positions // page_size].long()
        for part, values in enumerate((given["append_key"], given["append_value"])):
            assert values.stride(-1) == 1
            assert values.dtype is cache.dtype, (values.dtype, cache.dtype)
            cache[found, part, (positions % page_size).long()] = values

    def BatchPrefillWithPagedKVCacheWrapper(self, *arguments: Any, **options: Any) -> "FakePrefill":
        return FakePrefill(self, arguments, options)

    def BatchDecodeWithPagedKVCacheWrapper(self, *arguments: Any, **options: Any) -> "FakeDecode":
        return FakeDecode(self, arguments, options)


@dataclass(frozen=True)
class Planned:
    """What a wrapper keeps of a plan. Pages are not copied: a device tensor is used as it is."""

    starts: list[int]
    page_starts: list[int]
    pages: Tensor
    last_page_len: list[int]
    page_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window_left: int
    dtype: torch.dtype


class FakeWrapper:
    """What prefill and decode have in common."""

    name: str
    own_options: tuple[str, ...] = ()

    def __init__(self, library: FakeFlashInfer, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        understood = ("float_workspace_buffer", "kv_layout", "backend", *self.own_options)
        self.options = bound(f"{self.name}.__init__", (None, *arguments), options, *understood)
        assert self.options.get("kv_layout", "NHD") == "NHD"
        assert self.options.get("backend") == "fa2", "auto may choose a kernel that was not compiled"
        self.workspace: Tensor = self.options["float_workspace_buffer"]
        assert self.workspace.dtype is torch.uint8
        self.library = library
        self.planned: Planned | None = None
        self._copied_at = 0  # how much work must be done before the staging buffer may be filled again
        library.wrappers.append(self)

    def _staged(self) -> None:
        accelerator = self.library.accelerator
        assert accelerator.done >= self._copied_at, "planned again while the last plan may still be copied"
        accelerator.given += 1
        self._copied_at = accelerator.given
        self.library.calls[f"{self.name}.plan"] += 1

    def _keep(
        self, given: dict[str, Any], starts: Tensor, page_starts: Tensor, pages: Tensor, last: Tensor
    ) -> None:
        check_indices(starts, page_starts, pages, last)
        lengths = (page_starts.diff() - 1) * given["page_size"] + last
        assert given.get("seq_lens") is None or torch.equal(given["seq_lens"], lengths), "two truths about lengths"
        # What is not given defaults to float16, as in the real one.
        dtype = given.get("q_data_type", torch.float16)
        assert given.get("kv_data_type", dtype) is dtype
        head_dim = given["head_dim_qk"] if "head_dim_qk" in given else given["head_dim"]
        self.planned = Planned(
            starts=starts.tolist(),
            page_starts=page_starts.tolist(),
            pages=pages,
            last_page_len=last.tolist(),
            page_size=given["page_size"],
            num_heads=given["num_qo_heads"],
            num_kv_heads=given["num_kv_heads"],
            head_dim=head_dim,
            scale=given.get("sm_scale", 1 / math.sqrt(head_dim)),
            window_left=given.get("window_left", -1),
            dtype=dtype,
        )

    def run(self, *arguments: Any, **options: Any) -> Tensor:
        self.library.calls[f"{self.name}.run"] += 1
        given = bound(f"{self.name}.run", (self, *arguments), options, "q", "paged_kv_cache", "out")
        planned = self.planned
        assert planned is not None, "run before plan"
        q, cache, out = given["q"], given["paged_kv_cache"], given["out"]
        assert q.dtype is cache.dtype is out.dtype is planned.dtype, (q.dtype, cache.dtype, planned.dtype)
        assert q.shape == out.shape == (planned.starts[-1], planned.num_heads, planned.head_dim), q.shape
        assert q.stride(-1) == 1
        assert out.is_contiguous()
        assert cache.shape[1:] == (2, planned.page_size, planned.num_kv_heads, planned.head_dim), cache.shape
        for first, end, keys, values in _sequences(planned, cache):
            out[first:end] = _attention(q[first:end], keys, values, planned)
        return out  # type: ignore[no-any-return]


class FakePrefill(FakeWrapper):
    name = "BatchPrefillWithPagedKVCacheWrapper"

    def plan(self, *arguments: Any, **options: Any) -> None:
        given = bound(
            f"{self.name}.plan",
            (self, *arguments),
            options,
            "qo_indptr",
            "paged_kv_indptr",
            "paged_kv_indices",
            "paged_kv_last_page_len",
            "num_qo_heads",
            "num_kv_heads",
            "head_dim_qk",
            "page_size",
            "causal",
            "sm_scale",
            "window_left",
            "q_data_type",
            "kv_data_type",
            "seq_lens",
        )
        assert given.get("causal"), "attention to all positions is not emulated"
        self._staged()
        pages, last = given["paged_kv_indices"], given["paged_kv_last_page_len"]
        self._keep(given, given["qo_indptr"], given["paged_kv_indptr"], pages, last)


class FakeDecode(FakeWrapper):
    name = "BatchDecodeWithPagedKVCacheWrapper"
    own_options = ("use_tensor_cores",)

    def plan(self, *arguments: Any, **options: Any) -> None:
        given = bound(
            f"{self.name}._plan_impl",
            (self, *arguments),
            options,
            "indptr",
            "indices",
            "last_page_len",
            "num_qo_heads",
            "num_kv_heads",
            "head_dim",
            "page_size",
            "sm_scale",
            "window_left",
            "q_data_type",
            "kv_data_type",
            "seq_lens",
        )
        self._staged()
        rows = torch.arange(len(given["indptr"]), dtype=torch.int32)
        self._keep(given, rows, given["indptr"], given["indices"], given["last_page_len"])


def _sequences(planned: Planned, cache: Tensor) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """(first row, end row, keys, values) of every sequence; keys and values: [length, Hkv, D]."""
    for index, last in enumerate(planned.last_page_len):
        assert 1 <= last <= planned.page_size, last
        pages = planned.pages[planned.page_starts[index] : planned.page_starts[index + 1]].long()
        length = (len(pages) - 1) * planned.page_size + last
        found = cache[pages]  # [pages, 2, page_size, Hkv, D]
        keys, values = (found[:, part].flatten(0, 1)[:length] for part in (0, 1))
        yield planned.starts[index], planned.starts[index + 1], keys, values


def _attention(q: Tensor, keys: Tensor, values: Tensor, planned: Planned) -> Tensor:
    """The last row sees the last position, and every row before it one less: causal from the bottom right."""
    group = planned.num_heads // planned.num_kv_heads
    wide = [each.float().repeat_interleave(group, 1) for each in (keys, values)]
    rows = torch.arange(len(q))[:, None] + len(keys) - len(q)
    columns = torch.arange(len(keys))[None]
    seen = columns <= rows
    if planned.window_left >= 0:
        seen &= columns >= rows - planned.window_left
    scores = torch.einsum("rhd,chd->hrc", q.float(), wide[0]) * planned.scale
    return torch.einsum("hrc,chd->rhd", scores.masked_fill(~seen, -math.inf).softmax(-1), wide[1])
