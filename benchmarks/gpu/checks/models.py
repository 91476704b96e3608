"""Checks of a backend against the reference backend on the same device: one layer's parts, then whole models.

    python -m benchmarks.gpu.checks.models OUT [--dry-run]

Layouts are those of serving: prompts in pieces, ragged verification, decoding, and all of them in one step. What
bfloat16 costs by itself is measured on the reference backend, so that the bound is no guess. As a program it runs
one eager step of two layers of the large model, up to its logits, for a memory checker.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.models import BLOCK_SIZE, Config, MadeUp, write_shape
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.record import Json
from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir
from faser.engine.checkpoints.families.architecture import AttentionSpec, DecoderSpec
from faser.engine.checkpoints.files import read_model_config
from faser.engine.execution.models.layers import attention_shape
from faser.engine.execution.models.loader import load_decoder
from faser.engine.execution.models.rope import RotaryTables
from faser.engine.execution.runner.batch import BlockTable, RowBatch
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.startup.device import resolve_device
from faser.kernels.factory import make_backend
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.kv_cache import KvShape
from faser.kernels.torch_backend import TorchBackend

_SEQUENCES, _BLOCKS_EACH = 6, 24
_MOST_ERROR = 1.25  # times what the reference backend loses by computing in bfloat16
_MOST_ROWS = 512
_BIAS_STD = 0.2
WAYS = {"16 bits": None, "fp8": "fp8"}  # how products are quantised


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of one sequence in a step: positions start … start + count - 1."""

    slot: int
    start: int
    count: int


STEPS: dict[str, tuple[Rows, ...]] = {
    "prompts in pieces": (
        Rows(slot=0, start=0, count=70),
        Rows(slot=1, start=0, count=16),
        Rows(slot=2, start=0, count=129),
        Rows(slot=3, start=0, count=1),
    ),
    "pieces behind pieces, and decoding": (
        Rows(slot=0, start=70, count=55),
        Rows(slot=1, start=16, count=1),
        Rows(slot=2, start=129, count=1),
        Rows(slot=3, start=1, count=40),
    ),
    "decoding": (
        Rows(slot=0, start=125, count=1),
        Rows(slot=1, start=17, count=1),
        Rows(slot=2, start=130, count=1),
        Rows(slot=3, start=41, count=1),
    ),
    "ragged verification": (
        Rows(slot=3, start=42, count=5),
        Rows(slot=0, start=126, count=1),
        Rows(slot=2, start=131, count=8),
        Rows(slot=1, start=18, count=2),
    ),
    "behind refused tails": (
        Rows(slot=3, start=44, count=3),
        Rows(slot=2, start=132, count=1),
        Rows(slot=1, start=19, count=4),
        Rows(slot=0, start=127, count=2),
    ),
}


def layers(plan: Plan, configs: Sequence[Config] | None = None) -> Json:
    """Queries after rotation, and attention over all that was stored, of each kind of layer of some shapes.

    configs: of the shapes; None: the checked ones.
    """
    backend, reference = backend_of(plan), TorchBackend(plan.device)
    found = {}
    for config in plan.sizes.checked if configs is None else configs:
        spec = read_model_config(write_shape(plan.models / "checked", config)).spec
        for attention in dict.fromkeys(spec.attentions):
            for name, (queries, mixed) in _layer_errors(plan, spec, attention, backend, reference).items():
                found[f"{_described(attention)}, {name}"] = {"queries": queries, "attention": mixed}
    worst = max(max(each.values()) for each in found.values())
    return {"ok": worst < 2e-2, "worst": worst, "relative_errors": found}


def _described(attention: AttentionSpec) -> str:
    options = {
        f"window {attention.window}": attention.window is not None,
        "capped": attention.score_cap is not None,
        "sinks": attention.sinks,
    }
    heads = f"{attention.num_heads}/{attention.num_kv_heads} x {attention.head_dim}"
    return ", ".join((heads, *(name for name, has in options.items() if has)))


def logits(plan: Plan) -> Json:
    """Check two or three layers of each shape, through the runner, step after step over one cache.

    In 16 bits, and with products in fp8; each against the reference backend that rounds the same, by their errors
    from float32. Nothing but norms leaves the device.
    """
    found, ok = {}, True
    for config in plan.sizes.checked:
        spec = read_model_config(write_shape(plan.models / "checked", config)).spec
        reference = TorchBackend(plan.device)
        exact = step_logits(plan, spec, reference, torch.float32)
        usual = {each: step_logits(plan, spec, reference, torch.bfloat16, each) for each in (None, "fp8")}
        for way, quantization in WAYS.items():
            ours = step_logits(plan, spec, backend_of(plan), torch.bfloat16, quantization)
            errors = {name: compared(ours[name], usual[quantization][name], exact[name]) for name in STEPS}
            ok = ok and all(each["times_reference"] <= _MOST_ERROR for each in errors.values())
            found[f"{spec.attention.num_heads}/{spec.num_kv_heads} x {spec.head_dim}, {way}"] = errors
    return {"ok": ok, "errors": found}


def compared(ours: Tensor, usual: Tensor, exact: Tensor) -> dict[str, float]:
    """times_reference: the error of ours over that of the reference backend in the same type."""
    error = relative_error(ours, exact)
    return {
        "relative_error": round(error, 6),
        "times_reference": round(error / max(relative_error(usual, exact), 1e-9), 4),
        "same_greedy": _share(ours.argmax(-1) == exact.argmax(-1)),
    }


