"""What the front-end expects of the load that comes: rates and lengths it has seen, and the model's answer."""

import pytest

from faser.engine.client.outlook import LoadMonitor, outlook_of
from faser.engine.contract.latency_model import Forecast, Lengths, Pace, highest_rate
from faser.types.request import NO_TARGETS, Slo

PACE = Pace(
    sequences=(1, 16),
    step_s=(0.01, 0.02),
    tokens=(1.0, 1.0),
    rows=(1, 256),
    rows_s=(0.01, 0.1),
    most_rows=256,
)
CHAT = Slo(ttft_ms=500, tpot_ms=30)


def monitor(*, requests: int = 60, per_s: float = 2.0, one_let_in_of: int = 1) -> LoadMonitor:
    made = LoadMonitor(0.0)
    for number in range(requests):
        made.arrived("chat" if number % 3 else "batch", CHAT if number % 3 else NO_TARGETS, number / per_s)
        if number % one_let_in_of == 0:
            made.admitted(number / per_s)
        made.ended(100, 50)
    return made


def test_the_rate_is_that_of_the_last_minute() -> None:
    load = monitor(requests=240).load(120.0)
    assert load is not None
    assert load.offered == load.admitted == pytest.approx(2.0, rel=0.02)
    assert load.targets == (("chat", CHAT),)
    assert load.lengths == ((100, 50),) * 240


def test_before_a_few_requests_have_ended_there_is_no_load() -> None:
    made = LoadMonitor(0.0)
    for number in range(3):
        made.arrived("chat", CHAT, float(number))
        made.ended(100, 50)
    assert made.load(4.0) is None


def test_requests_that_have_stopped_coming_are_forgotten() -> None:
    load = monitor().load(1000.0)
    assert load is not None
    assert (load.offered, load.admitted, load.targets) == (0.0, 0.0, ())


def test_the_outlook_is_the_model_s() -> None:
    load = monitor().load(30.0)
    assert load is not None
    found = outlook_of(PACE, load)
    lengths = Lengths.of(((100, 50),))
    forecast = Forecast(PACE, lengths, load.admitted)
    assert (found.ttft_s, found.tpot_s, found.is_known) == (forecast.ttft_s, forecast.tpot_s, True)
    (chat,) = found.classes
    assert chat.attainment == forecast.attainment(CHAT)
    shares = dict(chat.headroom)
    assert shares[0.9] == pytest.approx(highest_rate(PACE, lengths, CHAT, 0.9) - load.offered)
    assert shares[0.99] < shares[0.9]


def test_beyond_what_the_model_knows_the_outlook_says_no_times() -> None:
    load = monitor(requests=600, per_s=20.0).load(30.0)
    assert load is not None
    found = outlook_of(PACE, load)
    assert not found.is_known
    assert found.ttft_s == 0
    assert found.utilisation > 0.8
    assert dict(found.classes[0].headroom)[0.9] < 0


def test_times_follow_what_is_let_in_and_headroom_what_is_offered() -> None:
    """Twenty a second are far beyond what the engine bears; the two that are let in are far below."""
    load, alone = (
        made.load(30.0)
        for made in (monitor(requests=600, per_s=20.0, one_let_in_of=10), monitor(requests=60, per_s=2.0))
    )
    assert load is not None
    assert alone is not None
    found, expected = outlook_of(PACE, load), outlook_of(PACE, alone)
    assert found.is_known
    assert found.utilisation > 1
    times = [(each.ttft_s, each.ttft_p99_s, each.tpot_s, each.latency_s) for each in (found, expected)]
    assert times[0] == pytest.approx(times[1], rel=1e-6)
    assert found.classes[0].attainment == pytest.approx(expected.classes[0].attainment)
    assert dict(found.classes[0].headroom)[0.9] < -10
