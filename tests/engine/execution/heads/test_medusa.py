"""Medusa heads against the paper's formula in float64, in the layouts of the authors and of vLLM.

Planted bugs that these tests have caught: every draft token from the first head; blocks without their residual
stream; states without the target's final norm.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from faser.engine.checkpoints.heads.head_spec import HeadKind
from faser.kernels.interface.backend import Backend
from faser.kernels.torch_backend import TorchBackend
from tests.checkpoints import VOCAB_SIZE, random_weights, write_json
from tests.engine.execution.heads.references import norm
from tests.engine.execution.heads.seeded import TARGET_HIDDEN, TOKENS, load_paged, seeded_states, target

NUM_HEADS, NUM_BLOCKS = 3, 2
AUTHORS: dict[str, Any] = {
    "base_model_name_or_path": "tiny",
    "medusa_num_heads": NUM_HEADS,
    "medusa_num_layers": NUM_BLOCKS,
}
VLLM: dict[str, Any] = {
    "architectures": ["MedusaModel"],
    "model_type": "medusa",
    "hidden_size": TARGET_HIDDEN,
    "vocab_size": VOCAB_SIZE,
    "num_heads": NUM_HEADS,
    "num_hidden_layers": NUM_BLOCKS,
}


def weights_of(prefix: str, *, authors: bool, bias: bool, own_heads: bool) -> dict[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(NUM_HEADS):
        for block in range(NUM_BLOCKS):
            name = f"{head}.{block}.linear" if authors else f"blocks.{head}.layers.{block}"
            shapes[f"{prefix}{name}.weight"] = (TARGET_HIDDEN, TARGET_HIDDEN)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (TARGET_HIDDEN,)
        if own_heads:
            last = f"{head}.{NUM_BLOCKS}.weight" if authors else f"lm_heads.{head}.weight"
            shapes[prefix + last] = (VOCAB_SIZE, TARGET_HIDDEN)
    return random_weights(shapes, seed=4)


def expected(
    weights: list[torch.Tensor], per_head: int, tiny_checkpoint: Path, states: torch.Tensor
) -> torch.Tensor:
    """[heads, V]: logits of each head for the last row. weights: in the order of weights_of."""
    ends = target(tiny_checkpoint, TorchBackend()).ends
    common = torch.empty((VOCAB_SIZE, TARGET_HIDDEN))
    TorchBackend().embed(torch.arange(VOCAB_SIZE), ends.head, common)
    logits = []
    for head in range(NUM_HEADS):
        mine = [each.double() for each in weights[head * per_head : (head + 1) * per_head]]
        x = norm(states[-1].double(), ends.final_norm.double(), 1e-5)
        for _ in range(NUM_BLOCKS):
            y = mine.pop(0) @ x
            if mine and mine[0].dim() == 1:
                y = y + mine.pop(0)
            x = x + y * torch.sigmoid(y)
        logits.append((mine[0] if mine else common.double()) @ x)
    return torch.stack(logits)


@pytest.mark.parametrize(
    ("config", "file", "layout"),
    [
        (AUTHORS, "medusa_lm_head.pt", {"prefix": "", "authors": True, "bias": True, "own_heads": True}),
        (
            AUTHORS,
            "model.safetensors",
            {"prefix": "medusa_head.", "authors": True, "bias": True, "own_heads": True},
        ),
        (
            VLLM,
            "model.safetensors",
            {"prefix": "medusa_heads.", "authors": False, "bias": False, "own_heads": True},
        ),
        (VLLM, "model.safetensors", {"prefix": "", "authors": False, "bias": True, "own_heads": False}),
    ],
)
def test_each_head_drafts_what_the_formula_says(
    config: dict[str, Any],
    file: str,
    layout: dict[str, Any],
    backend: Backend,
    tiny_checkpoint: Path,
    tmp_path: Path,
) -> None:
    write_json(tmp_path / "config.json", config)
    weights = weights_of(**layout)
    if file.endswith(".pt"):
        torch.save(weights, tmp_path / file)
    else:
        save_file(weights, tmp_path / file)
    head = load_paged(tmp_path, tiny_checkpoint, backend, torch.float32)
    spec = head.head.spec
    assert (spec.kind, spec.state_layers, spec.max_draft_tokens) == (HeadKind.MEDUSA, (2,), NUM_HEADS)
    states = seeded_states(spec, len(TOKENS))
    for _ in range(2):  # a second draft begins with the first head again
        found, logits = head.draft(TOKENS, states, NUM_HEADS, chunk=7)
        wanted = expected(list(weights.values()), len(weights) // NUM_HEADS, tiny_checkpoint, states)
        assert found == wanted.argmax(-1).tolist()
        assert ((logits - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max() < 1e-5


def test_a_draft_is_no_longer_than_there_are_heads(tiny_checkpoint: Path, tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", AUTHORS)
    save_file(weights_of("", authors=True, bias=True, own_heads=False), tmp_path / "model.safetensors")
    head = load_paged(tmp_path, tiny_checkpoint, TorchBackend(), torch.float32)
    with pytest.raises(AssertionError, match="a longer draft than there are heads"):
        head.draft(TOKENS, seeded_states(head.head.spec, len(TOKENS)), NUM_HEADS + 1, chunk=7)
