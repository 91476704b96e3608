"""Phase `heads`: an EAGLE-3 head of the 8B with made-up weights, in CUDA graphs. Acceptance is given.

`drafting` is the wall time of the drafter's part; a pass is what each further drafted token adds to it. Predicted
before any GPU has run it, at 1 sequence and 1k context: a pass of the head takes 0.15 ms, drafting of four tokens
0.75 ms, and with three tokens a cycle is 1.25 times a plain step.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.decoding.policies import DraftTimes, synthetic
from benchmarks.gpu.engines import Opened, Wanted, made_up, made_up_costs, target_of, with_engine
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.record import Desk
from benchmarks.gpu.steps import ClosedLoop, clock_of, greedy, made_up_prompts, spread_ms
from faser.distill.speculators_writer import write_speculators
from faser.engine.checkpoints.files import read_model_config
from faser.engine.checkpoints.heads import HeadSpec
from faser.engine.execution.drafting.heads.tensors import eagle3_shapes

_ACCEPTANCE, _DRAFT_VOCAB, _SEED = 0.8, 32_000, 5
_LENGTHS = (1, 4)  # drafted tokens; what a pass takes is a third of the difference


def run(plan: Plan, desk: Desk) -> None:
    sizes, target = plan.sizes, target_of(plan)
    head = _write_head(plan, target)
    for length in _LENGTHS:
        if not desk.may_begin(f"loading target and head, {length} drafted tokens"):
            continue
        times = DraftTimes()
        wanted = Wanted(
            target=target,
            sequences=max(sizes.policy_batches) + 1,  # the head's keys and values take a part of the memory
            context=sizes.context,
            rows=sizes.rows,
            sources=made_up(plan),
            speculative=synthetic(head, cap=length, acceptance=_ACCEPTANCE)
            | {"policy": "fixed", "method": "eagle3"},
            costs=made_up_costs(),
            wrap_drafter=times.around,
        )
        with_engine(plan, wanted, partial(_cells, plan, desk, length, times))
    desk.keep("rows", _rows(desk))


def _cells(plan: Plan, desk: Desk, length: int, times: DraftTimes, opened: Opened) -> None:
    sizes, loop = plan.sizes, ClosedLoop(opened.engine, clock_of(plan.device))
    prompts = made_up_prompts(max(sizes.policy_batches), sizes.context, opened.info.vocab_size)
    for sequences in sizes.policy_batches:
        if not desk.may_begin(f"{sequences} sequences, {length} drafted tokens"):
            continue
        loop.start(prompts[:sequences], greedy)
        loop.warm()
        times.forget()
        steps = loop.look(seconds=sizes.cell_s, steps=sizes.steps)
        loop.stop()
        desk.append(
            "cells",
            {
                "sequences": sequences,
                "gamma": length,
                "cycle_ms": spread_ms(steps.device_s),
                "drafting_ms": spread_ms(times.seconds),
                "passes": times.passes / len(times.seconds),
                "tokens_per_s": round(steps.tokens_per_s, 1),
            },
        )


def _rows(desk: Desk) -> list[dict[str, object]]:
    cells = {(each["sequences"], each["gamma"]): each for each in desk.result.get("cells", [])}
    short, long = _LENGTHS
    rows: list[dict[str, object]] = []
    for sequences in sorted({each for each, _ in cells}):
        if (sequences, short) in cells and (sequences, long) in cells:
            few, many = (cells[sequences, length]["drafting_ms"]["median"] for length in _LENGTHS)
            rows.append(
                {
                    "sequences": sequences,
                    f"drafting_{short}_ms": few,
                    f"drafting_{long}_ms": many,
                    "pass_ms": round((many - few) / (long - short), 4),
                    "cycle_ms": cells[sequences, long]["cycle_ms"]["median"],
                }
            )
    return rows


def _write_head(plan: Plan, target: Path) -> Path:
    """A head of one layer as the target's are, over the first tokens of the vocabulary."""
    spec, directory = read_model_config(target).spec, plan.models / "head"
    decoder = replace(spec, layers=spec.layers[-1:], tie_word_embeddings=False)
    head = HeadSpec(
        decoder=decoder,
        draft_vocab_size=min(_DRAFT_VOCAB, spec.vocab_size // 2),
        target_hidden_size=spec.hidden_size,
        state_layers=tuple(sorted({0, spec.num_layers // 2, spec.num_layers})),
    )
    generator = torch.Generator().manual_seed(_SEED)
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        for name, shape in eagle3_shapes(head).items()
        if name != "embed_tokens.weight"  # the target's
    }
    write_speculators(
        directory,
        head,
        weights,
        draft_ids=torch.arange(head.draft_vocab_size),
        target_architectures=["LlamaForCausalLM"],
    )
    return directory
