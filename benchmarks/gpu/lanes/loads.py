"""Work of one kind each, to see where it runs, how fast, and what company costs it.

traffic   an addition over large tensors, bound by memory: a kernel, where a plain copy may be the copy engines'
product   a large product in bfloat16, bound by computing: cuBLAS
copy      the plain copy, for the record
triton    rows quantised to eight bits: a Triton kernel, bound by memory
norm      the RMS norm of a layer, bound by memory
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.gpu.common.plan import Plan
from benchmarks.gpu.common.timing import DeviceClock
from faser.kernels.cuda.triton.fp8_ops import quantise_rows
from faser.kernels.cuda.triton.layer_ops import rms_norm

_REPEATS = 7
_ROW = 4096
_PRODUCT_SIDE = {"cuda": 8192, "cpu": 64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """amount: bytes moved, or multiplications and additions, of one run."""

    name: str
    run: Callable[[], object]
    amount: float
    unit: str


def traffic(plan: Plan) -> Load:
    """Buffers of its own, as everything here: lanes share nothing but the device."""
    count = plan.sizes.copy_bytes // 4
    source = torch.randint(256, (count,), dtype=torch.int16, device=plan.device)
    target = torch.empty_like(source)
    return Load(name="traffic", run=lambda: torch.add(source, 1, out=target), amount=4.0 * count, unit="bytes")


def product(plan: Plan) -> Load:
    side = _PRODUCT_SIDE[plan.device]
    one, other = (torch.randn(side, side, device=plan.device).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(one)
    return Load(name="product", run=lambda: torch.mm(one, other, out=out), amount=2.0 * side**3, unit="operations")


def copy(plan: Plan) -> Load:
    source = torch.randint(256, (plan.sizes.copy_bytes // 2,), dtype=torch.uint8, device=plan.device)
    target = torch.empty_like(source)
    return Load(name="copy", run=lambda: target.copy_(source), amount=2.0 * len(source), unit="bytes")


def triton(plan: Plan) -> Load:
    rows = max(plan.sizes.copy_bytes // (4 * _ROW), 1) if plan.device == "cuda" else 2
    x = torch.randn(rows, _ROW, device=plan.device).to(torch.bfloat16)
    values = torch.empty(rows, _ROW, dtype=torch.float8_e4m3fn, device=plan.device)
    scales = torch.empty(rows, dtype=torch.float32, device=plan.device)
    return Load(
        name="triton", run=lambda: quantise_rows(x, values, scales), amount=3.0 * rows * _ROW, unit="bytes"
    )


def norm(plan: Plan) -> Load:
    rows = max(plan.sizes.copy_bytes // (4 * _ROW), 1) if plan.device == "cuda" else 2
    x = torch.randn(rows, _ROW, device=plan.device).to(torch.bfloat16)
    weight, out = torch.ones(_ROW, dtype=torch.bfloat16, device=plan.device), torch.empty_like(x)
    return Load(name="norm", run=lambda: rms_norm(x, weight, 1e-5, out), amount=4.0 * rows * _ROW, unit="bytes")


KINDS: dict[str, Callable[[Plan], Load]] = {
    "traffic": traffic,
    "product": product,
    "copy": copy,
    "triton": triton,
    "norm": norm,
}


def median_s(clock: DeviceClock, work: Callable[[], object]) -> float:
    """Seconds of one run on the current stream, of several, after one that only warms up."""
    work()
    marks = [clock.mark()]
    for _ in range(_REPEATS):
        work()
        marks.append(clock.mark())
    return statistics.median(clock.between_s(marks))
