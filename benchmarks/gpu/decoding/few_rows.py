"""Phase `few_rows`: the products of a layer of 1 to 8 rows, each way, with weights in no cache.

    products   a product with its norm, gate or residual: in separate launches, in one launch by outputs of a
               program, and its weights alone by FlashInfer's kernels of few rows; share of the copy bandwidth
    layers     the products of a layer together, in separate launches and in the fastest one launch of each

Each in 16 bits, and the target's in fp8: with a scale a row, where separate launches round the rows to 8 bits as
well, which is most of the difference, and with scales of blocks, where no launch does. Joined launches of a layer
in fp8 are in the log ("layer in 8 bits"). In 4 bits, a scale and a minimum for 32, one launch takes up to 4 rows;
separate launches are what 5 to 16 take.

Whole steps with the ways that were chosen are in the phases `plain` and `passes`, attention's times in the log.
"""

import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.decoding import environment
from benchmarks.gpu.decoding.few_row_mixtures import HostClock
from benchmarks.gpu.models import Config
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.record import Desk, Json
from faser.errors import FaserError
from faser.kernels.cuda.choices import GraphClock, KernelClock
from faser.kernels.cuda.low_bit import LowBitMatrix, pack_low_bit
from faser.kernels.cuda.triton.few_rows import STAGES, few_rows
from faser.kernels.cuda.triton.layer_ops import gate, rms_norm
from faser.kernels.cuda.triton.low_bit import MOST_FEW, few_low_bit_rows, low_bit_rows
from faser.kernels.cuda.triton.low_bit import STAGES as STAGES_OF_CODES
from faser.kernels.cuda.triton.scaled_fp8 import ScaledFp8
from faser.kernels.interface.fp8 import (
    FP8,
    FP8_MAX,
    LEAST_LARGEST,
    Fp8Linear,
    Fp8Rows,
    quantise_weight,
)
from faser.kernels.interface.low_bit.rows import INT4, FloatRows, LowBitRows

Weight = Tensor | Fp8Rows | LowBitMatrix

# Before the day, all of one row: of a GEMV by its weights over a copy; a pass of the 0.6B, a step of the 8B at 1k
# context, and that in fp8; of the products of its layer in 4 bits over those in 16. They took 1.42, 4.88 and 3.94
# ms in ten launches a layer.
PREDICTED = {"share_of_copies": 0.9, "pass_ms": 0.60, "step_ms": 4.15, "fp8_step_ms": 2.6, "int4_layer": 0.4}
SEPARATE = "separate"
_ROWS = (1, 2, 4, 8)
_DRY_ROWS = (2,)
_EPS = 1e-6
_BLOCK = 128
_LIBRARY = ("tinygemm", "cublaslt", "tgv")  # backends of FlashInfer's mm_bf16
_fp8_products = cache(ScaledFp8)


def run(plan: Plan, desk: Desk) -> None:
    clock: KernelClock = GraphClock(torch.device(plan.device)) if plan.device == "cuda" else HostClock()
    bytes_s = environment.bytes_s(desk.folder)
    desk.append("predicted", PREDICTED)
    target = plan.sizes.target
    models = (
        ("target", target, 16, False),
        ("target", target, 8, False),
        ("target", target, 8, True),
        ("target", target, 4, True),
        ("draft", plan.sizes.draft, 16, False),
    )
    for name, config, bits, blocks in models:
        for rows in _DRY_ROWS if plan.dry_run else _ROWS:
            if not desk.may_begin(f"{name} in {bits} bits: {rows} rows"):
                continue
            about = {"model": name, "bits": bits, "blocks": blocks, "rows": rows}
            layer: dict[str, float] = {"separate_us": 0.0, "one_launch_us": 0.0}
            for unit, size in sizes_of(config).items():
                found = list(measured(unit, *size, rows, bits, plan.device, clock, bytes_s, blocks=blocks))
                for each in found:
                    desk.append("products", {**about, "unit": unit, **each})
                layer["separate_us"] += found[0]["us"]
                joined = (each["us"] for each in found if each["way"].endswith("outputs"))
                layer["one_launch_us"] += min(joined, default=found[0]["us"])
            desk.append("layers", {**about, **layer})


def sizes_of(config: Config) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each product of a layer."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    dim = config.get("head_dim", hidden // heads)
    columns = (heads + 2 * config["num_key_value_heads"]) * dim
    return {
        "norm, qkv": (columns, hidden),
        "o, residual": (hidden, heads * dim),
        "norm, gate": (2 * inner, hidden),
        "down, residual": (hidden, inner),
    }


