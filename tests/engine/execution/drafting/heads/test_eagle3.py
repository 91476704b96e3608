"""EAGLE-3 heads against a reference in float64, over prefills in chunks and drafted rows, in every variant.

Planted bugs that these tests have caught: the features before the embedding; a residual stream of the embedding;
one that begins with the features where norm_before_residual asks for the normalised ones; drafted rows that take
the normalised output; the map d2t read as token ids.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from faser.engine.checkpoints.heads import FeatureNorm, HeadSpec
from faser.kernels.interface.backend import Backend
from faser.kernels.torch_backend import TorchBackend
from tests.checkpoints import VOCAB_SIZE
from tests.engine.execution.drafting.head_references import Eagle3, Shape, draft
from tests.engine.execution.drafting.seeded_heads import (
    TOKENS,
    PagedHead,
    draft_vocabulary,
    flat_config,
    flattened,
    head_layers,
    head_spec,
    load_paged,
    seeded_states,
    target,
    write_seeded,
)

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm before residual": {"norm_before_residual": True},
    "norm of each layer": {"feature_norm": FeatureNorm.EACH},
    "norm of all layers": {"feature_norm": FeatureNorm.TOGETHER, "state_layers": (0, 2)},
    "norm of the output": {"norm_output": True, "norm_before_residual": True},
    "two layers": {"decoder": head_layers(num_layers=2)},
    "norms of queries and keys, a window": {"decoder": head_layers(qk_norm=True, window=5)},
    "biases": {"decoder": head_layers(bias=True, out_bias=True)},
    "narrower than the target": {"decoder": head_layers(hidden_size=32, num_heads=2, num_kv_heads=1)},
    "the target's vocabulary": {"draft_vocab_size": VOCAB_SIZE},
}


def reference(spec: HeadSpec, weights: dict[str, torch.Tensor]) -> Eagle3:
    decoder, rope = spec.decoder, spec.decoder.attention.rope
    assert rope is not None
    return Eagle3(
        weights={name: weight.double() for name, weight in weights.items()},
        shape=Shape(
            num_heads=decoder.attention.num_heads,
            num_kv_heads=decoder.num_kv_heads,
            head_dim=decoder.head_dim,
            eps=decoder.rms_norm_eps,
            theta=rope.theta,
            window=decoder.windows[0],
        ),
        num_layers=decoder.num_layers,
        norm_before_residual=spec.norm_before_residual,
        norm_output=spec.norm_output,
    )


def expected(spec: HeadSpec, weights: dict[str, torch.Tensor], count: int) -> tuple[list[int], torch.Tensor]:
    """What the reference drafts after TOKENS, and the logits."""
    head = reference(spec, weights)
    states = seeded_states(spec, len(TOKENS)).double()
    draft_ids = list(range(VOCAB_SIZE))
    if spec.draft_vocab_size < VOCAB_SIZE:
        draft_ids = draft_vocabulary(spec.draft_vocab_size).tolist()
    features = head.features(list(states.tensor_split(len(spec.state_layers), -1)))
    return draft(head, TOKENS, features, draft_ids, count)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_head_drafts_what_the_reference_does(
    variant: str, backend: Backend, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    spec = head_spec(**VARIANTS[variant])
    weights = write_seeded(tmp_path, spec)
    head = load_paged(tmp_path, tiny_checkpoint, backend, torch.float32)
    assert head.head.spec.state_layers == spec.state_layers
    found, logits = head.draft(TOKENS, seeded_states(spec, len(TOKENS)), 5, chunk=7)
    tokens, wanted = expected(spec, weights, 5)
    assert found == tokens
    torch.testing.assert_close(logits.double(), wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM"])
@pytest.mark.parametrize(("prefix", "layer"), [("", "midlayer."), ("model.", "layers.0.")])
def test_the_flat_layout_gives_the_same_bits(
    architecture: str, prefix: str, layer: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    backend, spec = TorchBackend(), head_spec()
    write_seeded(tmp_path / "speculators", spec)
    config = flat_config(architectures=[architecture])
    flat = flattened(tmp_path / "speculators", tmp_path / "flat", config, prefix=prefix, layer=layer)
    states = seeded_states(spec, len(TOKENS))
    drafts = [
        load_paged(directory, tiny_checkpoint, backend, torch.float32).draft(TOKENS, states, 4, chunk=19)
        for directory in (tmp_path / "speculators", flat)
    ]
    assert drafts[0][0] == drafts[1][0]
    assert torch.equal(drafts[0][1], drafts[1][1])


@pytest.mark.parametrize("of_target", [None, "int8"])
def test_without_tensors_of_its_own_a_head_takes_the_targets(
    of_target: str | None, backend: Backend, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """The tiny target ties its head to its embedding, so the reference takes both from there, rounded or not."""
    spec = head_spec()
    weights = write_seeded(tmp_path, spec, without=("embed_tokens.weight", "lm_head.weight"))
    decoder = target(tiny_checkpoint, backend, quantization=of_target)
    embedding = torch.empty((VOCAB_SIZE, 64))
    backend.embed(torch.arange(VOCAB_SIZE), decoder.ends.embedding, embedding)
    weights |= {"embed_tokens.weight": embedding, "lm_head.weight": embedding[draft_vocabulary()]}
    head = load_paged(tmp_path, tiny_checkpoint, backend, torch.float32, of_target=of_target)
    found, logits = head.draft(TOKENS, seeded_states(spec, len(TOKENS)), 4, chunk=10)
    tokens, wanted = expected(spec, weights, 4)
    assert found == tokens
    torch.testing.assert_close(logits.double(), wanted, atol=2e-4, rtol=1e-4)


def test_sequences_in_one_step_get_what_each_gets_alone(
    backend: Backend, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    spec = head_spec()
    write_seeded(tmp_path, spec)
    states = seeded_states(spec, 12)
    first, second = TOKENS[:7], TOKENS[7:12]
    alone = []
    for token_ids, part in ((first, states[:7]), (second, states[7:])):
        paged = load_paged(tmp_path, tiny_checkpoint, backend, torch.float32)
        alone.append(paged.run([(0, token_ids)], paged.head.features(part)).clone())
    both = load_paged(tmp_path, tiny_checkpoint, backend, torch.float32)
    both = PagedHead(both.head, backend, torch.float32, num_sequences=2)
    together = both.run([(1, first), (0, second)], both.head.features(states))
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "options", "bound"),
    [
        (torch.bfloat16, {}, 0.03),
        (torch.float32, {"quantization": "int8"}, 0.03),
        (torch.bfloat16, {"quantization": "int4"}, 0.2),
    ],
)
def test_rounded_weights_stay_near_the_reference(
    dtype: torch.dtype,
    options: dict[str, Any],
    bound: float,
    backend: Backend,
    tiny_checkpoint: Path,
    tmp_path: Path,
) -> None:
    """The same tokens are forced, so that a row compares with a row."""
    spec = head_spec()
    weights = write_seeded(tmp_path, spec)
    head = load_paged(tmp_path, tiny_checkpoint, backend, dtype, **options)
    _, logits = head.draft(TOKENS, seeded_states(spec, len(TOKENS)).to(dtype), 1, chunk=6)
    _, wanted = expected(spec, weights, 1)
    assert (logits - wanted).norm() / wanted.norm() < bound


def test_a_head_stored_in_8_bits_is_what_rounding_at_the_start_gives(
    backend: Backend, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    spec = head_spec()
    write_seeded(tmp_path / "floats", spec)
    write_seeded(tmp_path / "bytes", spec, int8=True)
    states = seeded_states(spec, len(TOKENS))
    rounded = load_paged(tmp_path / "floats", tiny_checkpoint, backend, torch.float32, quantization="int8")
    stored = load_paged(tmp_path / "bytes", tiny_checkpoint, backend, torch.float32)
    drafts = [each.draft(TOKENS, states, 4, chunk=8) for each in (rounded, stored)]
    assert drafts[0][0] == drafts[1][0]
    assert torch.equal(drafts[0][1], drafts[1][1])
    assert stored.head.weight_bytes == rounded.head.weight_bytes
    size = (tmp_path / "bytes" / "model.safetensors").stat().st_size
    assert size < 0.35 * (tmp_path / "floats" / "model.safetensors").stat().st_size


def test_a_step_reuses_the_memory_of_the_first(backend: Backend, tiny_checkpoint: Path, tmp_path: Path) -> None:
    spec = head_spec()
    write_seeded(tmp_path, spec)
    head = load_paged(tmp_path, tiny_checkpoint, backend, torch.float32)
    places = set()
    for rows in (5, 9, 1):
        hidden = head.run([(0, TOKENS[:rows])], head.head.features(seeded_states(spec, rows)))
        places.add((hidden.data_ptr(), head.head.logits(hidden).data_ptr()))
    assert len(places) == 1
