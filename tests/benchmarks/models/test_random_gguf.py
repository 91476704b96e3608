"""Files of random weights are read as the models whose shapes they have. Oracle: the shape's own numbers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from benchmarks.models.random_gguf import SHAPES, Shape, write
from faser.engine.checkpoints.families.architecture import AttentionSpec, DenseSpec, ExpertsSpec
from faser.engine.checkpoints.families.qwen3_5 import DeltaNetSpec
from faser.engine.checkpoints.gguf.file import GgufFile
from faser.engine.text.tokenizer import load_tokenizer
from tests.engine.checkpoints.gguf.gguf_files import write_gguf
from tests.engine.execution.models.paged import load, prompt
from tests.engine.losslessness.equality import answers
from tests.engine.test_mtp_engine import asked, built, fixed, outcome

VOCABULARY = 600


def small(shape: Shape) -> Shape:
    """The same kind of model with rows of one or two blocks."""
    experts = None if shape.experts is None else (6, 2)
    return replace(
        shape,
        hidden=256,
        inner=512 if experts is None else 256,
        shared=256 if shape.shared else 0,
        heads=4,
        kv_heads=2,
        head_dim=64,
        experts=experts,
        delta_heads=shape.delta_heads and (2, 4, 64),
        vocabulary=VOCABULARY,
    )


@pytest.mark.parametrize("name, weights", [*((name, None) for name in SHAPES), ("qwen3.5-0.8b", Kind.Q8_0)])
@pytest.mark.full(but=("qwen2.5-1.5b-None", "qwen3.5-35b-a3b-None", "gpt-oss-20b-None", "qwen3.5-0.8b-8"))
def test_a_file_is_the_model_that_its_shape_describes(name: str, weights: Kind | None, tmp_path: Path) -> None:
    write_gguf(tmp_path / "vocabulary.gguf", tokenizer="gpt2")
    shape = small(SHAPES[name])
    if weights is not None:
        shape = replace(shape, kinds=(weights, weights, weights, None))
    path = tmp_path / "m.gguf"
    write(path, GgufFile(tmp_path / "vocabulary.gguf"), shape, 4)
    model = load(path)
    spec = model.decoder.spec
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size) == (4, 256, VOCABULARY)
    nets = [each.attention for each in spec.layers if isinstance(each.attention, DeltaNetSpec)]
    assert len(nets) == (3 if shape.delta_heads else 0)
    assert all((each.num_k_heads, each.num_v_heads, each.v_head_dim) == shape.delta_heads for each in nets)
    attention = spec.layers[3].attention
    assert isinstance(attention, AttentionSpec)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (4, 2, 64)
    networks = {each.feed_forward for each in spec.layers}
    assert len(networks) == 1
    network = networks.pop()
    if shape.experts is None:
        assert isinstance(network, DenseSpec)
        assert network.size == shape.inner
    else:
        assert isinstance(network, ExpertsSpec)
        found = ((network.num_experts, network.top_k), network.size, network.shared_size)
        assert found == (shape.experts, shape.inner, shape.shared)
    logits = model.prefill(prompt(20, 500), ())
    assert torch.isfinite(logits).all()
    assert logits.std() > 0.01
    assert load_tokenizer(path).vocab_size == VOCABULARY


@pytest.mark.parametrize("mtp", ["right", "wrong"])
def test_drafts_of_its_mtp_layer_are_all_accepted_or_all_refused(mtp: str, tmp_path: Path) -> None:
    """But for a chance of one in the vocabulary. Planted: layers that add to the residual stream as usual."""
    write_gguf(tmp_path / "vocabulary.gguf", tokenizer="gpt2")
    path = tmp_path / "m.gguf"
    write(path, GgufFile(tmp_path / "vocabulary.gguf"), small(SHAPES["qwen3.5-0.8b"]), 4, mtp)
    engine = built(path, fixed()).engine
    answers(engine, asked())
    verified, accepted = outcome(engine)
    assert verified > 50
    assert accepted == verified if mtp == "right" else accepted < 0.05 * verified
