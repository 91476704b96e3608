"""Phase `vllm`: the same work by vLLM and by FASER in turns: plain, and with a draft model.

vLLM runs in a process of its own for each configuration, which has its own time; what it has written by then
counts. FASER follows at once, over the same shapes, prompts, greedy choice, acceptance per position and sequences
at a time, timed in the same way. Both have made-up weights: the work is the same. vLLM runs without torch.compile,
for which there is no time, with CUDA graphs of whole decode steps.
"""

import json
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.decoding.policies import synthetic
from benchmarks.gpu.decoding.vllm_child import rate
from benchmarks.gpu.engines import (
    Opened,
    Wanted,
    draft_of,
    made_up,
    made_up_costs,
    target_of,
    with_engine,
)
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.record import Desk, Json, run_child, tail_of
from benchmarks.gpu.steps import Tokens, answers, made_up_prompts
from faser.config.environment import child_environment
from faser.errors import EngineError
from faser.types.sampling import SamplingParams

_ACCEPTANCE = 0.8
_START_S = 60.0  # less time than that is not worth a start
_OURS_S = 30.0  # that FASER needs for a configuration
_LENGTHS, _DRY_LENGTHS = (16, 144), (2, 5)
_ROUNDS = 3
_MEMORY_SHARE = 0.85
_NO_COMPILING, _WHOLE_STEPS = 0, "FULL_DECODE_ONLY"  # vLLM's names of modes
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
_CHILD = Path(__file__).with_name("vllm_child.py")
_ERROR_CHARS = 2000


def run(plan: Plan, desk: Desk) -> None:
    if plan.vllm is None:
        desk.keep("not there", "no --vllm was given")
        return
    gammas = (None, plan.sizes.caps[1])
    for place, gamma in enumerate(gammas):
        name = "plain" if gamma is None else f"draft_model:{gamma}"
        if not desk.may_begin(f"vLLM {name}", needs_s=0.0 if plan.dry_run else _START_S):
            continue
        most_s = desk.left_s / (len(gammas) - place) - (0.0 if plan.dry_run else _OURS_S)
        missing = _measure(plan, desk, name, asked(plan, gamma), most_s)
        if missing is not None:
            desk.keep("not there", missing)
            return
        if desk.may_begin(f"FASER {name}"):
            with_engine(plan, _wanted(plan, gamma), partial(_measure_here, plan, desk, name, gamma))


def asked(plan: Plan, gamma: int | None) -> Json:
    """Return the child's input. gamma: drafted tokens; None: no speculation."""
    sizes, batches = plan.sizes, plan.sizes.vllm_batches
    most = max(batches)
    engine: dict[str, Any] = {
        "model": str(target_of(plan)),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": sizes.context + 1024,
        "max_num_seqs": most,
        "max_num_batched_tokens": max(sizes.rows, most),
        "gpu_memory_utilization": _MEMORY_SHARE,
        "enable_prefix_caching": True,
        "seed": 0,
    }
    rows = [sequences * (1 if gamma is None else gamma + 1) for sequences in batches]
    engine["compilation_config"] = {
        "mode": _NO_COMPILING,
        "cudagraph_mode": _WHOLE_STEPS,
        "cudagraph_capture_sizes": sorted({*batches, *rows}),
    }
    if gamma is not None:
        engine["speculative_config"] = _speculative(plan, gamma)
    return {
        "engine": engine,
        "prompts": made_up_prompts(most, sizes.context, int(sizes.target["vocab_size"])),
        "lengths": _DRY_LENGTHS if plan.dry_run else _LENGTHS,
        "batches": batches,
        "rounds": _ROUNDS,
    }


def _speculative(plan: Plan, gamma: int) -> dict[str, Any]:
    return synthetic(draft_of(plan), cap=gamma, acceptance=_ACCEPTANCE)


