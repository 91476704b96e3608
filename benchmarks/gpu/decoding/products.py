"""Phase `products`: products of a layer alone, by torch and by FlashInfer's kernels, with weights in no cache.

blocks    a product of the target by a weight in 8 bits with scales of 128 x 128 values, beside torch's in 16 bits
cells     a product by way, beside torch's; the way of a step is in the log of its start ("product, up to")
carved    torch's on 20 processors fewer, from cuBLAS and from cuBLASLt, which alone heeds a carveout
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.decoding.few_row_mixtures import HostClock
from benchmarks.gpu.decoding.few_rows import in_blocks, sizes_of
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.record import Desk, Json
from faser.kernels.cuda.choices import GraphClock, KernelClock
from faser.kernels.cuda.device import cublas_carveout
from faser.kernels.cuda.flashinfer.build import arch_of, product_modules
from faser.kernels.cuda.flashinfer.grouped_products import GroupedProducts
from faser.kernels.cuda.flashinfer.product_kernels import ProductKernels, load_blockscale, load_products
from faser.kernels.cuda.triton.scaled_fp8 import ScaledFp8
from faser.kernels.interface.fp8 import Fp8Linear

# Before the day: the fastest way over torch's time, by rows. A GEMV's weights are all there is to it up to 8 rows;
# cuBLAS guesses worst between 64 and 320.
PREDICTED = ((1, 0.9, 1.0), (8, 0.85, 1.0), (32, 0.93, 1.0), (64, 0.92, 0.99), (160, 0.92, 0.99), (320, 0.92, 1.0))
_ROWS = tuple(rows for rows, _, _ in PREDICTED)
_DRY_ROWS = (8,)
# By weights in 8 bits with scales of blocks, over torch's time in 16: half the bytes while weights are the limit,
# FlashInfer's products of 8 bits, twice as fast, where arithmetic is.
BLOCKS_PREDICTED = ((16, 0.55, 0.8), (64, 0.6, 0.95), (256, 0.6, 1.0), (2048, 0.55, 1.0))
_DRY_BLOCK_ROWS = (16,)
_IDLE = 20  # processors, of the other lane
_ROUNDS = 3


@torch.inference_mode()
def run(plan: Plan, desk: Desk) -> None:
    device = torch.device(plan.device)
    on_gpu = device.type == "cuda"
    clock: KernelClock = GraphClock(device) if on_gpu else HostClock()
    modules = load_products(product_modules(arch_of(torch.cuda.get_device_capability(device)))) if on_gpu else {}
    kernels = ProductKernels(device, modules, None if on_gpu else lambda: 0)
    for rows, least, most in PREDICTED:
        desk.append("predicted", {"rows": rows, "least": least, "most": most})
    _blocks(plan, desk, device, clock)
    for name, config in (("target", plan.sizes.target), ("draft", plan.sizes.draft)):
        for rows in _DRY_ROWS if plan.dry_run else _ROWS:
            if not desk.may_begin(f"{name}: {rows} rows"):
                continue
            for unit, (outputs, inputs) in sizes_of(config).items():
                x, weight = (_random(each, inputs, device) for each in (rows, outputs))
                out = x.new_empty((rows, outputs))
                ways: dict[str, Callable[[], Tensor]] = {"torch": partial(torch.mm, x, weight.t(), out=out)}
                for way, product in kernels.ways(x, weight, None, out).items():
                    ways[way] = partial(_computed, partial(product, x, weight, None, out), out)
                about = {"model": name, "rows": rows, "unit": unit}
                for found in _measured(ways, clock):
                    desk.append("cells", {**about, **found})
                plain = partial(torch.mm, x, weight.t())
                for found in _measured({"all": plain, "carved": partial(_carved, plain, on_gpu)}, clock):
                    desk.append("carved", {**about, **found})


def _blocks(plan: Plan, desk: Desk, device: torch.device, clock: KernelClock) -> None:
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    grouped, reference = GroupedProducts(load_blockscale if is_hopper else None), ScaledFp8(device)
    for rows, least, most in BLOCKS_PREDICTED:
        desk.append("blocks_predicted", {"rows": rows, "least": least, "most": most})
    for rows in _DRY_BLOCK_ROWS if plan.dry_run else [rows for rows, _, _ in BLOCKS_PREDICTED]:
        if not desk.may_begin(f"blocks: {rows} rows"):
            continue
        for unit, (outputs, inputs) in sizes_of(plan.sizes.target).items():
            x, wide = (_random(each, inputs, device) for each in (rows, outputs))
            out, packed = x.new_empty((rows, outputs)), Fp8Linear(weight=in_blocks(wide), bias=None)
            ways: dict[str, Callable[[], Tensor]] = {"torch": partial(torch.mm, x, wide.t(), out=out)}
            ways["tiles"] = partial(reference.linear, x, packed, out, None)
            for way, product in grouped.ways(x, packed, out).items():
                ways[way] = partial(product, x, packed, out, None)
            for found in _measured(ways, clock):
                desk.append("blocks", {"model": "target", "rows": rows, "unit": unit, **found})


def _measured(ways: Mapping[str, Callable[[], Tensor]], clock: KernelClock) -> Iterator[Json]:
    """Yield the shortest time of each way, and what its result differs by from the first one's, as a share."""
    first: tuple[Tensor, float] | None = None
    for name, way in ways.items():
        try:
            us = 1e6 * min(clock.seconds(way) for _ in range(_ROUNDS))
        except (RuntimeError, ValueError) as error:  # a size that an algorithm does not take
            yield {"way": name, "refused": str(error).splitlines()[0]}
            continue
        found = way().float()
        wanted, torch_us = first = first or (found.clone(), us)
        difference = float((found - wanted).abs().max() / wanted.abs().max())
        yield {
            "way": name,
            "us": round(us, 2),
            "times_torch": round(us / torch_us, 3),
            "difference": round(difference, 6),
        }


def _computed(compute: Callable[[], None], out: Tensor) -> Tensor:
    compute()
    return out


def _carved(product: Callable[[], Tensor], on_gpu: bool) -> Tensor:
    with cublas_carveout(_IDLE if on_gpu else 0):
        return product()


def _random(rows: int, width: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(rows)
    return torch.randn((rows, width), generator=generator, device=device).bfloat16()
