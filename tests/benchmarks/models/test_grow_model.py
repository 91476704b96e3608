"""A grown model says what its source says, to the last digits of float32; a noisy copy does not.

Oracle: transformers' Llama on both checkpoints. Faults are planted to see that the comparison would notice.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.models.grow_model import Growth, NoisySource, Units, copy_model, grow_model, grown_spec
from faser.engine.checkpoints.files import read_model_config
from faser.engine.execution.models import tensors
from faser.engine.execution.models.sources import SafetensorsSource
from tests.checkpoints import VOCAB_SIZE

HIDDEN = 160  # two and a half times the tiny model's: five groups of heads, so that a single one remains
NEAR = 1e-4


def logits_of(directory: Path) -> Tensor:
    """[T, V] of a fixed text, float32, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    token_ids = torch.randint(VOCAB_SIZE, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        logits: Tensor = model(token_ids).logits[0]
    return logits


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def grown(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("grown")
    grow_model(tiny_checkpoint, SafetensorsSource(tiny_checkpoint), out, HIDDEN, torch.float32)
    return out


def planted(grown: Path, out: Path, name: str, factor: float, columns: slice) -> Path:
    """A copy of the grown checkpoint where some columns of one tensor are multiplied."""
    out.mkdir()
    for path in grown.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    file = json.loads((grown / "model.safetensors.index.json").read_text())["weight_map"][name]
    tensors_of_file = load_file(out / file)
    tensors_of_file[name][:, columns] *= factor
    save_file(tensors_of_file, out / file, metadata={"format": "pt"})
    return out


def test_a_grown_model_gives_the_logits_of_its_source(tiny_checkpoint: Path, grown: Path) -> None:
    expected = logits_of(tiny_checkpoint)
    found = logits_of(grown)
    assert relative_error(found, expected) < NEAR
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize(
    "name, factor, columns",
    [
        ("model.embed_tokens.weight", (64 / HIDDEN) ** 0.5, slice(None)),  # the stream's scale is forgotten
        ("model.layers.1.self_attn.q_proj.weight", 1.2, slice(None)),
        ("model.layers.0.mlp.down_proj.weight", -1.0, slice(128, 129)),  # one of a pair writes its partner's value
        ("model.layers.1.self_attn.o_proj.weight", -1.0, slice(64, 80)),  # a pair of heads, likewise
    ],
)
def test_a_fault_in_a_grown_model_shows_in_its_logits(
    tiny_checkpoint: Path, grown: Path, tmp_path: Path, name: str, factor: float, columns: slice
) -> None:
    broken = planted(grown, tmp_path / "broken", name, factor, columns)
    assert relative_error(logits_of(broken), logits_of(tiny_checkpoint)) > 10 * NEAR


def test_a_grown_model_is_as_large_as_its_config_says_and_keeps_tokenizer_and_template(
    tiny_checkpoint: Path, grown: Path
) -> None:
    spec = read_model_config(grown).spec
    assert (spec.hidden_size, spec.num_kv_heads, spec.attention.num_heads, spec.head_dim) == (HIDDEN, 5, 10, 16)
    assert spec.feed_forward.size == 320
    source = SafetensorsSource(grown)
    assert {name: tuple(source.get(name).shape) for name in source.names()} == tensors.tensor_shapes(spec)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (grown / name).read_bytes() == (tiny_checkpoint / name).read_bytes()


def test_no_matrix_of_a_grown_model_has_zeros_but_for_units_without_a_partner(grown: Path) -> None:
    source = SafetensorsSource(grown)
    zeros = {name: int((source.get(name) == 0).sum()) for name in source.names() if (source.get(name) == 0).any()}
    assert zeros == {f"model.layers.{layer}.self_attn.o_proj.weight": HIDDEN * 2 * 16 for layer in range(2)}


def test_growing_twice_gives_the_same_model(tiny_checkpoint: Path, grown: Path) -> None:
    spec = read_model_config(tiny_checkpoint).spec
    again = Growth(spec, grown_spec(spec, HIDDEN)).shards(SafetensorsSource(tiny_checkpoint))
    source = SafetensorsSource(grown)
    assert all(torch.equal(value, source.get(name)) for shard in again for name, value in shard.items())


def test_units_are_paired_by_whole_groups_and_the_odd_one_stays_single() -> None:
    assert Units.between(2, 5, 16) == Units(pairs=16, singles=16)
    assert Units.between(128, 320) == Units(pairs=96, singles=0)


def test_a_model_does_not_grow_downwards(tiny_checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="hidden is 48; it must be at least the source's, 64"):
        grown_spec(read_model_config(tiny_checkpoint).spec, 48)


def test_a_model_of_its_sources_width_is_rotated_and_says_the_same(tiny_checkpoint: Path, tmp_path: Path) -> None:
    grow_model(tiny_checkpoint, SafetensorsSource(tiny_checkpoint), tmp_path, 64, torch.float32)
    assert relative_error(logits_of(tmp_path), logits_of(tiny_checkpoint)) < NEAR
    name = tensors.layer_prefix(0) + "mlp.up_proj.weight"
    own, rotated = (SafetensorsSource(each).get(name) for each in (tiny_checkpoint, tmp_path))
    assert relative_error(rotated, own) > 1


@pytest.mark.parametrize("noise", [0.05, 0.15])
def test_a_drafter_differs_from_its_source_by_the_noise_that_was_asked_for(
    tiny_checkpoint: Path, tmp_path: Path, noise: float
) -> None:
    source = SafetensorsSource(tiny_checkpoint)
    copy_model(tiny_checkpoint, NoisySource(source, noise), tmp_path, torch.float32)
    copied = SafetensorsSource(tmp_path)
    for name in source.names():
        before = source.get(name)
        difference = copied.get(name) - before
        expected = noise * float(before.std()) if before.ndim == 2 else 0.0
        assert float(difference.std()) == pytest.approx(expected, rel=0.1)


def test_without_noise_the_copy_is_the_source(tiny_checkpoint: Path, tmp_path: Path) -> None:
    source = SafetensorsSource(tiny_checkpoint)
    copy_model(tiny_checkpoint, NoisySource(source, 0.0), tmp_path, torch.float32)
    copied = SafetensorsSource(tmp_path)
    assert all(torch.equal(copied.get(name), source.get(name)) for name in source.names())
