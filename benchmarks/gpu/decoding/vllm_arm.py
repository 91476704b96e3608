"""Phase `vllm`: the same work by vLLM, where that can be imported: plain, and with a draft model.

Each configuration starts a process of its own, which has its own time; what it has written by then counts. Shapes,
prompts, greedy choice, acceptance per position and sequences at a time are those of the phases `plain` and
`policies`. Weights are vLLM's dummy ones: the work is the same.
"""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.common.children import run_child, tail_of
from benchmarks.gpu.common.closed_loop import made_up_prompts
from benchmarks.gpu.common.engines import draft_of, target_of
from benchmarks.gpu.common.plan import Plan
from benchmarks.gpu.common.record import Desk, Json
from faser.config.environment import child_environment

_ACCEPTANCE = 0.8
_START_S = 45.0  # less time than that is not worth a start
_MOST_SHARE = 0.6  # of what is left, for a configuration that others wait for
_LENGTHS = (16, 144)
_ROUNDS = 3
_MEMORY_SHARE = 0.85
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
    if (missing := _import_error(plan, plan.vllm)) is not None:
        desk.keep("not there", missing)
        return
    gammas = (None, *(gamma for gamma in plan.sizes.caps if gamma > 1))
    for gamma in gammas:
        name = "plain" if gamma is None else f"draft_model:{gamma}"
        if desk.may_begin(f"vLLM {name}", needs_s=0.0 if plan.dry_run else _START_S):
            most_s = desk.left_s * (1.0 if gamma == gammas[-1] else _MOST_SHARE)
            _measure(plan, desk, name, asked(plan, gamma), most_s)


def asked(plan: Plan, gamma: int | None) -> Json:
    """What the child is told. gamma: drafted tokens; None: no speculation."""
    sizes = plan.sizes
    most = max(sizes.policy_batches)
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
    rows = [sequences * (1 if gamma is None else gamma + 1) for sequences in sizes.policy_batches]
    engine["compilation_config"] = {"cudagraph_capture_sizes": sorted({*sizes.policy_batches, *rows})}
    if gamma is not None:
        engine["speculative_config"] = {
            "method": "draft_model",
            "model": str(draft_of(plan)),
            "num_speculative_tokens": gamma,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": [_ACCEPTANCE**depth for depth in range(1, gamma + 1)],
        }
    return {
        "engine": engine,
        "prompts": made_up_prompts(most, sizes.context, int(sizes.target["vocab_size"])),
        "lengths": _LENGTHS,
        "batches": sizes.policy_batches,
        "rounds": _ROUNDS,
    }


def _import_error(plan: Plan, path: Path) -> str | None:
    """Why vLLM cannot be imported from there; None where it can."""
    command, log = [sys.executable, "-P", "-c", "import vllm"], plan.out / "vllm-import.log"
    status = run_child(command, environment=_environment(path), log=log, timeout_s=_START_S)
    if status == 0:
        return None
    how = f"took more than {_START_S:.0f} s" if status is None else f"failed: {tail_of(log, _ERROR_CHARS)}"
    return f"importing vLLM from {path} {how}"


def _measure(plan: Plan, desk: Desk, name: str, wanted: Json, most_s: float) -> None:
    """Keep the rows of one configuration as its process writes them, and what stopped it."""
    assert plan.vllm is not None, "without vLLM nothing is run"
    stem = plan.out / f"vllm-{name.replace(':', '-')}"
    given, written, log = (stem.with_suffix(each) for each in (".in", ".out", ".log"))
    given.write_text(json.dumps(wanted), "utf-8")
    written.unlink(missing_ok=True)

    def keep(error: str | None) -> None:
        rows = _rows(written)
        about: Json = rows[0] if rows else {}
        acceptance = None if name == "plain" else _ACCEPTANCE
        desk.keep(name, {"about": about, "acceptance": acceptance, "cells": rows[1:], "error": error})

    status = run_child(
        [sys.executable, "-P", str(_CHILD), str(given), str(written)],
        environment=_environment(plan.vllm),
        log=log,
        timeout_s=most_s,
        tick=lambda: keep("it was not done when this was written"),
    )
    said = tail_of(log, _ERROR_CHARS)
    if status is None:
        keep(f"it was not done after {most_s:.0f} s: {said}")
    else:
        keep((said or f"it ended with status {status}") if status else None)
    given.unlink()


def _rows(written: Path) -> list[Json]:
    """The whole lines of a file that may still be written to."""
    if not written.exists():
        return []
    return [
        json.loads(line) for line in written.read_text("utf-8").splitlines(keepends=True) if line.endswith("\n")
    ]


def _environment(path: Path) -> dict[str, str]:
    """vLLM's own folder alone: what else is on the path might bring kernels that it would prefer."""
    return child_environment() | _ENVIRONMENT | {"PYTHONPATH": str(path)}