def _measure(plan: Plan, desk: Desk, name: str, wanted: Json, most_s: float) -> str | None:
    """Keep the rows of one configuration as its process writes them, and what stopped it.

    Returns why vLLM cannot be imported; None: it can.
    """
    assert plan.vllm is not None, "without vLLM nothing is run"
    stem = plan.out / f"vllm-{name.replace(':', '-')}"
    given, written, log = (stem.with_suffix(each) for each in (".in", ".out", ".log"))
    given.write_text(json.dumps(wanted), "utf-8")
    written.unlink(missing_ok=True)

    def keep(error: str | None) -> None:
        rows = _rows(written)
        about: Json = rows[0] if rows else {}
        acceptance = None if name == "plain" else _ACCEPTANCE
        _keep(
            desk, name, {"about": about, "acceptance": acceptance, "cells": rows[1:], "ours": [], "error": error}
        )

    status = run_child(
        [sys.executable, "-P", str(_CHILD), str(given), str(written)],
        environment=_environment(plan.vllm),
        log=log,
        timeout_s=most_s,
        tick=lambda: keep("it was not done when this was written"),
    )
    given.unlink()
    if (rows := _rows(written)) and "not there" in rows[0]:
        return f"importing vLLM from {plan.vllm} failed: {rows[0]['not there']}"
    said = tail_of(log, _ERROR_CHARS)
    if status is None:
        keep(f"it was not done after {most_s:.0f} s: {said}")
    else:
        keep((said or f"it ended with status {status}") if status else None)
    return None


def _wanted(plan: Plan, gamma: int | None) -> Wanted:
    sizes = plan.sizes
    return Wanted(
        target=target_of(plan),
        draft=None if gamma is None else draft_of(plan),
        sequences=max(sizes.vllm_batches),
        context=sizes.context,
        rows=sizes.rows,
        sources=made_up(plan),
        speculative=None if gamma is None else _speculative(plan, gamma) | {"policy": "fixed"},
        costs=made_up_costs(),
    )


def _measure_here(plan: Plan, desk: Desk, name: str, gamma: int | None, opened: Opened) -> None:
    given = asked(plan, gamma)
    prompts: list[Tokens] = given["prompts"]
    _seconds(opened, prompts, 1)
    for sequences in given["batches"]:
        if not desk.may_begin(f"FASER {name}: {sequences} sequences"):
            continue
        row = rate(lambda length, some=prompts[:sequences]: _seconds(opened, some, length), sequences, given)  # type: ignore[misc]
        arm = desk.result["arms"][name]
        _keep(desk, name, {**arm, "ours": [*arm["ours"], row]})


def _keep(desk: Desk, name: str, arm: Json) -> None:
    arms = {**desk.result.get("arms", {}), name: arm}
    desk.keep("arms", arms)
    desk.keep("rows", side_by_side(arms))


def side_by_side(arms: Mapping[str, Json]) -> list[Json]:
    """One row for each number of sequences that vLLM has; ratio: tokens a second of FASER over vLLM's."""
    rows = []
    for name, arm in arms.items():
        ours = {cell["sequences"]: cell["tokens_per_s"] for cell in arm["ours"]}
        for cell in arm["cells"]:
            row = {"configuration": name, "sequences": cell["sequences"], "vllm": cell["tokens_per_s"]}
            own = ours.get(cell["sequences"])
            if own is not None:
                row |= {"faser": own, "ratio": round(own / cell["tokens_per_s"], 4)}
            rows.append(row)
    return rows


def _seconds(opened: Opened, prompts: list[Tokens], max_tokens: int) -> float:
    """Raises EngineError for an answer of another length."""
    began_s = time.perf_counter()
    said = answers(
        opened.engine,
        prompts,
        lambda _: SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
    )
    taken_s = time.perf_counter() - began_s
    if (counts := {len(each) for each in said}) != {max_tokens}:
        raise EngineError(f"answers have {sorted(counts)} tokens; {max_tokens} were asked for")
    return taken_s


def _rows(written: Path) -> list[Json]:
    """The whole lines of a file that may still be written to."""
    if not written.exists():
        return []
    return [
        json.loads(line) for line in written.read_text("utf-8").splitlines(keepends=True) if line.endswith("\n")
    ]


def _environment(path: Path) -> dict[str, str]:
    """vLLM's own folder alone: what else is on the path might have kernels that it would prefer."""
    return child_environment() | _ENVIRONMENT | {"PYTHONPATH": str(path)}
