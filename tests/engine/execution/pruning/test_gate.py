"""When early pruning looks, what it believes, and when it acts on it.

Oracles: a loop over all tokens for thresholds, known chances for what they let through, a hand-made staircase for
the gate. Planted bugs that these tests have caught: the raw share in place of the bound; a flag at count 0; layers
that share their counts; an edge of a band moved; the saving of all layers instead of those behind the look; false
prunes for free; hysteresis without its lower edge.
"""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from faser.config.speculation import SpeculationConfig
from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.control.timing.cost_model import CostModel
from faser.engine.execution.pruning.calibration import MOST_FALSE, PruneCalibration, bands, upper_share
from faser.engine.execution.pruning.gate import (
    MODES,
    SHADOW_EVERY,
    SHADOW_OFTEN,
    UNSPLIT,
    Lesson,
    Look,
    PruneGate,
    Split,
    candidate_layers,
    prunes,
)
from faser.errors import ConfigError

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

MOST = 32
STEP_S = 0.02


def uniform_tokens(count: int, rng: np.random.Generator, *, chance: float = 0.9) -> tuple[Ints, Bools]:
    """Counts, and acceptance that falls with them: chance at 0, e times less with every 3 more."""
    counts = rng.integers(0, MOST + 1, count)
    return counts, rng.random(count) < chance * np.exp(-counts / 3)


def bound(good: int, total: int) -> float:
    """Wilson's upper end at 99 %, by definition: the share whose own spread just reaches down to what was seen."""
    low, high = good / total, 1.0
    for _ in range(60):
        share = (low + high) / 2
        reaches = share - 2.326 * math.sqrt(share * (1 - share) / total) <= good / total
        low, high = (share, high) if reaches else (low, share)
    return low


@pytest.mark.parametrize("good, total", [(0, 10), (0, 133), (3, 200), (10, 10), (17, 900)])
def test_the_bound_is_wilsons(good: int, total: int) -> None:
    found = upper_share(np.array([float(good)]), np.array([float(total)]))
    assert found[0] == pytest.approx(bound(good, total), abs=1e-6)


def test_nothing_seen_bounds_nothing() -> None:
    assert upper_share(np.zeros(1), np.zeros(1)) == [1.0]


def test_bands_end_at_zero_and_a_half() -> None:
    assert bands(np.array([0.0, 1e-3, 0.5, 0.51, 2.0])).tolist() == [0, 1, 1, 2, 2]


def test_thresholds_are_the_smallest_counts_that_a_loop_finds() -> None:
    rng = np.random.default_rng(1)
    calibration = PruneCalibration(2, MOST)
    counts, accepted = uniform_tokens(3000, rng)
    calibration.add(0, np.full(3000, 0.8), counts, accepted)
    allowed = []
    for least in range(1, MOST + 1):
        flagged = [good for count, good in zip(counts.tolist(), accepted.tolist(), strict=True) if count >= least]
        if flagged and bound(sum(flagged), len(flagged)) <= MOST_FALSE:
            allowed.append(least)
    assert calibration.thresholds(0, np.array([0.8, 0.0, 0.4])).tolist() == [allowed[0], MOST + 1, MOST + 1]
    assert 3 < allowed[0] < 20
    assert calibration.usable.tolist() == [True, False]
    assert calibration.false_shares[0] <= MOST_FALSE
    assert calibration.false_shares[1] == 1.0


def test_layers_learn_apart() -> None:
    calibration = PruneCalibration(2, MOST)
    for layer, count in ((0, 9), (1, 4)):
        calibration.add(layer, np.zeros(500), np.full(500, count), np.zeros(500, dtype=np.bool_))
        calibration.add(layer, np.zeros(500), np.full(500, count - 1), np.ones(500, dtype=np.bool_))
    assert [int(calibration.thresholds(layer, np.zeros(1))[0]) for layer in (0, 1)] == [9, 4]


@pytest.mark.parametrize("refused, usable", [(265, False), (266, True)])
def test_less_than_266_refused_tokens_flag_nothing(refused: int, usable: bool) -> None:
    calibration = PruneCalibration(1, MOST)
    calibration.add(0, np.zeros(refused), np.full(refused, MOST), np.zeros(refused, dtype=np.bool_))
    assert bool(calibration.usable[0]) is usable


def test_a_token_that_nothing_beats_is_never_flagged() -> None:
    calibration = PruneCalibration(1, MOST)
    calibration.add(0, np.zeros(500), np.zeros(500, dtype=np.int64), np.zeros(500, dtype=np.bool_))
    assert calibration.thresholds(0, np.zeros(1)).tolist() == [MOST + 1]
    calibration.add(0, np.zeros(500), np.ones(500, dtype=np.int64), np.zeros(500, dtype=np.bool_))
    assert calibration.thresholds(0, np.zeros(1)).tolist() == [1]


