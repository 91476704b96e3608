"""When early pruning looks, what gain it expects, and when it prunes. Oracle: a hand-made staircase of step times.

Planted bugs that these tests have caught: the saving of all layers instead of those after the look; false prunes
for free; hysteresis without its lower edge.
"""

import numpy as np
import pytest

from faser.engine.contract.step_times import CostTable
from faser.engine.execution.pruning.gate import (
    SHADOW_EVERY,
    SHADOW_OFTEN,
    UNSPLIT,
    Lesson,
    Look,
    PruneGate,
    Split,
    candidate_layers,
)
from faser.engine.execution.pruning.step_seconds import StepSeconds
from faser.errors import ConfigError

MOST = 32
STEP_S = 0.02


@pytest.mark.parametrize(
    "num_layers, layers",
    [
        (2, (1,)),
        (3, (1, 2)),
        (6, (1, 2, 3, 4, 5)),
        (12, (2, 3, 4, 6, 8, 10)),
        (30, (5, 8, 10, 15, 20, 25)),
        (32, (5, 8, 11, 16, 21, 27)),
    ],
)
def test_looks_are_taken_after_a_sixth_a_quarter_a_third_a_half_two_thirds_and_five_sixths(
    num_layers: int, layers: tuple[int, ...]
) -> None:
    assert candidate_layers(num_layers) == layers


def test_one_layer_cannot_be_split() -> None:
    with pytest.raises(ConfigError, match="this one has 1"):
        candidate_layers(1)


def flat() -> CostTable:
    """Bound by memory: rows cost nothing."""
    return CostTable(rows=(1,), seconds=(STEP_S,))


def rising() -> CostTable:
    """Bound by arithmetic: a step takes as long as its rows."""
    return CostTable(rows=(1, 2), seconds=(STEP_S / 64, STEP_S / 32))


def stairs() -> CostTable:
    """An edge between 40 and 41 rows, and none below."""
    return CostTable(rows=(1, 40, 41, 64), seconds=(0.01, 0.01, 0.02, 0.02))


def gate(table: CostTable, *, mode: str = "auto") -> PruneGate:
    return PruneGate(mode, num_layers=12, num_top=MOST, step_seconds=StepSeconds(table))


def calibrate(asked: PruneGate, *, share: float | list[float], look_s: float = 1e-4, tokens: int = 32) -> None:
    """As if shadow looks had found that this share of drafted rows can leave, after all layers or after each."""
    for at, own in enumerate(np.broadcast_to(share, len(asked.layers)).tolist()):
        for _ in range(30):
            asked.looked(Look(layer=at, num_drafts=100, flagged_rows=round(100 * own), seconds=look_s))
        lesson = Lesson(
            layer=at,
            temperatures=np.zeros(1000),
            counts=np.full(1000, 9),
            accepted=np.zeros(1000, dtype=np.bool_),
        )
        asked.learn([lesson], tokens)
    for _ in range(50):
        asked.learn([], tokens)


def decisions(asked: PruneGate, *, rows: int = 64, drafts: int = 48, steps: int = 60) -> list[Split]:
    return [asked.ask(rows, drafts, named=True) for _ in range(steps)]


def test_before_anything_is_known_every_twentieth_step_is_a_shadow_and_none_prunes() -> None:
    found = decisions(gate(rising()), steps=100)
    shadows = [i for i, split in enumerate(found) if split != UNSPLIT]
    parts = [Split(layers=((1, 3), (3, 6), (5, 10))), Split(layers=((0, 2), (2, 4), (4, 8)))]
    assert [found[i] for i in shadows] == [*parts, *parts, parts[0]]
    assert np.diff(shadows).tolist() == [SHADOW_EVERY] * 4


def test_where_rows_cost_nothing_shadows_are_rare_and_nothing_prunes() -> None:
    asked = gate(flat())
    calibrate(asked, share=0.5)
    found = decisions(asked, steps=1000)
    assert sum(split != UNSPLIT for split in found) <= 2
    assert not asked.active


def test_where_rows_cost_rows_leave_at_the_earliest_layer() -> None:
    asked = gate(rising())
    calibrate(asked, share=0.3)
    found = decisions(asked)
    assert asked.active
    assert found[-1] == Split(layers=((0, 2),), prunes=True)
    assert sum(bool(split.layers) and not split.prunes for split in found) == 3


@pytest.mark.parametrize(
    "shares, layer", [([0.1] * 6, 2), ([0, 0, 0, 0.3, 0.3, 0.3], 6), ([0.01, 0.01, 0.01, 0.02, 0.05, 0.8], 10)]
)
def test_rows_leave_at_the_layer_where_that_saves_most(shares: list[float], layer: int) -> None:
    asked = gate(rising())
    calibrate(asked, share=shares, look_s=1e-6)
    (split,) = {split.layers for split in decisions(asked) if split.prunes}
    assert [each for _, each in split] == [layer]


