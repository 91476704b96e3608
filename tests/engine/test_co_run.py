"""Two lanes slow each other down until one is done, then the other is alone. Oracle: small steps of time."""

import numpy as np
import pytest

from faser.engine.co_run import CoRun
from faser.errors import ConfigError

LANES = CoRun(share=0.5, verify=1.6, draft=1.9, verify_alone=1.4, draft_alone=1.5)


def stepped(lanes: CoRun, verify_s: float, draft_s: float, *, parts: int = 200_000) -> float:
    """Both lanes advance by the speed of the moment, in small steps of time."""
    quantum = (verify_s + draft_s) * 4 / parts
    left, elapsed = [verify_s, draft_s], 0.0
    while max(left) > 0:
        both = min(left) > 0
        left[0] -= quantum / (lanes.verify if both else lanes.verify_alone)
        left[1] -= quantum / (lanes.draft if both else lanes.draft_alone)
        elapsed += quantum
    return elapsed


@pytest.mark.parametrize(("verify_s", "draft_s"), [(1.0, 0.2), (0.2, 1.0), (1.0, 1.0), (0.7, 0.6)])
def test_the_time_is_that_of_lanes_advanced_in_small_steps(verify_s: float, draft_s: float) -> None:
    found = LANES.seconds(np.array(verify_s), np.array(draft_s))
    assert float(found) == pytest.approx(stepped(LANES, verify_s, draft_s), rel=1e-3)


def test_an_empty_lane_costs_nobody_company() -> None:
    assert LANES.seconds(np.array([1.0]), np.array([0.0])) == pytest.approx([LANES.verify_alone])
    assert LANES.seconds(np.array([0.0]), np.array([1.0])) == pytest.approx([LANES.draft_alone])


def test_lanes_that_do_not_disturb_each_other_take_as_long_as_the_longer() -> None:
    free = CoRun(share=0.5, verify=1.0, draft=1.0, verify_alone=1.0, draft_alone=1.0)
    verify_s, draft_s = np.array([1.0, 2.0]), np.array([3.0, 0.5])
    assert free.seconds(verify_s, draft_s) == pytest.approx([3.0, 2.0])


@pytest.mark.parametrize("field", ["share", "verify", "draft", "verify_alone", "draft_alone"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_what_cannot_be_is_refused_by_name(field: str, value: float) -> None:
    numbers = {"share": 0.5, "verify": 1.0, "draft": 1.0, "verify_alone": 1.0, "draft_alone": 1.0, field: value}
    with pytest.raises(ConfigError, match=str(value)):
        CoRun(**numbers)
