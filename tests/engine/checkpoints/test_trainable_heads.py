"""Which heads can be trained further, and what is said of the others."""

from pathlib import Path
from typing import Any

import pytest
import torch

from faser.distill.speculators_writer import write_speculators
from faser.engine.checkpoints.heads import FeatureNorm, untrainable
from tests.engine.execution.drafting.seeded_heads import head_layers, head_spec, seeded_weights

FORM: dict[str, Any] = {"feature_norm": FeatureNorm.EACH, "norm_before_residual": True}
TWO_LAYERS = head_layers(num_layers=2)


def test_a_head_of_faser_distill_can_be_trained(tmp_path: Path) -> None:
    assert untrainable(head_spec(**FORM), tmp_path) is None


@pytest.mark.parametrize(
    "changes, reason",
    [
        (
            {"layers": head_layers(num_layers=2)},
            "it has 2 layers, not 1",
        ),
        ({"target_hidden_size": 128}, "it is 64 values wide, its model 128"),
        ({"feature_norm": FeatureNorm.TOGETHER}, "its states have no norms of their own (fc_norm)"),
        ({"norm_before_residual": False}, "norm_before_residual is false"),
        ({"norm_output": True}, "norm_output is true"),
        ({"layers": head_layers(mlp_bias=True)}, "its layer has biases"),
        ({"layers": head_layers(qk_norm=True)}, "its layer normalises queries and keys"),
        ({"layers": head_layers(window=8)}, "its layer has a sliding window"),
        ({"layers": head_layers(rope=None)}, "its layer has no rotary embedding"),
    ],
)
def test_what_a_head_has_that_cannot_be_trained_is_named(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    assert untrainable(head_spec(**FORM | changes), tmp_path) == reason


def test_a_head_with_an_embedding_cannot_be_trained(tmp_path: Path) -> None:
    spec = head_spec(**FORM, draft_vocab_size=512)
    weights = {name: weight for name, weight in seeded_weights(spec).items() if name != "fc.bias"}
    write_speculators(
        tmp_path, spec, weights, draft_ids=None, target_architectures=["LlamaForCausalLM"], dtype=torch.float32
    )
    assert untrainable(spec, tmp_path) == "it has an embedding of its own"
