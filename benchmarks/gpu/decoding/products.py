"""Phase `products`: products of a layer alone, by torch and by FlashInfer's kernels, with weights in no cache.

cells     a product by way, beside torch's; the way of a step is in the log of its start ("product, up to")
carved    torch's on 20 processors fewer, from cuBLAS and from cuBLASLt, which alone heeds a carveout
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.decoding.few_row_mixtures import HostClock
from benchmarks.gpu.decoding.few_rows import sizes_of
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.record import Desk, Json
from faser.kernels.cuda.choices import GraphClock, KernelClock
from faser.kernels.cuda.device import cublas_carveout
from faser.kernels.cuda.flashinfer.build import arch_of, product_modules
from faser.kernels.cuda.flashinfer.product_kernels import ProductKernels, load_products

# Before the day: the fastest way over torch's time, by rows. A GEMV's weights are all there is to it up to 8 rows;
# cuBLAS guesses worst between 64 and 320.
PREDICTED = ((1, 0.9, 1.0), (8, 0.85, 1.0), (32, 0.93, 1.0), (64, 0.92, 0.99), (160, 0.92, 0.99), (320, 0.92, 1.0))
_ROWS = tuple(rows for rows, _, _ in PREDICTED)
_DRY_ROWS = (8,)
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