def backend_of(plan: Plan) -> Backend:
    config = resolve_device(EngineConfig(device=plan.device, backend=plan.backend, compile_kernels=plan.dry_run))
    kernels = cache_dir() / "kernels"
    return make_backend(config.backend, config.device, num_threads=config.threads, cache_dir=kernels)


def _layer_errors(
    plan: Plan, spec: DecoderSpec, attention: AttentionSpec, backend: Backend, reference: Backend
) -> dict[str, tuple[float, float]]:
    """Return by step the relative errors of queries and of attention, of one kind of layer."""
    shape = attention_shape(attention)
    tables = RotaryTables(spec, num_positions=_BLOCKS_EACH * BLOCK_SIZE, device=torch.device(plan.device))
    angles = tables.keys(attention)
    table, kv = _table(), _kv(spec, torch.bfloat16)
    sides = [(backend, backend.allocate_kv(kv)), (reference, reference.allocate_kv(kv))]
    generator = torch.Generator(plan.device).manual_seed(1)
    sinks = None
    if attention.sinks:
        sinks = torch.randn(shape.num_heads, generator=generator, device=plan.device).mul_(4)
    errors = {}
    for name, rows in STEPS.items():
        batch = _batch(table, rows, spec.vocab_size)
        size = (len(batch.token_ids), attention.q_size + 2 * attention.kv_size)
        qkv = torch.randn(size, generator=generator, device=plan.device).to(torch.bfloat16)
        outcomes = []
        for side, cache in sides:
            planned = side.plan(batch.layout, BLOCK_SIZE)
            queries = side.rope_append(qkv.clone(), angles, cache, 0, shape, planned)
            out = torch.full((size[0], attention.q_size), torch.nan, dtype=torch.bfloat16, device=plan.device)
            outcomes.append((queries.clone(), side.attend(queries, cache, 0, shape, planned, out, sinks=sinks)))
        (queries, mixed), (wanted_queries, wanted_mixed) = outcomes
        errors[name] = (relative_error(queries, wanted_queries), relative_error(mixed, wanted_mixed))
    return errors


@torch.inference_mode()
def step_logits(
    plan: Plan,
    spec: DecoderSpec,
    backend: Backend,
    dtype: torch.dtype = torch.bfloat16,
    quantization: str | None = None,
    steps: Mapping[str, tuple[Rows, ...]] = STEPS,
    *,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Return by step the logits [R, V] float32 of all its rows, on the device. Biases are wide enough to show."""
    decoder = load_decoder(
        plan.models / "checked",
        backend,
        dtype,
        max_model_len=_BLOCKS_EACH * BLOCK_SIZE,
        max_rows=_MOST_ROWS,
        quantization=quantization,
        source=MadeUp(spec, plan.device, seed, bias_std=_BIAS_STD),
        progress=lambda _done, _total: None,
    )
    runner, table = Runner(decoder, backend, _kv(spec, dtype)), _table()
    found = {}
    for name, rows in steps.items():
        batch = _batch(table, rows, spec.vocab_size)
        runner.forward(batch)
        found[name] = runner.logits(np.arange(len(batch.token_ids))).float().clone()
    return found


def _table() -> BlockTable:
    """Blocks of all sequences in an order of chance."""
    table = BlockTable(_SEQUENCES, _BLOCKS_EACH)
    order = np.random.default_rng(2).permutation(_SEQUENCES * _BLOCKS_EACH).reshape(_SEQUENCES, _BLOCKS_EACH)
    for slot, blocks in enumerate(order.tolist()):
        table.append(slot, tuple(blocks))
    return table


def _batch(table: BlockTable, rows: Sequence[Rows], vocab_size: int) -> RowBatch:
    """A sequence has the same token at a position whenever it computes it, behind a refused tail too."""
    token_ids = [1 + (each.slot * 31 + at * 17) % (vocab_size - 1) for each in rows for at in _positions(each)]
    return table.lay_out(
        [each.slot for each in rows],
        np.array([each.start for each in rows], np.int32),
        np.array([each.count for each in rows], np.int32),
        np.array(token_ids, np.int64),
    )


def _positions(rows: Rows) -> range:
    return range(rows.start, rows.start + rows.count)


def _kv(spec: DecoderSpec, dtype: torch.dtype) -> KvShape:
    return KvShape(
        heads=spec.kv_heads,
        num_blocks=_SEQUENCES * _BLOCKS_EACH,
        block_size=BLOCK_SIZE,
        dtype=dtype,
    )


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Relative, by norms; NaN becomes infinite."""
    error = float((found.double() - wanted.double()).norm() / wanted.double().norm())
    return error if error == error else float("inf")


def _share(true: Tensor) -> float:
    return round(float(true.float().mean()), 4)


def main(out: Path, dry_run: bool) -> None:
    plan = Plan(out=out, dry_run=dry_run)
    spec = read_model_config(write_shape(plan.models / "checked", plan.sizes.checked[0])).spec
    first = next(iter(STEPS))
    logits = step_logits(plan, spec, backend_of(plan), steps={first: STEPS[first]})[first]
    sys.stdout.write(f"{int(logits.isfinite().all())} {len(logits)} rows\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--dry-run" in sys.argv[2:])
