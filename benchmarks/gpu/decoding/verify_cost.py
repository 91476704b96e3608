"""Phase `verify`: what a step costs that verifies, by sequences and by rows of each; the runner alone."""

from benchmarks.gpu.common.bare import batch_of, steps_s
from benchmarks.gpu.common.engines import Wanted, close, made_up, made_up_costs, open_engine, target_of
from benchmarks.gpu.common.plan import Plan
from benchmarks.gpu.common.record import Desk
from benchmarks.gpu.common.timing import clock_of, spread_ms
from benchmarks.gpu.decoding.plain import floors


def run(plan: Plan, desk: Desk) -> None:
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
    runner, info = opened.runner, opened.info
    for rows_each in sizes.verify_rows:
        for sequences in sizes.verify_batches:
            if not desk.may_begin(f"{sequences} sequences, {rows_each} rows each"):
                continue
            batch = batch_of(
                sequences=sequences,
                rows_each=rows_each,
                context=sizes.context,
                num_blocks=info.num_blocks,
                block_size=info.block_size,
                vocab_size=info.vocab_size,
            )
            taken = steps_s(runner, batch, clock, max(sizes.steps // 2, 2))
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
