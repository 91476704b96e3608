"""Phase `fp8`: decoding of the 8B with products in 8 bits, next to 16 bits in the same phase. The runner alone."""

from functools import partial

from benchmarks.gpu.decoding.plain import bare_cells
from benchmarks.gpu.engines import Wanted, made_up, target_of, with_engine
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.record import Desk

_LOADING_S = 15.0
WAYS = {"16 bits": None, "fp8": "fp8"}
PRODUCT_BYTES = {"16 bits": 2, "fp8": 1}


def run(plan: Plan, desk: Desk) -> None:
    """times_16_bits: of a step in 8 bits, the speed. Each way has a floor of its own."""
    sizes = plan.sizes
    for way, quantization in WAYS.items():
        if not desk.may_begin(f"loading target, {way}", needs_s=0.0 if plan.dry_run else _LOADING_S):
            continue
        wanted = Wanted(
            target=target_of(plan),
            sequences=max(sizes.fp8_batches),
            context=sizes.context,
            rows=max(sizes.fp8_batches),
            sources=made_up(plan),
            quantization=quantization,
            graph_rows=tuple(sorted(sizes.fp8_batches)),
        )
        cells = partial(bare_cells, plan, desk, way, sizes.fp8_batches, product_bytes=PRODUCT_BYTES[way])
        with_engine(plan, wanted, cells)
    desk.keep("rows", _rows(desk))


def _rows(desk: Desk) -> list[dict[str, object]]:
    found = {way: {each["sequences"]: each for each in desk.result.get(f"{way} bare", [])} for way in WAYS}
    rows: list[dict[str, object]] = []
    for sequences, eight in found["fp8"].items():
        sixteen = found["16 bits"].get(sequences)
        if sixteen is not None:
            wide, narrow = (each["bare_ms"]["median"] for each in (sixteen, eight))
            rows.append(
                {
                    "sequences": sequences,
                    "16_bits_ms": wide,
                    "fp8_ms": narrow,
                    "times_16_bits": round(wide / narrow, 3),
                    "16_bits_times_floor": sixteen["times_floor"],
                    "fp8_times_floor": eight["times_floor"],
                }
            )
    return rows
