"""Phase `prompts`: what prompts of the 8B take, alone and in pieces beside sequences that decode.

    alone     one prompt by its length, until its first token; in steps of up to 8,192 rows
    beside    a long prompt that joins sequences at 1k context, by the rows that a step may have: the steps before
              it comes and while it is read, and how long it waits for its first token

Nothing is taken from the prefix cache.
"""

import statistics
from functools import partial

from benchmarks.gpu.decoding.plain import floors
from benchmarks.gpu.engines import Opened, Wanted, made_up, target_of, with_engine
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.record import Desk
from benchmarks.gpu.steps import ClosedLoop, clock_of, greedy, made_up_prompts, spread_ms

_LOADING_S = 15.0
_REPEATS = 3


def run(plan: Plan, desk: Desk) -> None:
    sizes = plan.sizes
    if _may_load(plan, desk, "prompts alone"):
        longest = max(sizes.prompt_lengths)
        with_engine(plan, _wanted(plan, 1, longest, sizes.rows), partial(_alone, plan, desk))
    for rows in sizes.chunk_rows:
        if _may_load(plan, desk, f"a prompt beside others, {rows} rows a step"):
            wanted = _wanted(plan, sizes.beside + 1, sizes.beside_prompt, rows)
            with_engine(plan, wanted, partial(_beside, plan, desk, rows))


def _may_load(plan: Plan, desk: Desk, what: str) -> bool:
    return desk.may_begin(f"{what}: loading", needs_s=0.0 if plan.dry_run else _LOADING_S)


def _wanted(plan: Plan, sequences: int, context: int, rows: int) -> Wanted:
    return Wanted(
        target=target_of(plan),
        sequences=sequences,
        context=context,
        rows=rows,
        sources=made_up(plan),
        prefix_caching=False,
    )


def _alone(plan: Plan, desk: Desk, opened: Opened) -> None:
    loop = ClosedLoop(opened.engine, clock_of(plan.device))
    for length in plan.sizes.prompt_lengths:
        if not desk.may_begin(f"{length} tokens"):
            continue
        taken = []
        for prompt in made_up_prompts(_REPEATS, length, opened.info.vocab_size, seed=length):
            taken.append(sum(loop.join(prompt, greedy(0)).device_s))
            loop.stop()
        row = {"tokens": length, "ms": spread_ms(taken), "tokens_per_s": round(length / statistics.median(taken))}
        desk.append("alone", row | floors(desk, opened, rows=length, kv_tokens=length, taken_s=taken))


def _beside(plan: Plan, desk: Desk, rows: int, opened: Opened) -> None:
    sizes, loop = plan.sizes, ClosedLoop(opened.engine, clock_of(plan.device))
    vocab_size = opened.info.vocab_size
    (prompt,) = made_up_prompts(1, sizes.beside_prompt, vocab_size, seed=1)
    loop.start(made_up_prompts(sizes.beside, sizes.context, vocab_size), greedy)
    loop.warm()
    before = loop.look(seconds=sizes.cell_s, steps=sizes.steps)
    during = loop.join(prompt, greedy(0))
    loop.stop()
    desk.append(
        "beside",
        {
            "rows_a_step": rows,
            "sequences": sizes.beside,
            "tokens": sizes.beside_prompt,
            "before_ms": spread_ms(before.device_s),
            "during_ms": spread_ms(during.device_s),
            "longest_ms": round(1e3 * max(during.device_s), 3),
            "steps": len(during.device_s),
            "first_token_ms": round(1e3 * sum(during.device_s), 3),
        },
    )
