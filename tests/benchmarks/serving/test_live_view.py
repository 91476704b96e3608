"""The cost of viewers, against small servers that answer at once."""

import pytest

from benchmarks.serving.live_view import compare
from tests.api.server import serving
from tests.fake_engine import FakeEngine


@pytest.mark.full
def test_either_server_has_its_rounds_and_only_one_has_viewers(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1000))
    monkeypatch.setattr("benchmarks.serving.live_view.steps", lambda _: (at := next(ticks), 0.5 * at))
    with serving(FakeEngine()) as without, serving(FakeEngine()) as watched:
        found = compare(
            {"without": without, "with": watched}, rounds=2, num_viewers=2, num_requests=2, max_tokens=3
        )
    assert {name: [each["step_s"] for each in rounds] for name, rounds in found["rounds"].items()} == {
        "without": [0.5, 0.5],
        "with": [0.5, 0.5],
    }
    assert found["with_over_without"]["step_s"]["mean"] == 1.0
