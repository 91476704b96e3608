"""Phases `plain` and `verify`: decoding without speculation, and what a step costs that verifies.

period   from one step's end on the device to the next one's, through Engine.step
bare     the same rows through the runner alone, one step behind the other
gap      period - bare: what the engine around the runner adds that nothing hides

By sequences at a time; `verify` by rows of each as well, and by the runner alone.
"""

import statistics
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from benchmarks.gpu.decoding import environment
from benchmarks.gpu.engines import (
    Opened,
    Wanted,
    close,
    made_up,
    made_up_costs,
    open_engine,
    target_of,
    with_engine,
)
from benchmarks.gpu.models import VALUE_BYTES, floor_s, step_bytes
from benchmarks.gpu.plan import REFERENCE_BYTES_S, REFERENCE_FLOPS_S, Plan
from benchmarks.gpu.record import Desk
from benchmarks.gpu.steps import (
    ClosedLoop,
    Steps,
    batch_of,
    clock_of,
    greedy,
    made_up_prompts,
    sampled,
    spread_ms,
    steps_s,
)
from faser.engine.execution.runner.batch import RowBatch

_SAMPLINGS = {"greedy": greedy, "T 0.8, top_p 0.95": sampled}


def run(plan: Plan, desk: Desk) -> None:
    """The runner alone comes first: what the prefix cache holds is void afterwards, and nothing is in it yet."""
    sizes = plan.sizes
    desk.say("loading target")
    wanted = Wanted(
        target=target_of(plan),
        sequences=max(sizes.batches),
        context=sizes.context,
        rows=sizes.rows,
        sources=made_up(plan),
    )

    def work(opened: Opened) -> None:
        bare_cells(plan, desk, "bare", sizes.batches, opened)
        _engine_cells(plan, desk, opened)

    with_engine(plan, wanted, work)


def bare_batch(plan: Plan, opened: Opened, sequences: int, rows_each: int = 1) -> RowBatch:
    info = opened.info
    return batch_of(
        sequences=sequences,
        rows_each=rows_each,
        context=plan.sizes.context,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        vocab_size=info.vocab_size,
    )


def bare_cells(
    plan: Plan,
    desk: Desk,
    table: str,
    batches: Sequence[int],
    opened: Opened,
    *,
    about: Mapping[str, Any] = MappingProxyType({}),
    product_bytes: int = VALUE_BYTES,
    kv_share: float = 1.0,
) -> None:
    """The runner alone, by sequences.

    For the floors: product_bytes: of a weight of the layers' products; kv_share: bytes of a cached value, as a
    share of 16 bits.
    """
    context = plan.sizes.context
    for sequences in sorted(batches):
        if not desk.may_begin(f"{table} {dict(about)}: {sequences} rows"):
            continue
        batch = bare_batch(plan, opened, sequences)
        taken = steps_s(opened.runner, batch, clock_of(plan.device), plan.sizes.steps)
        least = floors(
            desk,
            opened,
            rows=sequences,
            kv_tokens=round(kv_share * sequences * context),
            taken_s=taken,
            product_bytes=product_bytes,
        )
        row = {**about, "sequences": sequences, "context": context, "bare_ms": spread_ms(taken)}
        desk.append(table, row | least)


def _engine_cells(plan: Plan, desk: Desk, opened: Opened) -> None:
    sizes, loop = plan.sizes, ClosedLoop(opened.engine, clock_of(plan.device))
    prompts = made_up_prompts(max(sizes.batches), sizes.context, opened.info.vocab_size)
    bare = {each["sequences"]: each["bare_ms"]["median"] for each in desk.result.get("bare", [])}
    for sampling, asked in _SAMPLINGS.items():
        if not desk.may_begin(f"reading {len(prompts)} prompts, {sampling}"):
            continue
        loop.start(prompts, asked)
        said = 0
        for sequences in sizes.batches:
            if not desk.may_begin(f"{sequences} sequences, {sampling}"):
                continue
            loop.keep_first(sequences)
            loop.warm()
            steps = loop.look(seconds=sizes.cell_s, steps=sizes.steps)
            said += len(steps.host_s)
            row = _cell(desk, opened, steps, sequences=sequences, context=sizes.context + said)
            gap = None if sequences not in bare else round(row["period_ms"]["median"] - bare[sequences], 4)
            desk.append("target", {"sampling": sampling, **row, "gap_ms": gap})
        loop.stop()


def _cell(desk: Desk, opened: Opened, steps: Steps, *, sequences: int, context: int) -> dict[str, Any]:
    return {
        "sequences": sequences,
        "context": context,
        "num_steps": len(steps.host_s),
        "tokens_per_s": round(steps.tokens_per_s, 1),
        "period_ms": spread_ms(steps.device_s),
        "host_ms": spread_ms(steps.host_s),
        **floors(desk, opened, rows=sequences, kv_tokens=sequences * context, taken_s=steps.device_s),
    }


def floors(
    desk: Desk, opened: Opened, *, rows: int, kv_tokens: int, taken_s: Any, product_bytes: int = VALUE_BYTES
) -> dict[str, float]:
    """The least time at the rates measured on this device, and ratios to it and to the one at reference rates."""
    measured_s = floor_s(
        opened.spec,
        rows=rows,
        kv_tokens=kv_tokens,
        bytes_s=environment.bytes_s(desk.folder),
        flops_s=environment.flops_s(desk.folder),
        product_bytes=product_bytes,
    )
    reference_s = floor_s(
        opened.spec,
        rows=rows,
        kv_tokens=kv_tokens,
        bytes_s=REFERENCE_BYTES_S,
        flops_s=REFERENCE_FLOPS_S,
        product_bytes=product_bytes,
    )
    median_s = statistics.median(taken_s)
    return {
        "step_bytes": step_bytes(opened.spec, kv_tokens=kv_tokens, product_bytes=product_bytes),
        "floor_ms": round(1e3 * measured_s, 4),
        "times_floor": round(median_s / measured_s, 3),
        "times_reference_floor": round(median_s / reference_s, 3),
    }


def run_verify(plan: Plan, desk: Desk) -> None:
    sizes, clock = plan.sizes, clock_of(plan.device)
    desk.say("loading target")
    opened = open_engine(
        plan,
        Wanted(
            target=target_of(plan),
            sequences=max(sizes.verify_batches),
            context=sizes.context,
            rows=max(sizes.verify_batches) * max(sizes.verify_rows),
            sources=made_up(plan),
            # Text drafts cost nothing to have and make room for the rows of a draft.
            speculative={"method": "ngram", "num_speculative_tokens": max(sizes.verify_rows) - 1},
            costs=made_up_costs(),
        ),
    )
    for rows_each in sizes.verify_rows:
        for sequences in sizes.verify_batches:
            if not desk.may_begin(f"{sequences} sequences, {rows_each} rows each"):
                continue
            batch = bare_batch(plan, opened, sequences, rows_each)
            taken = steps_s(opened.runner, batch, clock, max(sizes.steps // 2, 2))
            rows = sequences * rows_each
            desk.append(
                "cells",
                {
                    "sequences": sequences,
                    "rows_each": rows_each,
                    "step_ms": spread_ms(taken),
                    **floors(desk, opened, rows=rows, kv_tokens=sequences * sizes.context, taken_s=taken),
                },
            )
    close(opened)
