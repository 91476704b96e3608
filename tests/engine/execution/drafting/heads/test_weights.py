"""What the loader refuses, by name, and what it tells of its work."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from faser.engine.execution.drafting.heads.weights import load_head
from faser.errors import ConfigError, ModelError
from faser.kernels.torch_backend import TorchBackend
from tests.engine.execution.drafting.seeded_heads import (
    MAX_POSITIONS,
    head_layers,
    head_spec,
    load_paged,
    seeded_weights,
    target,
    write_seeded,
)


def edit(directory: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of a checkpoint; None removes one. Names with __ for a dot."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in changes.items():
        name = name.replace("__", ".")
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fc__weight": None}, "lacks tensor fc.weight"),
        ({"fc__weight": torch.zeros(64, 64)}, r"fc.weight has shape \[64, 64\]; the config asks for \[64, 192\]"),
        (
            {"fc_norm__0__weight": torch.ones(64)},
            "has tensor fc_norm.0.weight, which its config does not describe",
        ),
        (
            {"midlayer__hidden_norm__weight": torch.ones(64)},
            "layers.0.hidden_norm.weight and midlayer.hidden_norm",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_named(
    changes: dict[str, Any], message: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    write_seeded(tmp_path, head_spec())
    edit(tmp_path, **changes)
    with pytest.raises(ModelError, match=message):
        load_paged(tmp_path, tiny_checkpoint, TorchBackend(), torch.float32)


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_a_narrower_head_cannot_take_the_targets_tensors(name: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    spec = head_spec(head_layers(hidden_size=32, num_heads=2, num_kv_heads=1))
    write_seeded(tmp_path, spec, without=[name])
    with pytest.raises(ModelError, match=f"no tensor {name} and is 32 values wide; .* which is 64 wide"):
        load_paged(tmp_path, tiny_checkpoint, TorchBackend(), torch.float32)


def test_a_quantization_is_known_and_not_applied_twice(tiny_checkpoint: Path, tmp_path: Path) -> None:
    write_seeded(tmp_path, head_spec(), int8=True)
    for quantization, message in (("fp8", "of a head is fp8; only int8, int4"), ("int4", "is quantised already")):
        with pytest.raises(ConfigError, match=message):
            load_paged(tmp_path, tiny_checkpoint, TorchBackend(), torch.float32, quantization=quantization)


def test_tensors_that_only_training_needs_are_passed_over(tiny_checkpoint: Path, tmp_path: Path) -> None:
    write_seeded(tmp_path, head_spec())
    edit(tmp_path, verifier_lm_head__weight=torch.zeros(2, 2), verifier_norm__weight=torch.zeros(2))
    load_paged(tmp_path, tiny_checkpoint, TorchBackend(), torch.float32)


def test_progress_counts_the_bytes_of_all_tensors(tiny_checkpoint: Path, tmp_path: Path) -> None:
    spec, backend, reports = head_spec(), TorchBackend(), []
    write_seeded(tmp_path, spec)
    head = load_head(
        tmp_path,
        target(tiny_checkpoint, backend),
        backend,
        max_positions=MAX_POSITIONS,
        max_rows=4,
        progress=lambda done, total: reports.append((done, total)),
    )
    size = sum(each.nbytes for each in seeded_weights(spec).values())
    assert reports[-1] == (size, size)
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)
    assert head.weight_bytes == size


def test_more_rows_than_the_buffers_hold_are_our_own_mistake(tiny_checkpoint: Path, tmp_path: Path) -> None:
    spec = head_spec()
    write_seeded(tmp_path, spec)
    head = load_paged(tmp_path, tiny_checkpoint, TorchBackend(), torch.float32).head
    with pytest.raises(AssertionError, match="more rows"):
        head.features(torch.zeros(33, spec.states_size))
    with pytest.raises(AssertionError, match="logits buffer"):
        head.logits(torch.zeros(33, 64))