def test_likely_tokens_are_wanted_for_the_steps_that_may_be_looked_at() -> None:
    """Overlapped drafts are verified one step later than others, so the gate looks two steps forward."""
    asked = gate(rising())
    wanted = []
    for _ in range(3 * SHADOW_EVERY):
        wanted.append(asked.may_look())
        asked.ask(64, 48, named=wanted[-1])
    assert [i for i in range(3 * SHADOW_EVERY) if wanted[i]] == [0, 19, 20, 39, 40, 59]
    calibrate(asked, share=0.3)
    decisions(asked)
    assert asked.active
    assert asked.may_look()
    asked.use("off")
    assert not asked.may_look()


def test_a_step_without_likely_tokens_is_not_looked_at_and_the_next_one_with_them_is() -> None:
    asked = gate(rising())
    assert [asked.ask(64, 48, named=False) for _ in range(30)] == [UNSPLIT] * 30
    assert asked.may_look()
    assert asked.ask(64, 48, named=True).layers


def test_a_gain_is_followed_in_steps_without_likely_tokens_too() -> None:
    asked = gate(rising())
    calibrate(asked, share=0.3)
    for _ in range(15):
        asked.ask(64, 48, named=False)
    assert asked.active


def test_mode_on_looks_often_until_a_threshold_is_known() -> None:
    asked = gate(flat(), mode="on")
    before = [i for i, split in enumerate(decisions(asked, steps=40)) if split.layers]
    assert np.diff(before).tolist() == [SHADOW_OFTEN] * (len(before) - 1)
    calibrate(asked, share=0.3)
    assert sum(bool(split.layers) and not split.prunes for split in decisions(asked, steps=40)) == 2


def test_the_gain_is_what_the_rows_cost_in_the_layers_after_the_look_less_look_and_false_prunes() -> None:
    """14.4 of 64 rows leave 10 of 12 layers; up to 5.4 in 1005 of them were right, a step brings 32 tokens."""
    asked = gate(rising())
    calibrate(asked, share=0.3)
    decisions(asked, steps=300)
    bound_of_1000 = 2.326**2 / (1000 + 2.326**2)
    assert asked.gain == pytest.approx(14.4 / 64 * 10 / 12 - 1e-4 / STEP_S - 14.4 * bound_of_1000 / 32, abs=1e-3)


def test_rows_that_cross_no_edge_save_nothing() -> None:
    """48 rows of 64 drafted: half of them crosses the edge at 40, a fifth does not."""
    near, far = gate(stairs()), gate(stairs())
    calibrate(near, share=0.55)
    calibrate(far, share=0.2)
    decisions(near)
    decisions(far)
    assert near.active
    assert not far.active


def test_a_look_that_costs_more_than_it_saves_is_not_taken() -> None:
    asked = gate(rising())
    calibrate(asked, share=0.3, look_s=STEP_S / 4)
    decisions(asked)
    assert not asked.active


def test_false_prunes_are_paid_for() -> None:
    """The same rows, worth more: where all drafts are refused anyway, or where each brings a token."""
    cheap, dear = gate(rising()), gate(rising())
    calibrate(cheap, share=0.03, tokens=60, look_s=1e-6)
    calibrate(dear, share=0.03, tokens=1, look_s=1e-6)
    decisions(cheap, steps=200)
    decisions(dear, steps=200)
    assert cheap.active
    assert dear.gain < cheap.gain


def test_an_active_gate_becomes_inactive_only_at_a_loss() -> None:
    asked = gate(rising())
    calibrate(asked, share=0.3)
    decisions(asked)
    for _ in range(3):
        calibrate(asked, share=0.02, look_s=1e-4)
    decisions(asked, steps=200)
    assert 0 < asked.gain < 0.01
    assert asked.active, "a small gain is a gain"
    calibrate(asked, share=0.03, look_s=STEP_S / 4)
    decisions(asked, steps=200)
    assert not asked.active


def test_mode_on_prunes_without_a_gain_as_soon_as_it_is_calibrated() -> None:
    asked = gate(flat(), mode="on")
    before = decisions(asked, steps=30)
    assert not any(split.prunes for split in before)
    calibrate(asked, share=0.1, look_s=1.0)
    assert any(split.prunes for split in decisions(asked))


STEPS = 2000  # more than the longest time between two shadow steps


def num_looks(asked: PruneGate) -> int:
    return sum(asked.ask(16, 12, named=True) != UNSPLIT for _ in range(STEPS))


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_a_gate_that_is_off_never_looks_and_needs_no_likely_tokens(mode: str) -> None:
    asked = gate(flat(), mode=mode)
    assert num_looks(asked) > 0
    asked.use("off")
    assert num_looks(asked) == 0
    assert not asked.may_look()


@pytest.mark.parametrize("mode", ["auto", "on", None])
def test_a_gate_that_was_off_looks_again_in_another_mode(mode: str | None) -> None:
    asked = gate(flat())
    asked.use("off")
    num_looks(asked)
    asked.use(mode)
    assert num_looks(asked) > 0


def test_an_unknown_mode_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'sometimes'.*auto, on, off"):
        gate(flat()).use("sometimes")
