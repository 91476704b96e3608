"""Checks of whole engines: the same answers again, replays of steps, speculation, steps that wait for each other.

`replays` compares a step by its CUDA graph with the same step kernel by kernel, at exactly a graph's size. With
few tokens in the cache attention has one piece and one tile whatever it was planned for, so every bit is the same.
With more of them pieces may be cut otherwise, and sums are rounded in another order: then the error is bounded.

The first engine answers twice and has to say the same, bit for bit. The second one's greedy answers may part from
these at near ties only: rows of a device may get other bits in another batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.checks.models import relative_error
from benchmarks.gpu.engines import Opened, Wanted, made_up, made_up_costs, with_engine
from benchmarks.gpu.models import Config, write_shape
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.record import Desk, Json
from benchmarks.gpu.steps import Tokens, answers, batch_of, made_up_prompts, top_tokens
from faser.engine.engine import Engine
from faser.engine.execution.runner.batch import RowBatch
from faser.engine.execution.runner.graph_runner import GraphRunner
from faser.engine.execution.runner.runner import Runner
from faser.types.engine import ModelInfo
from faser.types.sampling import SamplingParams

_FEW = 12  # tokens of context, with those of the step: less than a tile of any size
_MOST_ERROR = 5e-2  # a wrong number makes it about 1


def replayed(runner: Runner, info: ModelInfo, shapes: Sequence[tuple[int, int]], context: int) -> Json:
    """Logits of steps of (sequences, rows of each). context: the longer one. No sequence may be running."""
    assert isinstance(runner, GraphRunner), "the engine was built without CUDA graphs"
    found, ok = {}, True
    for sequences, rows_each in shapes:
        for tokens in (_FEW, context):
            step = _batch(info, sequences, rows_each, tokens)
            runner.forward(_batch(info, sequences, tokens, tokens))
            replay, eager = _logits(runner, step, GraphRunner), _logits(runner, step, Runner)
            graph_rows, others = runner.rows_replayed(step), int((replay != eager).sum())
            error = relative_error(replay, eager)
            row = {"graph_rows": graph_rows, "other_bits": others, "relative_error": error}
            found[f"{sequences} x {rows_each}, {tokens} tokens"] = row
            ok = ok and graph_rows == step.num_rows and error < _MOST_ERROR
            ok = ok and (tokens > _FEW or not others)
    return {"ok": ok, "found": found}


def _logits(runner: GraphRunner, step: RowBatch, way: type[Runner]) -> Tensor:
    """Return the logits [R, V] of all rows of a step, as many at a time as sequences. way: its methods."""
    way.forward(runner, step)
    rows, at_once = np.arange(step.num_rows), len(step.last_rows)
    return torch.cat([way.logits(runner, rows[at : at + at_once]).clone() for at in range(0, len(rows), at_once)])


def _batch(info: ModelInfo, sequences: int, rows_each: int, context: int) -> RowBatch:
    return batch_of(
        sequences=sequences,
        rows_each=rows_each,
        context=context,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        vocab_size=info.vocab_size,
    )


AGAIN, REPLAYS, SPECULATION, SYNCHRONOUS = NAMES = (
    "answers: the same again",
    "replays",
    "answers: speculation",
    "answers: synchronous",
)
LEAST_TOGETHER = 0.9
TIE = 0.5  # of log probabilities: several times what two ways of computing a deep model differ by
# The same of a mixture, where a row that meets a near tie of experts passes another one in another batch.
EXPERT_TIE = 3.0
_GREEDY = "greedy"
_SAMPLINGS: dict[str, dict[str, Any]] = {_GREEDY: {"temperature": 0.0}, "T 0.8": {"temperature": 0.8}}
_SEVERAL_STEPS = 3  # a prompt is read in about so many
_REPLAYED = 256  # tokens of context of the steps that are replayed

Said = dict[str, list[Tokens]]
Note = Callable[[str, Callable[[], Json]], None]
Ask = Callable[[Tokens], Mapping[int, float]]  # the likeliest tokens behind these, with their log probabilities


def run(plan: Plan, desk: Desk, note: Note, config: Config | None = None) -> None:
    """config: of the model; None: the usual draft model's.

    It drafts for itself, so that nearly everything is accepted where verification is right.
    """
    sizes = plan.sizes
    model = write_shape(plan.models / ("draft" if config is None else "answers"), config or sizes.draft)
    plain = Wanted(
        target=model,
        sequences=sizes.compared,
        context=sizes.context,
        rows=max(sizes.context * sizes.compared // _SEVERAL_STEPS, sizes.compared * (sizes.cycle_gamma + 1)),
        sources=made_up(plan),
        prefix_caching=False,
    )
    drafting = {"method": "draft_model", "model": str(model), "num_speculative_tokens": sizes.cycle_gamma}
    other = replace(
        plain,
        synchronous=True,
        speculative=drafting | {"policy": "fixed"},
        draft=model,
        costs=made_up_costs(),
    )
    if not desk.may_begin("answers of the usual engine"):
        return
    expected = with_engine(plan, plain, partial(_twice, plan, note))
    if desk.may_begin("answers of an engine that speculates and waits"):
        with_engine(plan, other, partial(_otherwise, plan, note, expected))


def _twice(plan: Plan, note: Note, opened: Opened) -> Said:
    expected = _said(plan, opened, _SAMPLINGS)
    note(AGAIN, lambda: same_again(_said(plan, opened, _SAMPLINGS), expected))
    return expected


def _otherwise(plan: Plan, note: Note, expected: Said, opened: Opened) -> None:
    note(REPLAYS, partial(_replayed, plan, opened))
    for name, policy in ((SPECULATION, "fixed"), (SYNCHRONOUS, "off")):
        note(name, lambda policy=policy: _by_policy(plan, opened, policy, expected[_GREEDY]))  # type: ignore[misc]


def _replayed(plan: Plan, opened: Opened) -> Json:
    if plan.dry_run:
        return {"ok": None, "skipped": "a CPU has no CUDA graphs"}
    sizes = plan.sizes
    shapes = ((1, 1), (sizes.compared, 1), (sizes.compared, sizes.cycle_gamma + 1))
    return replayed(opened.runner, opened.info, shapes, _REPLAYED)


def _by_policy(plan: Plan, opened: Opened, policy: str, expected: Sequence[Tokens]) -> Json:
    engine = opened.engine
    engine.use_policy(policy)
    found = _said(plan, opened, {_GREEDY: _SAMPLINGS[_GREEDY]})[_GREEDY]
    engine.use_policy("off")
    tie = EXPERT_TIE if opened.runner.experts_read else TIE
    return parted(found, expected, _prompts(plan, opened), partial(top_tokens, engine), tie)


def _said(plan: Plan, opened: Opened, samplings: Mapping[str, dict[str, Any]]) -> Said:
    engine: Engine = opened.engine
    prompts, count = _prompts(plan, opened), plan.sizes.answer_tokens
    return {
        name: answers(
            engine,
            prompts,
            lambda place, asked=asked: SamplingParams(seed=place, max_tokens=count, ignore_eos=True, **asked),  # type: ignore[misc]
        )
        for name, asked in samplings.items()
    }


def _prompts(plan: Plan, opened: Opened) -> list[Tokens]:
    return made_up_prompts(plan.sizes.compared, plan.sizes.context, opened.info.vocab_size)


def same_again(found: Said, expected: Said) -> Json:
    same = {name: found[name] == expected[name] for name in expected}
    return {"ok": all(same.values()), **same}


def parted(
    found: Sequence[Tokens], expected: Sequence[Tokens], prompts: Sequence[Tokens], ask: Ask, tie: float = TIE
) -> Json:
    """together: share of the tokens before an answer's first difference; all of them where that is a near tie."""
    together = ties = 0
    for one, other, prompt in zip(found, expected, prompts, strict=True):
        at = next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(other))
        if at < len(other) and _are_near(ask((*prompt, *other[:at])), one[at], other[at], tie):
            ties, at = ties + 1, len(other)
        together += at
    share = together / sum(len(other) for other in expected)
    same = sum(one == other for one, other in zip(found, expected, strict=True)) / len(expected)
    return {"ok": share >= LEAST_TOGETHER, "same": round(same, 4), "near_ties": ties, "together": round(share, 4)}


def _are_near(likeliest: Mapping[int, float], one: int, other: int, tie: float) -> bool:
    return one in likeliest and other in likeliest and abs(likeliest[one] - likeliest[other]) < tie
