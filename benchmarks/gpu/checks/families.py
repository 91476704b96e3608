"""Checks of mixtures of experts: alone, against the reference of all experts one by one, and in whole models.

A router's choice is a step: where two experts are nearly as likely, bfloat16 decides, and a row that passes
another expert than in float32 is off by far more than what rounding costs. So whole models are compared row by
row: the usual row by its median error, and rows that are far off by how many there are, next to the reference that
rounds the same.
"""

import math

import torch
from torch import Tensor

from benchmarks.gpu.checks.models import backend_of, relative_error, step_logits
from benchmarks.gpu.families import experts_of
from benchmarks.gpu.models import Config, write_shape
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.record import Json
from faser.engine.checkpoints.families import decoder_spec
from faser.engine.checkpoints.families.architecture import ExpertsSpec
from faser.engine.checkpoints.files import read_model_config
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.blocks import Experts
from faser.kernels.interface.experts import routed
from faser.kernels.torch_backend import TorchBackend

_MOST_EXPERT_ERROR = 2e-2
_MOST_ERROR = 1.25  # of the usual row, times what the reference backend loses by computing in bfloat16
_FAR = 4.0  # times the reference's median, from which on a row is far off
_MORE_FAR = 0.1  # of the rows: more than the reference has, where a few choose other experts


def experts(plan: Plan) -> Json:
    """One mixture of each shape by numbers of rows, one of which is no number; and how many experts were read."""
    found, ok = {}, True
    for config in plan.sizes.mixtures:
        spec = decoder_spec(config)
        backend, reference = backend_of(plan), TorchBackend(plan.device)
        ours, theirs = (
            _mixture(experts_of(spec), spec.hidden_size, each, plan.device) for each in (backend, reference)
        )
        for rows in plan.sizes.expert_rows:
            row = _compared(rows, spec.hidden_size, plan.device, (backend, ours), (reference, theirs))
            found[f"{config['model_type']}, {rows} rows"] = row
            ok = ok and row["relative_error"] < _MOST_EXPERT_ERROR and row["read"] == row["chosen"]
            ok = ok and row["others_unharmed"]
    return {"ok": ok, "found": found}


def _mixture(network: ExpertsSpec, hidden: int, backend: Backend, device: str) -> Experts:
    """The same weights for every backend. Biases are wide enough for gates that are clamped."""
    random = torch.Generator(device).manual_seed(5)

    def drawn(*shape: int, std: float) -> Tensor:
        return torch.randn(shape, generator=random, device=device).mul_(std).to(torch.bfloat16)

    def packed(rows: int, columns: int, std: float) -> object:
        bias = drawn(rows, std=std) if network.bias else None
        return backend.pack(drawn(rows, columns, std=1 / math.sqrt(columns)), bias)

    return Experts(
        router=packed(network.num_experts, hidden, 0.1),
        gate_up=tuple(packed(2 * network.size, hidden, 4.0) for _ in range(network.num_experts)),
        down=tuple(packed(hidden, network.size, 1.0) for _ in range(network.num_experts)),
        top_k=network.top_k,
        renormalise=network.renormalise,
        activation=network.activation,
    )


Side = tuple[Backend, Experts]


@torch.inference_mode()
def _compared(rows: int, hidden: int, device: str, ours: Side, theirs: Side) -> Json:
    """chosen: by the host, of the logits that this backend makes. others_unharmed: by a row of no numbers."""
    x = torch.randn((rows, hidden), generator=torch.Generator(device).manual_seed(rows), device=device)
    x = x.to(torch.bfloat16)
    (backend, block), (reference, its_block) = ours, theirs
    logits = backend.linear(x, block.router, torch.empty((rows, len(block.down)), device=device))
    chosen = routed(logits.cpu(), block)[0]
    before = backend.experts_read
    found = _added(x, backend, block)
    read = backend.experts_read - before
    wanted = _added(x, reference, its_block)
    x[0] = torch.nan
    harmed = _added(x, backend, block)
    same = bool(torch.equal(harmed[1:], found[1:])) and bool(harmed[0].isnan().all())
    return {
        "relative_error": round(relative_error(found, wanted), 6),
        "read": read,
        "chosen": len(set(chosen.flatten().tolist())),
        "others_unharmed": same,
    }


def _added(x: Tensor, backend: Backend, block: Experts) -> Tensor:
    hidden = torch.zeros_like(x)
    backend.experts(x, block, hidden)
    return hidden


def logits(plan: Plan) -> Json:
    """Check a few layers of each shape, through the runner, step after step over one cache, in 16 bits."""
    found, ok = {}, True
    for config in plan.sizes.families:
        row = _row_errors(plan, config)
        found[f"{config['model_type']}, {config['num_hidden_layers']} layers"] = row
        ok = ok and row["times_reference"] <= _MOST_ERROR and row["far"] <= row["reference_far"] + _MORE_FAR
    return {"ok": ok, "errors": found}


def _row_errors(plan: Plan, config: Config) -> Json:
    """Return errors of rows of several models: those of one are alike, so all meet a near tie or none."""
    spec = read_model_config(write_shape(plan.models / "checked", config)).spec
    reference, backend = TorchBackend(plan.device), backend_of(plan)
    errors: dict[str, list[Tensor]] = {"ours": [], "usual": []}
    same = []
    for seed in range(plan.sizes.family_seeds):
        exact, usual, ours = (
            torch.cat(list(step_logits(plan, spec, side, dtype, seed=seed).values()))
            for side, dtype in (
                (reference, torch.float32),
                (reference, torch.bfloat16),
                (backend, torch.bfloat16),
            )
        )
        errors["ours"].append(_errors(ours, exact))
        errors["usual"].append(_errors(usual, exact))
        same.append(ours.argmax(-1) == exact.argmax(-1))
    return far_rows(torch.cat(errors["ours"]), torch.cat(errors["usual"])) | {
        "same_greedy": round(float(torch.cat(same).float().mean()), 4),
        "times_by_seed": [
            round(float(one.median()) / max(float(other.median()), 1e-9), 3)
            for one, other in zip(errors["ours"], errors["usual"], strict=True)
        ],
    }


def _errors(found: Tensor, exact: Tensor) -> Tensor:
    """Return each row's error [R] relative to its norm; what is no number is infinitely far."""
    errors: Tensor = (found - exact).norm(dim=-1) / exact.norm(dim=-1)
    return torch.where(errors.isnan(), math.inf, errors)


def far_rows(ours: Tensor, usual: Tensor) -> Json:
    """Compare errors of rows [R] each: our median over the reference's, and shares of rows that are far off."""
    middle = float(usual.median())
    far = _FAR * middle
    return {
        "median_error": round(float(ours.median()), 6),
        "times_reference": round(float(ours.median()) / max(middle, 1e-9), 4),
        "far": round(float((ours > far).float().mean()), 4),
        "reference_far": round(float((usual > far).float().mean()), 4),
    }
