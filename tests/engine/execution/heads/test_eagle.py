"""EAGLE heads against a reference in float64, over prefills in chunks and drafted rows, in the authors' layouts.

Planted bugs that these tests have caught: features before the embedding; states without the target's final norm;
an input norm in the first layer; the bias of the projection left out.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from faser.engine.checkpoints.heads.head_spec import HeadKind
from faser.engine.execution.heads import tensors
from faser.errors import ModelError
from faser.kernels.interface.backend import Backend
from faser.kernels.torch_backend import TorchBackend
from tests.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.engine.execution.heads.references import Eagle, Shape, draft
from tests.engine.execution.heads.seeded import (
    TOKENS,
    flat_config,
    head_layers,
    head_spec,
    load_paged,
    seeded_states,
    seeded_weights,
    target,
)

SPEC = head_spec(kind=HeadKind.EAGLE, draft_vocab_size=VOCAB_SIZE, state_layers=(2,), states_are_normed=True)
OF_LAYERS = {key: value for key, value in flat_config().items() if key not in ("eagle_config", "draft_vocab_size")}
CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # config, and what the operator says
    "as the authors write it": (OF_LAYERS | {"architectures": ["LlamaForCausalLM"]}, {"method": "eagle"}),
    "as vLLM writes it": ({"model_type": "eagle", "architectures": ["EAGLEModel"], "model": OF_LAYERS}, {}),
    "by its architecture": (OF_LAYERS | {"architectures": ["EagleLlamaForCausalLM"]}, {}),
}


def write_eagle(
    directory: Path, config: dict[str, Any], *, without: tuple[str, ...] = ()
) -> dict[str, torch.Tensor]:
    weights = seeded_weights(SPEC)
    write_checkpoint(directory, config, {name: each for name, each in weights.items() if name not in without})
    return weights


def expected(
    weights: dict[str, torch.Tensor], tiny_checkpoint: Path, count: int
) -> tuple[list[int], torch.Tensor]:
    ends = target(tiny_checkpoint, TorchBackend()).ends
    layers = SPEC.decoder
    head = Eagle(
        weights={name: each.double() for name, each in weights.items()}
        | {"target's final norm": ends.final_norm.double()},
        shape=Shape(
            num_heads=layers.num_heads, num_kv_heads=layers.num_kv_heads, head_dim=layers.head_dim, eps=1e-5
        ),
    )
    features = head.features([seeded_states(SPEC, len(TOKENS)).double()])
    return draft(head, TOKENS, features, list(range(VOCAB_SIZE)), count)


@pytest.mark.parametrize("layout", CONFIGS)
def test_a_head_drafts_what_the_reference_does(
    layout: str, backend: Backend, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    config, options = CONFIGS[layout]
    weights = write_eagle(tmp_path, config)
    head = load_paged(tmp_path, tiny_checkpoint, backend, torch.float32, **options)
    assert head.head.spec.state_layers == (2,)
    found, logits = head.draft(TOKENS, seeded_states(SPEC, len(TOKENS)), 5, chunk=7)
    tokens, wanted = expected(weights, tiny_checkpoint, 5)
    assert found == tokens
    assert ((logits - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max() < 1e-5


def test_without_tensors_of_its_own_a_head_takes_the_targets(
    backend: Backend, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """The layout of the authors: embed_tokens is a copy of the target's, and there is no lm_head and no bias."""
    embedding = torch.empty((VOCAB_SIZE, 64))
    backend.embed(torch.arange(VOCAB_SIZE), target(tiny_checkpoint, backend).ends.embedding, embedding)
    weights = write_eagle(tmp_path, CONFIGS["by its architecture"][0])
    weights |= {tensors.EMBEDDING: embedding, tensors.HEAD: embedding}
    del weights[tensors.FC_BIAS]
    stored = {name: each for name, each in weights.items() if name != tensors.HEAD}
    save_file(stored, tmp_path / "model.safetensors")
    head = load_paged(tmp_path, tiny_checkpoint, backend, torch.float32)
    found, logits = head.draft(TOKENS, seeded_states(SPEC, len(TOKENS)), 4, chunk=10)
    tokens, wanted = expected(weights, tiny_checkpoint, 4)
    assert found == tokens
    assert ((logits - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max() < 1e-5
    matrices = sum(each.nbytes for name, each in stored.items() if name != tensors.EMBEDDING)
    assert head.head.weight_bytes == matrices, "the repeated embedding is packed once more"


def test_weights_of_torch_save_give_the_same_bits(tiny_checkpoint: Path, tmp_path: Path) -> None:
    backend, config = TorchBackend(), CONFIGS["by its architecture"][0]
    weights = write_eagle(tmp_path / "safetensors", config)
    write_eagle(tmp_path / "pickled", config)
    (tmp_path / "pickled" / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pickled" / "pytorch_model.bin")
    states = seeded_states(SPEC, len(TOKENS))
    drafts = [
        load_paged(tmp_path / name, tiny_checkpoint, backend, torch.float32).draft(TOKENS, states, 3, chunk=19)
        for name in ("safetensors", "pickled")
    ]
    assert torch.equal(drafts[0][1], drafts[1][1])


def test_a_file_of_torch_save_that_is_no_such_file_is_named(tiny_checkpoint: Path, tmp_path: Path) -> None:
    write_eagle(tmp_path, CONFIGS["by its architecture"][0])
    (tmp_path / "model.safetensors").unlink()
    pickled = tmp_path / "pytorch_model.bin"
    pickled.write_bytes(b"cut short")
    with pytest.raises(ModelError, match=r"pytorch_model.bin cannot be read"):
        load_paged(tmp_path, tiny_checkpoint, TorchBackend(), torch.float32)
    torch.save([1, 2], pickled)
    with pytest.raises(ModelError, match=r"pytorch_model.bin holds something other than tensors by name"):
        load_paged(tmp_path, tiny_checkpoint, TorchBackend(), torch.float32)


def test_two_layers_are_computed_in_their_order(backend: Backend, tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Only the second layer has an input norm."""
    spec = head_spec(
        head_layers(num_layers=2, windows=(None, None), rotary=(True, True)),
        kind=HeadKind.EAGLE,
        draft_vocab_size=VOCAB_SIZE,
        state_layers=(2,),
    )
    weights = seeded_weights(spec)
    assert "layers.1.input_layernorm.weight" in weights
    config = CONFIGS["by its architecture"][0] | {"num_hidden_layers": 2}
    write_checkpoint(tmp_path, config, weights)
    head = load_paged(tmp_path, tiny_checkpoint, backend, torch.float32)
    found, _ = head.draft(TOKENS, seeded_states(SPEC, len(TOKENS)), 3, chunk=5)
    reference = Eagle(
        weights={name: each.double() for name, each in weights.items()}
        | {"target's final norm": target(tiny_checkpoint, TorchBackend()).ends.final_norm.double()},
        shape=Shape(num_heads=4, num_kv_heads=2, head_dim=16, eps=1e-5),
        num_layers=2,
    )
    features = reference.features([seeded_states(SPEC, len(TOKENS)).double()])
    assert found == draft(reference, TOKENS, features, list(range(VOCAB_SIZE)), 3)[0]