@torch.inference_mode()
def measured(
    unit: str,
    outputs: int,
    inputs: int,
    rows: int,
    bits: int,
    device: str,
    clock: KernelClock,
    bytes_s: float,
    *,
    blocks: bool = False,
) -> Iterator[Json]:
    """Each way, the separate one first. difference: from it, as a share of its largest value."""
    random = torch.Generator(device).manual_seed(rows)
    wide = torch.randn((outputs, inputs), generator=random, device=device).div_(math.sqrt(inputs)).bfloat16()
    weight: Weight = wide
    if bits == 4:
        weight = in_4_bits(wide)
    elif bits == 8:
        weight = in_blocks(wide) if blocks else quantise_weight(wide)
    x = torch.randn((rows, inputs), generator=random, device=device).bfloat16()
    kind = _KINDS[unit.split(", ")[-1]]
    wanted = kind(x, weight, None)
    ways: dict[str, Callable[[], Tensor]] = {SEPARATE: partial(kind, x, weight, None)}
    joined = STAGES if bits > 4 else STAGES_OF_CODES if rows <= MOST_FEW else {}
    ways |= {f"{each} outputs": partial(kind, x, weight, each) for each in joined}
    if device == "cuda" and bits == 16:
        ways |= {f"weights alone, {each}": partial(_library, x, wide, each) for each in _LIBRARY}
    for name, way in ways.items():
        try:
            us = 1e6 * clock.seconds(way)
        except (
            RuntimeError,
            FaserError,
            ValueError,
        ) as error:  # a size or a device that a library has no kernel for
            yield {"way": name, "us": math.inf, "refused": str(error).splitlines()[0]}
            continue
        num_bytes = weight.num_bytes if isinstance(weight, LowBitMatrix) else bits / 8 * outputs * inputs
        copied_us = 1e6 * num_bytes / bytes_s
        found = {"way": name, "us": round(us, 2), "share_of_copies": round(copied_us / us, 3)}
        if name in (SEPARATE, *(f"{each} outputs" for each in STAGES)):
            found["difference"] = round(float((way() - wanted).abs().max() / wanted.abs().max()), 6)
        yield found


def in_blocks(weight: Tensor) -> Fp8Rows:
    """Quantise a weight as published checkpoints are, with a scale for 128 x 128 values, and pack it."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % _BLOCK, 0, -rows % _BLOCK))
    parts = padded.view(-(-rows // _BLOCK), _BLOCK, -(-columns // _BLOCK), _BLOCK)
    scales = parts.abs().amax((1, 3)).clamp_min(LEAST_LARGEST) / FP8_MAX
    values = (parts / scales[:, None, :, None]).view(padded.shape)[:rows, :columns].to(FP8).contiguous()
    return Fp8Rows(values=values, scales=scales, group=_BLOCK, lines=_BLOCK)


def in_4_bits(weight: Tensor) -> LowBitMatrix:
    """Round a weight to codes of 4 bits with a scale and a minimum for 32 values, and pack it."""
    found = pack_low_bit(LowBitRows(parts=(FloatRows(weight=weight, scheme=INT4),)), None, weight.device).single
    assert found is not None, "one part is one matrix"
    return found


def _lines(weight: Weight) -> int:
    return weight.num_rows if isinstance(weight, LowBitMatrix) else weight.shape[0]


def _product(x: Tensor, weight: Weight, out: Tensor, residual: Tensor | None = None) -> Tensor:
    """In a launch of its own, or in fp8 in three."""
    if isinstance(weight, LowBitMatrix):
        return low_bit_rows(x, weight, out, residual=residual)
    if isinstance(weight, Fp8Rows):
        return _fp8_products(x.device).linear(x, Fp8Linear(weight=weight, bias=None), out, residual)
    if residual is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(residual, x, weight.t(), out=out)


def _in_one(x: Tensor, weight: Weight, out: Tensor, **options: Any) -> Tensor:
    if isinstance(weight, LowBitMatrix):
        return few_low_bit_rows(x, weight, out, **options)
    if isinstance(weight, Fp8Rows):
        scaling: dict[str, Any] = {"scales": weight.scales, "group": weight.group, "lines": weight.lines}
        return few_rows(x, weight.values, out, **scaling, **options)
    return few_rows(x, weight, out, **options)


def _normed(x: Tensor, weight: Weight, outputs: int | None) -> Tensor:
    norm, out = torch.ones(x.shape[1], device=x.device), x.new_empty((len(x), _lines(weight)))
    if outputs is not None:
        return _in_one(x, weight, out, norm=norm, eps=_EPS, outputs=outputs)
    return _product(rms_norm(x, norm, _EPS, torch.empty_like(x)), weight, out)


def _gated(x: Tensor, weight: Weight, outputs: int | None) -> Tensor:
    out = x.new_empty((len(x), _lines(weight) // 2))
    if outputs is None:
        return gate(_normed(x, weight, None), out)
    norm = torch.ones(x.shape[1], device=x.device)
    return _in_one(x, weight, out, norm=norm, eps=_EPS, activation="silu", outputs=outputs)


def _added(x: Tensor, weight: Weight, outputs: int | None) -> Tensor:
    out = x.new_zeros((len(x), _lines(weight)))
    if outputs is not None:
        return _in_one(x, weight, out, residual=out, outputs=outputs)
    return _product(x, weight, out, residual=out)


_KINDS = {"qkv": _normed, "gate": _gated, "residual": _added}


def _library(x: Tensor, weight: Tensor, backend: str) -> Tensor:
    import flashinfer

    found: Tensor = flashinfer.mm_bf16(x, weight.t(), pdl=True, backend=backend)
    return found
