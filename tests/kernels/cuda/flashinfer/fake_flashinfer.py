"""FlashInfer's kernels in torch operators, from its documentation and the sources of its planner.

Every call is bound to the real signatures first, so a wrong name or a missing argument fails here too. Wrappers
read only what plan and run were given, and check what the real ones check, or silently get wrong: types, memory
order, pages that do not exist, a plan that another one has overwritten before it was copied, a workspace that is
too small. A wrapper for CUDA graphs gets its arrays from its maker; its first plan bounds its rows;
what a kernel finds in them must be what was planned last. Rows that belong to no sequence get numbers that are
none.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from faser.kernels.cuda.flashinfer.library import planning_wrapper
from tests.kernels.cuda.fake_device import FakeAccelerator
from tests.kernels.cuda.flashinfer.signatures import signature


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

    def BatchPrefillWithPagedKVCacheWrapper(self, *arguments: Any, **options: Any) -> "FakePrefill":
        found: FakePrefill = planning_wrapper(FakePrefill)(self, arguments, options)
        return found

    def BatchDecodeWithPagedKVCacheWrapper(self, *arguments: Any, **options: Any) -> "FakeDecode":
        found: FakeDecode = planning_wrapper(FakeDecode)(self, arguments, options)
        return found


@dataclass(frozen=True)
class Static:
    """The part of a plan that enters a launch, and so a captured graph."""

    page_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window_left: int
    cap: float
    dtype: torch.dtype
    kv_dtype: torch.dtype


@dataclass(frozen=True)
class Arrays:
    """Where a kernel finds the layout, on the device. query_starts: None: one row each."""

    query_starts: Tensor | None
    page_starts: Tensor
    pages: Tensor
    last_page_len: Tensor


@dataclass(frozen=True)
class Planned:
    """What a plan is of: first rows, pieces of every sequence, tokens of a piece (None: no sequence is cut)."""

    rows: list[int]
    pieces: list[int]
    chunk_tokens: int | None
    tile: int

    def check_lengths(self, lengths: Tensor, static: Static) -> None:
        """The kernel counts the pieces of a sequence by itself; it must count those that were planned.

        Or fewer, where each sequence has one row: more rows would be laid out by the number that it counts.
        """
        if self.chunk_tokens is None:
            return
        most = static.window_left + self.tile if static.window_left >= 0 else max(lengths.tolist())
        counted = [math.ceil(min(each, most) / self.chunk_tokens) for each in lengths.tolist()]
        one_row_each = self.rows == [*range(len(self.rows))]
        expected = [min(pair) for pair in zip(counted, self.pieces, strict=True)] if one_row_each else self.pieces
        assert counted == expected, "the plan is of another layout than the lengths"


class FakePlanner:
    """A compiled module, as far as it plans."""

    def __init__(self, wrapper: "FakeWrapper") -> None:
        self._wrapper = wrapper

    def plan(self, *arguments: Any) -> list[int]:
        starts, page_starts, lengths = arguments[3:6]
        assert len(lengths) == len(page_starts) - 1
        return self._wrapper.plan_pieces(starts, page_starts, left_out=arguments[18])


class FakeWrapper:
    """What prefill and decode have in common."""

    name: str
    own_options: tuple[str, ...] = ()
    left_out_blocks: int  # planning_wrapper adds it
    buffers: tuple[str, ...]  # constructor's names of query starts (prefill), page starts, pages, last_page_len

    def __init__(self, library: FakeFlashInfer, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        understood = ("float_workspace_buffer", "kv_layout", "backend", "use_cuda_graph")
        self.options = bound(
            f"{self.name}.__init__", (None, *arguments), options, *understood, *self.own_options, *self.buffers
        )
        assert self.options.get("kv_layout", "NHD") == "NHD"
        assert self.options.get("backend") == "fa2", "auto may choose a kernel that was not compiled"
        self.workspace: Tensor = self.options["float_workspace_buffer"]
        assert self.workspace.dtype is torch.uint8
        library.accelerator.check_not_capturing("a wrapper is made")
        self.library = library
        self.is_fixed = bool(self.options.get("use_cuda_graph", False))
        self.static: Static | None = None
        self.arrays: Arrays | None = self._own_arrays() if self.is_fixed else None
        self.most_rows: int | None = None
        self.planned: Planned | None = None  # what the plan on the device is of
        self.rows_each: int | None = None  # of every sequence in every plan, as promised
        self._cached_module: Any = None
        self.most_pieces = 0  # of the last plan, for each KV head
        self._pinned = torch.zeros(64, dtype=torch.uint8)
        self._copied_at = 0  # how much work must be done before the staging buffer may be filled again
        library.wrappers.append(self)

    def reset_workspace_buffer(self, *arguments: Any, **options: Any) -> None:
        name = f"{self.name}.reset_workspace_buffer"
        given = bound(name, (self, *arguments), options, "float_workspace_buffer", "int_workspace_buffer")
        assert self.planned is None, "a graph has captured where the plan was"
        assert given["float_workspace_buffer"] is self.workspace
        assert given["int_workspace_buffer"].dtype is torch.uint8

    def _own_arrays(self) -> Arrays:
        buffers = [self.options[name] for name in self.buffers]
        check_indices(*buffers)
        *query_starts, page_starts, pages, last = buffers
        assert len(page_starts) == len(last) + 1, (len(page_starts), len(last))
        if query_starts:
            assert len(query_starts[0]) == len(last) + 1, (len(query_starts[0]), len(last))
        return Arrays(query_starts[0] if query_starts else None, page_starts, pages, last)

    def _plan(
        self, given: dict[str, Any], starts: Tensor | None, page_starts: Tensor, pages: Tensor, last: Tensor
    ) -> None:
        accelerator = self.library.accelerator
        accelerator.check_not_capturing("attention is planned")
        self.library.calls[f"{self.name}.plan"] += 1
        check_indices(page_starts, pages, last, *([] if starts is None else [starts]))
        lengths = (page_starts.diff() - 1) * given["page_size"] + last
        assert given.get("seq_lens") is None or torch.equal(given["seq_lens"], lengths), "two truths about lengths"
        starts_of_rows = torch.arange(len(last) + 1, dtype=torch.int32) if starts is None else starts
        self._place(int(starts_of_rows[-1]), starts, page_starts, pages, last)
        self._keep(given)
        self._cached_module = FakePlanner(self)
        layout, not_read = (starts_of_rows, page_starts, lengths), [0] * 11
        self._cached_module.plan("floats", "numbers", self._pinned, *layout, *not_read, False, 0, 0, False)

    def plan_pieces(self, starts: Tensor, page_starts: Tensor, *, left_out: int) -> list[int]:
        """The compiled planner: cuts sequences so that their tiles fill the device."""
        accelerator, static = self.library.accelerator, self.static
        assert static is not None
        accelerator.check_not_capturing("attention is planned")
        assert accelerator.done >= self._copied_at, "planned again while the last plan may still be copied"
        self.library.calls[f"{self.name}.planner"] += 1
        rows, pages = starts.tolist(), page_starts.diff().tolist()
        group, tile = static.num_heads // static.num_kv_heads, 16
        if self.options.get("use_tensor_cores", True) is False:
            assert not left_out, "this planner always takes all processors"
        self.most_pieces = max((2 * accelerator.num_processors - left_out) // static.num_kv_heads, 1)
        tiles = [math.ceil((end - start) * group / tile) for start, end in pairwise(rows)]
        if static.window_left >= 0:
            pages = [min(each, math.ceil((static.window_left + tile) / static.page_size)) for each in pages]
        chunk = 1
        while (
            chunk < max(pages)
            and sum(n * math.ceil(p / chunk) for n, p in zip(tiles, pages, strict=True)) > self.most_pieces
        ):
            chunk += 1
        chunk_tokens = chunk * static.page_size
        self.planned = Planned(rows, [math.ceil(each / chunk) for each in pages], chunk_tokens, tile)
        if self.is_fixed:
            self._check_workspace(rows)
        self._pinned[8:12].view(torch.int32)[0] = chunk_tokens
        accelerator.given += 1
        self._copied_at = accelerator.given
        return [0, 0, 0, tile, 0, 0, 0, 0, 0, 8, 0, 0, 0, 1, 1]

    def _place(
        self, num_rows: int, starts: Tensor | None, page_starts: Tensor, pages: Tensor, last: Tensor
    ) -> None:
        """Copy the layout to where the kernel looks for it."""
        accelerator = self.library.accelerator
        assert not accelerator.is_pinned(pages), "planning waits for pages that it has to bring from the host"
        for each in (starts, page_starts, last):
            if each is not None:
                accelerator.reads(each)
        if not self.is_fixed:
            self.arrays = Arrays(
                None if starts is None else starts.clone(), page_starts.clone(), pages, last.clone()
            )
            return
        assert self.arrays is not None
        if self.most_rows is None:
            self.most_rows = num_rows
        assert num_rows <= self.most_rows, f"{num_rows} rows exceed those of the first plan, {self.most_rows}"
        assert len(last) == len(self.arrays.last_page_len), "the batch size is fixed"
        assert len(pages) <= len(self.arrays.pages), (len(pages), len(self.arrays.pages))
        if starts is not None:
            assert self.arrays.query_starts is not None
            self.arrays.query_starts.copy_(starts)
        self.arrays.page_starts.copy_(page_starts)
        self.arrays.last_page_len.copy_(last)
        self.arrays.pages[: len(pages)].copy_(pages)

    def _keep(self, given: dict[str, Any]) -> None:
        # What is not given defaults to float16, as in the real one.
        dtype = given.get("q_data_type", torch.float16)
        kv_dtype = given.get("kv_data_type", dtype)
        dtypes = (torch.bfloat16, torch.float16, torch.float32)  # float32: of tests that compare tokens of ranks
        assert dtype in dtypes, "fa2 has no products of 8-bit queries"
        assert kv_dtype in (dtype, torch.float8_e4m3fn), (dtype, kv_dtype)
        head_dim = given["head_dim_qk"] if "head_dim_qk" in given else given["head_dim"]
        self.static = Static(
            page_size=given["page_size"],
            num_heads=given["num_qo_heads"],
            num_kv_heads=given["num_kv_heads"],
            head_dim=head_dim,
            scale=given.get("sm_scale", 1 / math.sqrt(head_dim)),
            window_left=given.get("window_left", -1),
            cap=given.get("logits_soft_cap") or 0.0,
            dtype=dtype,
            kv_dtype=kv_dtype,
        )

    def _check_workspace(self, rows: list[int]) -> None:
        """Partial results of a fixed plan that splits: as the planner for tensor cores counts them."""
        assert self.static is not None
        if self.options.get("use_tensor_cores", True) is False:
            return
        static, group = self.static, self.static.num_heads // self.static.num_kv_heads
        most, sequences = self.most_rows or 0, len(rows) - 1
        longest = (self.rows_each or most - sequences + 1) * group
        tile = 128 if longest > 64 and static.head_dim < 256 else 64 if longest > 16 else 16
        if static.head_dim == 512:
            tile = 32 if longest > 32 else 16
        tiles = math.ceil(most * group / tile) + sequences - 1
        if self.rows_each is not None:
            tiles = sequences * math.ceil(self.rows_each * group / tile)
            assert {end - start for start, end in pairwise(rows)} == {self.rows_each}, (
                "a promise about rows is broken"
            )
        needed = sum(math.ceil((end - start) * group / tile) for start, end in pairwise(rows))
        assert needed <= tiles, (needed, tiles)
        blocks = max(tiles, self.most_pieces)
        partial_rows = math.ceil(blocks * tile / group)
        size = static.num_heads * partial_rows * (static.head_dim + 1) * 4
        assert size <= self.workspace.nbytes, f"the workspace of {self.workspace.nbytes} bytes should have {size}"

    def run(self, *arguments: Any, **options: Any) -> Tensor:
        self.library.calls[f"{self.name}.run"] += 1
        given = bound(
            f"{self.name}.run", (self, *arguments), options, "q", "paged_kv_cache", "out", "lse", "return_lse"
        )
        static, arrays = self.static, self.arrays
        assert static is not None, "run before plan"
        assert arrays is not None
        q, (keys, values), out = given["q"], given["paged_kv_cache"], given["out"]
        log2_sums = given.get("lse")
        assert (log2_sums is not None) == given.get("return_lse", False), "one of lse and return_lse alone"
        if log2_sums is not None:
            assert log2_sums.shape == q.shape[:2], log2_sums.shape
            assert log2_sums.dtype is torch.float32
        for each, dtype in (
            (q, static.dtype),
            (keys, static.kv_dtype),
            (values, static.kv_dtype),
            (out, static.dtype),
        ):
            assert each.dtype is dtype, (each.dtype, dtype)
        assert q.shape == out.shape == (len(q), static.num_heads, static.head_dim), q.shape
        assert q.stride(-1) == 1
        assert out.is_contiguous()
        assert keys.shape[1:] == (static.page_size, static.num_kv_heads, static.head_dim), keys.shape
        assert keys.shape == values.shape
        assert keys.stride() == values.stride(), "kernels for unequal strides are not compiled"
        # Whatever its kernel could do, the caller has to give what was planned.
        assert self.planned is not None
        num_rows = self.planned.rows[-1]
        assert len(q) == num_rows, f"{len(q)} rows are given, {num_rows} were planned"
        self.library.accelerator.launch(partial(self._attend, static, arrays, q, keys, values, out, log2_sums))
        return out  # type: ignore[no-any-return]

    def _attend(
        self,
        static: Static,
        arrays: Arrays,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        log2_sums: Tensor | None,
    ) -> None:
        """The kernel: layout and plan are where they were when it was launched first, whatever is in there now."""
        assert self.planned is not None
        rows, page_starts, last = self.planned.rows, arrays.page_starts.tolist(), arrays.last_page_len.tolist()
        if arrays.query_starts is not None:
            assert arrays.query_starts.tolist() == rows, "the plan is of another layout than the rows"
        self.planned.check_lengths(
            (arrays.page_starts.diff() - 1) * static.page_size + arrays.last_page_len, static
        )
        assert rows[-1] <= len(q), f"{rows[-1]} rows are planned, {len(q)} are there"
        out[rows[-1] :] = math.nan
        cache = (keys, values)
        for first, end, own_keys, own_values in _sequences(static, rows, page_starts, arrays.pages, last, cache):
            if end > first:
                out[first:end], sums = _attention(q[first:end], own_keys, own_values, static)
                if log2_sums is not None:
                    log2_sums[first:end] = sums


class FakePrefill(FakeWrapper):
    name = "BatchPrefillWithPagedKVCacheWrapper"
    buffers = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")

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
            "logits_soft_cap",
            "window_left",
            "q_data_type",
            "kv_data_type",
            "seq_lens",
            "uniform_q_len",
        )
        self.rows_each = given.get("uniform_q_len")
        assert given.get("causal"), "attention to all positions is not emulated"
        pages, last = given["paged_kv_indices"], given["paged_kv_last_page_len"]
        self._plan(given, given["qo_indptr"], given["paged_kv_indptr"], pages, last)


class FakeDecode(FakeWrapper):
    name = "BatchDecodeWithPagedKVCacheWrapper"
    own_options = ("use_tensor_cores",)
    buffers = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")

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
            "logits_soft_cap",
            "window_left",
            "q_data_type",
            "kv_data_type",
            "seq_lens",
        )
        self._plan(given, None, given["indptr"], given["indices"], given["last_page_len"])


def _sequences(
    static: Static,
    rows: list[int],
    page_starts: list[int],
    pages: Tensor,
    last_page_len: list[int],
    cache: tuple[Tensor, Tensor],
) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """(first row, end row, keys, values) of every sequence; keys and values: [length, Hkv, D]."""
    for index, last in enumerate(last_page_len):
        own = pages[page_starts[index] : page_starts[index + 1]].long()
        length = (len(own) - 1) * static.page_size + last  # a sequence may end before its last page
        assert length >= 1, length
        assert last <= static.page_size, last
        keys, values = (part[own].flatten(0, 1)[:length] for part in cache)
        yield rows[index], rows[index + 1], keys, values


def _attention(q: Tensor, keys: Tensor, values: Tensor, static: Static) -> tuple[Tensor, Tensor]:
    """The last row sees the last position, and every row before it one less: causal from the bottom right.

    Mixed values, and the logarithm to base 2 of each sum of weights, as state_t.get_lse has it (state.cuh).
    """
    group = static.num_heads // static.num_kv_heads
    wide = [each.float().repeat_interleave(group, 1) for each in (keys, values)]
    rows = torch.arange(len(q))[:, None] + len(keys) - len(q)
    columns = torch.arange(len(keys))[None]
    seen = columns <= rows
    if static.window_left >= 0:
        seen &= columns >= rows - static.window_left
    scores = torch.einsum("rhd,chd->hrc", q.float(), wide[0]) * static.scale
    if static.cap:
        scores = static.cap * torch.tanh(scores / static.cap)
    scores = scores.masked_fill(~seen, -math.inf)
    return torch.einsum("hrc,chd->rhd", scores.softmax(-1), wide[1]), scores.logsumexp(-1).T / math.log(2)