@pytest.mark.parametrize("seed", range(5))
def test_of_what_is_flagged_no_more_is_right_than_promised(seed: int) -> None:
    """Oracle: the chances that the tokens were drawn with. Every threshold on the way is held to it."""
    rng = np.random.default_rng(seed)
    calibration = PruneCalibration(1, MOST)
    chances = 0.9 * np.exp(-np.arange(MOST + 1) / 3)
    worst = []
    for _ in range(200):
        counts, accepted = uniform_tokens(20, rng)
        calibration.add(0, np.zeros(20), counts, accepted)
        threshold = int(calibration.thresholds(0, np.zeros(1))[0])
        if threshold <= MOST:
            worst.append(chances[threshold:].mean())
    assert len(worst) > 100
    assert np.mean(np.array(worst) > MOST_FALSE) < 0.1


def test_what_was_seen_long_ago_is_forgotten() -> None:
    """Ever so many tokens of count 5 were refused; then a hundredth of that is accepted: it is enough."""
    calibration = PruneCalibration(1, MOST)
    both = np.tile([5, 20], 10_000)
    for _ in range(20):
        calibration.add(0, np.zeros(20_000), both, np.zeros(20_000, dtype=np.bool_))
    assert calibration.thresholds(0, np.zeros(1)).tolist() == [1]
    for _ in range(40):
        calibration.add(0, np.zeros(50), np.full(50, 5), np.ones(50, dtype=np.bool_))
    assert calibration.thresholds(0, np.zeros(1)).tolist() == [6]
    for _ in range(40):
        calibration.add(0, np.zeros(10_000), both[:10_000], np.zeros(10_000, dtype=np.bool_))
    assert calibration.thresholds(0, np.zeros(1)).tolist() == [1]


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


def flat() -> CostModel:
    """Bound by memory: rows cost nothing."""
    return CostModel(StepTimes.proportional(step_s=STEP_S))


def rising() -> CostModel:
    """Bound by arithmetic: rows are all there is."""
    return CostModel(StepTimes.proportional(step_s=0.0, row_s=STEP_S / 64))


def stairs() -> CostModel:
    """An edge between 40 and 41 rows, and none below."""
    return CostModel(
        StepTimes(tables={Role.STEP: CostTable(rows=(1, 40, 41, 64), seconds=(0.01, 0.01, 0.02, 0.02))})
    )


def gate(costs: CostModel, *, mode: str = "auto") -> PruneGate:
    return PruneGate(mode, num_layers=12, most=MOST, costs=costs)


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
def test_rows_leave_where_they_save_most_be_it_late(shares: list[float], layer: int) -> None:
    asked = gate(rising())
    calibrate(asked, share=shares, look_s=1e-6)
    (split,) = {split.layers for split in decisions(asked) if split.prunes}
    assert [each for _, each in split] == [layer]


def test_likely_tokens_are_wanted_for_the_steps_that_may_be_looked_at() -> None:
    """Drafts beside a step are judged in the one after it, so that two steps ahead counts; and not a third."""
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


def test_on_looks_often_until_something_is_known() -> None:
    asked = gate(flat(), mode="on")
    before = [i for i, split in enumerate(decisions(asked, steps=40)) if split.layers]
    assert np.diff(before).tolist() == [SHADOW_OFTEN] * (len(before) - 1)
    calibrate(asked, share=0.3)
    assert sum(bool(split.layers) and not split.prunes for split in decisions(asked, steps=40)) == 2


def test_the_gain_is_what_the_rows_cost_in_the_layers_behind_less_look_and_false_prunes() -> None:
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


def test_what_is_on_goes_off_only_at_a_loss() -> None:
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


def test_on_prunes_without_a_gain_as_soon_as_it_is_calibrated() -> None:
    asked = gate(flat(), mode="on")
    before = decisions(asked, steps=30)
    assert not any(split.prunes for split in before)
    calibrate(asked, share=0.1, look_s=1.0)
    assert any(split.prunes for split in decisions(asked))


MODEL = {"method": "draft_model", "model": "small"}


@pytest.mark.parametrize(
    "given",
    [
        MODEL,
        {"method": "layer_skip"},
        {"method": "auto", "model": "small"},
        MODEL | {"draft_sample_method": "greedy"},
    ],
)
def test_drafts_of_a_model_that_are_point_masses_can_be_pruned(given: dict[str, str]) -> None:
    config = SpeculationConfig(**given)  # type: ignore[arg-type]
    assert [prunes(mode, config) for mode in MODES] == [True, True, False]


@pytest.mark.parametrize(
    "given, why",
    [
        ({"method": "ngram"}, "from text alone"),
        ({"method": "suffix"}, "from text alone"),
        ({"method": "auto"}, "from text alone"),
        (MODEL | {"draft_sample_method": "probabilistic"}, "drawn"),
        (MODEL | {"rejection_sample_method": "synthetic"}, "synthetic"),
        (MODEL | {"policy": "off"}, "never drafts"),
    ],
)
def test_other_drafts_are_not_pruned_and_on_says_why(given: dict[str, str], why: str) -> None:
    config = SpeculationConfig(**given)  # type: ignore[arg-type]
    assert not prunes("auto", config)
    assert not prunes("off", config)
    with pytest.raises(ConfigError, match=why):
        prunes("on", config)


def test_a_mode_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="'always'; it must be one of auto, on, off"):
        prunes("always", SpeculationConfig())
