"""Which drafter a configuration gets, and whether a model must be loaded for it."""

from pathlib import Path

import pytest

from faser.engine.batch import BlockTable
from faser.engine.spec.chooser import Chooser
from faser.engine.spec.draft_model import DraftModel
from faser.engine.spec.factory import DrafterParts, DraftModelParts, make_drafter, names_model
from faser.engine.spec.layer_skip import LayerSkip
from faser.engine.spec.ngram import NgramDrafter
from faser.engine.spec.suffix import SuffixDrafter
from faser.errors import ConfigError
from faser.speculation import SpeculationConfig
from tests.engine.spec.drafting import BLOCK_SIZE, MAX_LEN, MAX_ROWS, NUM_BLOCKS, NUM_SLOTS, make_runner


def parts(directory: Path, *, with_model: bool = False) -> DrafterParts:
    model = DraftModelParts(
        runner=make_runner(directory), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_positions=MAX_LEN
    )
    return DrafterParts(
        target=make_runner(directory),
        table=BlockTable(NUM_SLOTS, 8),
        num_slots=NUM_SLOTS,
        max_rows=MAX_ROWS,
        model=model if with_model else None,
    )


@pytest.mark.parametrize(
    "method, model, kind",
    [
        ("draft_model", "some/model", DraftModel),
        ("layer_skip", None, LayerSkip),
        ("ngram", None, NgramDrafter),
        ("suffix", None, SuffixDrafter),
        ("auto", None, Chooser),
        ("auto", "some/model", Chooser),
    ],
)
@pytest.mark.parametrize("sampled", ["greedy", "probabilistic"])
def test_every_method_has_its_drafter(
    tiny_checkpoint: Path, method: str, model: str | None, kind: type, sampled: str
) -> None:
    config = SpeculationConfig(method=method, model=model, draft_sample_method=sampled)
    assert names_model(config) == (model is not None)
    drafter = make_drafter(config, parts(tiny_checkpoint, with_model=model is not None))
    assert isinstance(drafter, kind)


def test_nothing_is_loaded_for_a_policy_that_never_drafts() -> None:
    assert not names_model(SpeculationConfig(method="draft_model", model="some/model", policy="off"))


def test_layers_that_the_target_does_not_have_are_refused(tiny_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="draft_layers is 2; the target has 2 layers"):
        make_drafter(SpeculationConfig(method="layer_skip", draft_layers=2), parts(tiny_checkpoint))
