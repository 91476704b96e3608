"""The arithmetic of an MTP layer against a reference in float64, over prefills in chunks and drafted rows.

Planted bugs that these tests have caught: the states before the embedding in the input of fc; states that the
target's final norm does not see; weights of experts that are not renormalised; an expert too few; gates and ups of
stacked experts in each other's place.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file

from faser.engine.checkpoints.heads import read_mtp_spec
from faser.engine.execution.drafting.heads.mtp import load_mtp
from faser.errors import ModelError
from faser.kernels.interface.backend import Backend
from faser.kernels.torch_backend import TorchBackend
from tests.checkpoints import VOCAB_SIZE
from tests.engine.checkpoints.gguf.gguf_files import convert
from tests.engine.checkpoints.mtp_models import EXPERTS, Mtp, edit_weights, stack_experts, write_mtp_model
from tests.engine.execution.drafting.seeded_heads import MAX_POSITIONS, TOKENS, PagedHead, target


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_mtp_model(directory)
    return directory


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mixture")
    write_mtp_model(directory, "qwen3_5_moe_text", **EXPERTS)
    return directory


def load_paged(
    directory: Path,
    backend: Backend,
    dtype: torch.dtype = torch.float32,
    *,
    quantization: str | None = None,
    draft_ids: torch.Tensor | None = None,
) -> PagedHead:
    decoder = target(directory, backend, dtype, quantization=quantization)
    spec = read_mtp_spec(directory, decoder.spec)
    assert spec is not None
    head = load_mtp(
        directory,
        spec,
        decoder,
        backend,
        max_positions=MAX_POSITIONS,
        max_rows=64,
        max_logit_rows=64,
        quantization=quantization,
        draft_ids=draft_ids,
    )
    return PagedHead(head, backend, dtype)


def stream(rows: int) -> torch.Tensor:
    """[rows, H]: of the target behind its last layer, whose scale is not that of normed values."""
    return 7 * torch.randn((rows, 64), generator=torch.Generator().manual_seed(9))


def expected(
    directory: Path, count: int, draft_ids: Sequence[int] = range(VOCAB_SIZE)
) -> tuple[list[int], torch.Tensor]:
    """What follows some token and TOKENS, and the logits."""
    reference = Mtp.of(directory)
    return reference.draft([0, *TOKENS], reference.final_norm(stream(len(TOKENS)).double()), count, draft_ids)


def test_the_layer_drafts_what_the_reference_does(model: Path, backend: Backend) -> None:
    found, logits = load_paged(model, backend).draft(TOKENS, stream(len(TOKENS)), 6, chunk=7)
    tokens, wanted = expected(model, 6)
    assert found == tokens
    torch.testing.assert_close(logits.double(), wanted, atol=2e-4, rtol=1e-4)


def test_a_layer_with_experts_drafts_what_the_reference_does(
    mixture: Path, backend: Backend, tmp_path: Path
) -> None:
    tokens, wanted = expected(mixture, 6)
    stacked = shutil.copytree(mixture, tmp_path / "stacked")
    stack_experts(stacked)
    for directory in (mixture, stacked):
        found, logits = load_paged(directory, backend).draft(TOKENS, stream(len(TOKENS)), 6, chunk=7)
        assert found == tokens
        torch.testing.assert_close(logits.double(), wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "kind", "bound"),
    [("qwen35", "F32", 1e-4), ("qwen35", "Q8_0", 0.04), ("qwen35moe", "F32", 1e-4)],
)
def test_the_layer_of_a_gguf_file_drafts_what_the_reference_does(
    architecture: str, kind: str, bound: float, model: Path, mixture: Path, backend: Backend, tmp_path: Path
) -> None:
    """Q8_0: next to the reference, whose weights are not rounded."""
    directory = mixture if architecture == "qwen35moe" else model
    reference, path = Mtp.of(directory), tmp_path / "model.gguf"
    weights = {name: weight.float().numpy() for name, weight in reference.weights.items()}
    convert(reference.config, weights, path, architecture, quantization=GGMLQuantizationType[kind])
    _, logits = load_paged(path, backend).draft(TOKENS, stream(len(TOKENS)), 1, chunk=19)
    _, wanted = expected(directory, 1)
    assert (logits - wanted).norm() / wanted.norm() < bound


@pytest.mark.parametrize(
    ("dtype", "quantization", "bound"),
    [(torch.bfloat16, None, 0.03), (torch.float32, "int8", 0.04), (torch.bfloat16, "int4", 0.25)],
)
def test_rounded_weights_stay_near_the_reference(
    dtype: torch.dtype, quantization: str | None, bound: float, model: Path, backend: Backend
) -> None:
    head = load_paged(model, backend, dtype, quantization=quantization)
    _, logits = head.draft(TOKENS, stream(len(TOKENS)).to(dtype), 1, chunk=19)
    _, wanted = expected(model, 1)
    assert (logits - wanted).norm() / wanted.norm() < bound


@pytest.mark.parametrize(("quantization", "bound"), [(None, 1e-4), ("int8", 0.04)])
def test_the_layer_chooses_from_a_part_of_the_vocabulary(
    quantization: str | None, bound: float, model: Path, backend: Backend
) -> None:
    draft_ids = torch.tensor([*range(2, 100, 3), 300, 411])
    head = load_paged(model, backend, quantization=quantization, draft_ids=draft_ids)
    found, logits = head.draft(TOKENS, stream(len(TOKENS)), 3, chunk=19)
    tokens, wanted = expected(model, 3, draft_ids.tolist())
    assert logits.shape == wanted.shape
    assert quantization is not None or found == tokens
    assert (logits[0] - wanted[0]).norm() / wanted[0].norm() < bound


@pytest.mark.parametrize("quantization", ["Q4_0", "Q8_0", "int8", None])
def test_rows_of_a_part_of_the_vocabulary_are_the_stored_ones(
    quantization: str | None, model: Path, backend: Backend, tmp_path: Path
) -> None:
    """Not rounded once more: logits have the same bits, but for sums in another order by torch."""
    path, rounded = model, quantization
    if quantization is not None and quantization.startswith("Q"):
        reference, path, rounded = Mtp.of(model), tmp_path / "model.gguf", None
        weights = {name: weight.float().numpy() for name, weight in reference.weights.items()}
        convert(reference.config, weights, path, "qwen35", quantization=GGMLQuantizationType[quantization])
    draft_ids = torch.tensor([*range(2, 100, 3), 300, 411])
    part, whole = (
        load_paged(path, backend, quantization=rounded, draft_ids=ids).draft(
            TOKENS, stream(len(TOKENS)), 1, chunk=19
        )[1]
        for ids in (draft_ids, None)
    )
    tolerance = 0.0 if backend.name == "native" else 1e-5
    torch.testing.assert_close(part, whole[:, draft_ids], atol=tolerance, rtol=tolerance)


def test_embedding_and_logits_are_those_of_the_target(model: Path, backend: Backend) -> None:
    head = load_paged(model, backend).head
    of_layer = sum(weight.numel() for name, weight in Mtp.of(model).weights.items() if name.startswith("mtp."))
    assert head.weight_bytes == 4 * of_layer


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"mtp.norm.weight": None},
            "has fc, layers, pre_fc_norm_embedding, pre_fc_norm_hidden; only layers with fc",
        ),
        ({"mtp.embed_tokens.weight": torch.zeros(512, 64)}, "has embed_tokens, fc, layers, norm, pre_fc"),
        ({"mtp.layers.0.mlp.up_proj.weight": None}, "lacks tensor mtp.layers.0.mlp.up_proj.weight"),
        ({"mtp.layers.0.mlp.up_proj.bias": torch.zeros(96)}, "has tensor mtp.layers.0.mlp.up_proj.bias, which"),
        ({"mtp.fc.weight": torch.zeros(64, 64)}, r"mtp.fc.weight has shape \[64, 64\]"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    write_mtp_model(tmp_path)
    edit_weights(tmp_path, change)
    with pytest.raises(ModelError, match=words):
        load_paged(tmp_path, TorchBackend())


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("qwen3_5_text", "is a mixture of experts; the layers of the model are dense"),
        ("qwen3_5_moe_text", "is dense; the layers of the model are a mixture of experts"),
    ],
)
def test_a_layer_of_another_kind_than_those_of_the_model_is_refused(
    family: str, words: str, tmp_path: Path
) -> None:
    fields = EXPERTS if family == "qwen3_5_moe_text" else {}
    write_mtp_model(tmp_path, family, **fields)
    experts = {
        name: None
        for name in load_file(tmp_path / "model.safetensors")
        if name.startswith("mtp.") and "experts" in name
    }
    edit_weights(tmp_path, experts or {"mtp.layers.0.mlp.experts.0.up_proj.weight": torch.zeros(96, 64)})
    with pytest.raises(ModelError, match=words):
        load_paged(tmp_path, TorchBackend())
