"""`faser` over many steps: close to the best fixed length, whatever acceptance, batch and machine.

Oracle: the closed form of every fixed length. Confidences tell nothing here, so no policy can be better than it.

Planted bugs that these tests have caught: tokens that the stop rule drops are not noted, so a hopeless model
goes on for ever; depths that no draft has reached keep their prior, so drafts stay at one token.
"""

import numpy as np
import pytest

from tests.engine.control.speculation.closed_loop import CAP, cost_model, fixed_rate, run


@pytest.mark.slow
@pytest.mark.full(
    but=tuple(
        f"{alpha}-{count}-{shape}-{method}"
        for alpha, count in ((0.2, 16), (0.5, 1), (0.8, 4), (0.95, 64))
        for shape in ("flat", "linear", "bend")
        for method in ("draft_model", "suffix")
    )
)
@pytest.mark.parametrize("method", ["draft_model", "suffix"])
@pytest.mark.parametrize("shape", ["flat", "linear", "bend"])
@pytest.mark.parametrize("count", [1, 4, 16, 64])
@pytest.mark.parametrize("alpha", [0.2, 0.5, 0.8, 0.95])
def test_faser_is_close_to_the_best_fixed_length(method: str, shape: str, count: int, alpha: float) -> None:
    costs = cost_model(shape, method)
    best = max(fixed_rate(costs, alpha, count, gamma) for gamma in range(CAP + 1))
    steps = {1: 500, 4: 300, 16: 150, 64: 100}[count]
    assert run("faser", costs, lambda _: alpha, count, steps=steps).rate >= 0.95 * best


@pytest.mark.parametrize("method", ["draft_model", "suffix"])
@pytest.mark.parametrize("count", [1, 16])
def test_faser_is_never_slower_than_off_by_more_than_its_probes(method: str, count: int) -> None:
    costs = cost_model("bend", method)
    off = fixed_rate(costs, 0.0, count, 0)
    assert run("faser", costs, lambda _: 0.0, count, steps=800).rate >= 0.97 * off


@pytest.mark.parametrize("count", [1, 16])
def test_a_collapse_of_acceptance_is_followed_within_twenty_steps(count: int) -> None:
    costs = cost_model("flat", "draft_model")
    loop = run("faser", costs, lambda step: 0.9 if step < 200 else 0.1, count, steps=300)
    assert loop.lengths[150:200].mean() > 4
    assert loop.lengths[220:].mean() < 2


def test_a_recovery_is_found_by_probes() -> None:
    costs = cost_model("flat", "draft_model")
    loop = run("faser", costs, lambda step: 0.05 if step < 200 else 0.9, 16, steps=800)
    assert loop.lengths[150:200].mean() < 1
    assert loop.lengths[700:].mean() > 4


def test_the_same_seed_gives_the_same_run() -> None:
    rates = [run("faser", cost_model("bend", "suffix"), lambda _: 0.7, 4, steps=60).rate for _ in range(2)]
    assert rates[0] == rates[1]
    assert np.isfinite(rates[0])
