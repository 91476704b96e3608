"""Phase `vllm`: the same work by vLLM, where that can be imported: plain, and with a draft model.

Each configuration starts a process of its own, which has its own time; what it has written by then counts. Shapes,
prompts, greedy choice, acceptance per position and sequences at a time are those of the phases `plain` and
`policies`. Weights are vLLM's dummy ones: the work is the same.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.common.closed_loop import made_up_prompts
from benchmarks.gpu.common.engines import draft_of, target_of
from benchmarks.gpu.common.plan import Plan
from benchmarks.gpu.common.record import Desk, Json
from faser.config.environment import child_environment

_ACCEPTANCE = 0.8
_START_S = 45.0  # less time than that is not worth a start
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
    if (missing := _import_error(plan.vllm)) is not None:
        desk.keep("not there", missing)
        return
    for gamma in (None, *(gamma for gamma in plan.sizes.caps if gamma > 1)):
        name = "plain" if gamma is None else f"draft_model:{gamma}"
        if desk.may_begin(f"vLLM {name}", needs_s=0.0 if plan.dry_run else _START_S):
            desk.keep(name, _one(plan, desk, name, asked(plan, gamma)))


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


def _import_error(path: Path) -> str | None:
    """Why vLLM cannot be imported from there; None where it can."""
    command = [sys.executable, "-P", "-c", "import vllm"]
    ended = subprocess.run(command, capture_output=True, text=True, env=_environment(path), check=False)
    if ended.returncode == 0:
        return None
    return f"importing vLLM from {path} failed: {ended.stderr.strip()[-_ERROR_CHARS:]}"


def _one(plan: Plan, desk: Desk, name: str, wanted: Json) -> Json:
    """Of one configuration: the rows that it wrote, and what stopped it."""
    assert plan.vllm is not None, "without vLLM nothing is run"
    given, written = (
        plan.out / f"vllm-{name.replace(':', '-')}.in",
        plan.out / f"vllm-{name.replace(':', '-')}.out",
    )
    given.write_text(json.dumps(wanted), "utf-8")
    written.unlink(missing_ok=True)
    command = [sys.executable, "-P", str(_CHILD), str(given), str(written)]
    error = None
    try:
        ended = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=_environment(plan.vllm),
            timeout=max(desk.left_s, 1.0),
            check=False,
        )
        if ended.returncode:
            error = ended.stderr.strip()[-_ERROR_CHARS:] or f"it ended with status {ended.returncode}"
    except subprocess.TimeoutExpired as expired:
        error = f"it was not done after {expired.timeout:.0f} s"
    rows = [json.loads(line) for line in written.read_text("utf-8").splitlines()] if written.exists() else []
    given.unlink()
    return {
        "about": {key: value for row in rows[:1] for key, value in row.items()},
        "acceptance": None if name == "plain" else _ACCEPTANCE,
        "cells": rows[1:],
        "error": error,
    }


def _environment(path: Path) -> dict[str, str]:
    """vLLM's own folder alone: what else is on the path might bring kernels that it would prefer."""
    return child_environment() | _ENVIRONMENT | {"PYTHONPATH": str(path)}
