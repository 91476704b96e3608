"""Phase `mixtures`: steps of mixtures of experts, by sequences, and by rows of each; which experts they read.

The runner alone, one step behind the other. The device counts the experts that a step reads, of every layer those
that any row has chosen. The floor is their bytes and those of everything else that a step reads, at the bandwidth
of a copy. Made-up routers choose for each row nearly by itself: rows of a real sequence share more experts.
"""

import statistics
from collections.abc import Sequence
from functools import partial

from benchmarks.gpu.decoding import environment
from benchmarks.gpu.engines import Opened, Wanted, made_up, made_up_costs, with_engine
from benchmarks.gpu.families import cut_to_fit, mixture_step_bytes, mixture_step_flops, num_experts
from benchmarks.gpu.models import Config, write_shape
from benchmarks.gpu.plan import REFERENCE_BYTES_S, Plan
from benchmarks.gpu.record import Desk, Json
from benchmarks.gpu.steps import WARM_STEPS, batch_of, clock_of, spread_ms, steps_s
from faser.engine.execution.runner.graph_runner import GraphRunner

_LOADING_S = 25.0


def run(plan: Plan, desk: Desk) -> None:
    sizes = plan.sizes
    for config in sizes.mixtures:
        name = str(config["model_type"])
        if not desk.may_begin(f"loading {name}", needs_s=0.0 if plan.dry_run else _LOADING_S):
            continue
        most = max(sizes.mixture_batches)
        cut = cut_to_fit(config, plan.memory_bytes, sequences=most, context=sizes.context)
        desk.append(
            "models", {"model": name, "layers": cut["num_hidden_layers"], "of": config["num_hidden_layers"]}
        )
        with_engine(plan, wanted_for(plan, cut, shapes(plan)), partial(_cells, plan, desk, name))


def shapes(plan: Plan) -> list[tuple[int, int]]:
    """(sequences, rows of each): decoding, then verification."""
    sizes = plan.sizes
    decoding = [(each, 1) for each in sizes.mixture_batches]
    verifying = [(each, rows) for each in sizes.mixture_verify_batches for rows in sizes.mixture_verify_rows]
    return list(dict.fromkeys((*decoding, *verifying)))


def wanted_for(
    plan: Plan, config: Config, steps: Sequence[tuple[int, int]], graph_rows: Sequence[int] | None = None
) -> Wanted:
    """Steps of these shapes. graph_rows: of the steps that have graphs; None: of these shapes alone."""
    rows = sorted({sequences * each for sequences, each in steps})
    return Wanted(
        target=write_shape(plan.models / str(config["model_type"]), config),
        sequences=max(sequences for sequences, _ in steps),
        context=plan.sizes.context,
        rows=max(rows),
        sources=made_up(plan),
        # Text drafts cost nothing to have and make room for the rows of a draft.
        speculative={"method": "ngram", "num_speculative_tokens": max(each for _, each in steps) - 1},
        costs=made_up_costs(),
        graph_rows=tuple(rows if graph_rows is None else graph_rows),
    )


def _cells(plan: Plan, desk: Desk, name: str, opened: Opened) -> None:
    for sequences, rows_each in shapes(plan):
        if desk.may_begin(f"{name}: {sequences} sequences, {rows_each} rows each"):
            desk.append("cells", {"model": name, **cell_of(plan, desk, opened, sequences, rows_each)})


def cell_of(plan: Plan, desk: Desk, opened: Opened, sequences: int, rows_each: int) -> Json:
    sizes, info, runner = plan.sizes, opened.info, opened.runner
    batch = batch_of(
        sequences=sequences,
        rows_each=rows_each,
        context=sizes.context,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        vocab_size=info.vocab_size,
    )
    repeats = max(sizes.steps // 2, 2)
    before = runner.experts_read
    taken = steps_s(runner, batch, clock_of(plan.device), repeats)
    experts = (runner.experts_read - before) / (WARM_STEPS + repeats)
    median_s = statistics.median(taken)
    read = mixture_step_bytes(opened.spec, experts=experts, sequences=sequences, context=sizes.context)
    flops = mixture_step_flops(opened.spec, rows=sequences * rows_each)
    bytes_s, flops_s = environment.bytes_s(desk.folder), environment.flops_s(desk.folder)
    floor_s = max(read / bytes_s, flops / flops_s)
    return {
        "sequences": sequences,
        "rows_each": rows_each,
        "context": sizes.context,
        "graph_rows": runner.rows_replayed(batch) if isinstance(runner, GraphRunner) else None,
        "step_ms": spread_ms(taken),
        "experts": round(experts, 2),
        "of_experts": num_experts(opened.spec),
        "step_bytes": round(read),
        "floor_ms": round(1e3 * floor_s, 4),
        "times_floor": round(median_s / floor_s, 3),
        "times_reference_floor": round(median_s * REFERENCE_BYTES_S / read, 3),
        "tokens_per_s": round(sequences / median_s, 1),
    }
