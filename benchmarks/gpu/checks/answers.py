"""Checks of whole engines: recordings or eager calls, steps in flight or waiting for each, speculation or none.

Rows of a device may get other bits in another batch, and a near tie is then broken otherwise. So tokens that
differ are counted and reported, not forbidden: the share of answers that are the same, and how far the others go
together.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.gpu.common.closed_loop import Tokens, answers, made_up_prompts
from benchmarks.gpu.common.engines import Wanted, close, made_up, made_up_costs, open_engine
from benchmarks.gpu.common.plan import Plan
from benchmarks.gpu.common.record import Desk, Json
from benchmarks.gpu.common.shapes import write_shape
from faser.types import SamplingParams

_SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "T 0.8": {"temperature": 0.8}}
_SEVERAL_STEPS = 3  # a prompt is read in about so many


def run(plan: Plan, desk: Desk, note: Callable[[str, Callable[[], Json]], None]) -> None:
    """The draft model is the model itself, so that nearly everything is accepted where verification is right."""
    sizes = plan.sizes
    model = write_shape(plan.models / "draft", sizes.draft)
    plain = Wanted(
        target=model,
        sequences=sizes.compared,
        context=sizes.context,
        rows=max(sizes.context * sizes.compared // _SEVERAL_STEPS, sizes.compared),
        sources=made_up(plan),
    )
    drafting = {"method": "draft_model", "model": str(model), "num_speculative_tokens": sizes.cycle_gamma}
    arms = {
        "eager": replace(plain, eager=True),
        "synchronous": replace(plain, synchronous=True),
        "speculation": replace(
            plain, speculative=drafting | {"policy": "fixed"}, draft=model, costs=made_up_costs()
        ),
        "the same again": plain,
    }
    if not desk.may_begin("answers of the usual engine"):
        return
    expected = _said(plan, plain)
    for name, wanted in arms.items():
        if desk.may_begin(f"answers: {name}"):
            note(f"answers: {name}", lambda wanted=wanted: _compared(plan, wanted, expected))  # type: ignore[misc]


def _compared(plan: Plan, wanted: Wanted, expected: dict[str, list[Tokens]]) -> Json:
    found = _said(plan, wanted)
    return {"ok": None, **{name: agreement(found[name], expected[name]) for name in expected}}


def _said(plan: Plan, wanted: Wanted) -> dict[str, list[Tokens]]:
    opened = open_engine(plan, wanted)
    prompts = made_up_prompts(wanted.sequences, wanted.context, opened.info.vocab_size)
    count = plan.sizes.answer_tokens
    said = {
        name: answers(
            opened.engine,
            prompts,
            lambda place, asked=asked: SamplingParams(seed=place, max_tokens=count, ignore_eos=True, **asked),  # type: ignore[misc]
        )
        for name, asked in _SAMPLINGS.items()
    }
    close(opened)
    return said


def agreement(found: Sequence[Tokens], expected: Sequence[Tokens]) -> Json:
    """same: share of whole answers. together: share of the tokens before an answer's first difference."""
    pairs = list(zip(found, expected, strict=True))
    together = sum(_common(one, other) for one, other in pairs)
    return {
        "same": round(sum(one == other for one, other in pairs) / len(pairs), 4),
        "together": round(together / sum(len(other) for other in expected), 4),
    }


def _common(one: Tokens, other: Tokens) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
