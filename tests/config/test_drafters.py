"""The table of drafters, and which of them a config makes."""

import pytest

from faser.config.speculation import DRAFT_METHODS, METHODS, PASS_METHODS, TEXT_METHODS, SpeculationConfig


def test_the_order_of_methods_in_arrays_and_metrics_stays() -> None:
    """A new one may stand anywhere among them."""
    known = ("draft_model", "eagle3", "mtp", "suffix", "ngram", "ngram_model", "grammar")
    assert tuple(method for method in DRAFT_METHODS if method in known) == known
    assert set(METHODS) == {"auto", *DRAFT_METHODS}


@pytest.mark.parametrize(
    "config, drafters, needs_passes",
    [
        (SpeculationConfig(), TEXT_METHODS, False),
        (SpeculationConfig(model="d"), (*TEXT_METHODS, "draft_model"), True),
        (SpeculationConfig(method="ngram"), ("ngram",), False),
        (SpeculationConfig(method="draft_model", model="d"), ("draft_model",), True),
        (SpeculationConfig(method="eagle3", model="h"), ("eagle3",), True),
        (SpeculationConfig(model="h", model_method="eagle3"), (*TEXT_METHODS, "eagle3"), True),
        (SpeculationConfig(method="mtp"), ("mtp",), True),
        (SpeculationConfig(model_method="mtp"), (*TEXT_METHODS, "mtp"), True),
        (SpeculationConfig(model="none"), TEXT_METHODS, False),
        (SpeculationConfig(model="d", policy="off"), (), False),
    ],
)
def test_a_config_makes_the_drafters_of_its_method(
    config: SpeculationConfig, drafters: tuple[str, ...], needs_passes: bool
) -> None:
    assert tuple(each.name for each in config.drafters) == drafters
    assert config.needs_draft_model == ("draft_model" in drafters)
    assert config.needs_head == bool({"eagle3", "mtp"} & {*drafters})
    assert config.needs_model == bool({"draft_model", "eagle3"} & {*drafters})
    assert config.pass_method == next((name for name in drafters if name in PASS_METHODS), None)
    assert config.needs_passes == needs_passes


@pytest.mark.parametrize(
    "config, may",
    [
        (SpeculationConfig(), True),
        (SpeculationConfig(method="mtp"), True),
        (SpeculationConfig(model_method="mtp"), True),
        (SpeculationConfig(model="none"), False),
        (SpeculationConfig(model="d"), False),
        (SpeculationConfig(method="suffix"), False),
        (SpeculationConfig(method="eagle3", model="h"), False),
        (SpeculationConfig(method="mtp", policy="off"), False),
    ],
)
def test_the_layer_of_a_checkpoint_drafts_where_nothing_else_is_named(
    config: SpeculationConfig, may: bool
) -> None:
    assert config.may_use_mtp == may
