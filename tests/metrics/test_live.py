"""The live view's numbers: what the recorder keeps, and samples that add up to what the engine counted.

Oracle of percentiles: numpy's over all values of the window.
"""

import random
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from faser.config.speculation import SpeculationConfig
from faser.metrics.live import (
    HISTORY_S,
    LATENCY_WINDOW_S,
    MOST_STEPS,
    RESOLUTION,
    Latencies,
    LiveRecorder,
    LiveSample,
    Snapshot,
    make_sample,
)
from faser.metrics.server import KEY_LIMIT, Metrics
from faser.types.answer import FinishReason
from faser.types.engine import EngineState
from faser.types.outlook import ClassOutlook, Decision, Outlook, Target
from faser.types.request import Slo, SpeculationParams
from faser.types.statistics import EngineStats
from tests.metrics.statistics import CAP, EMPTY, after_step

SHARES = (0.5, 0.95, 0.99)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("count", [1, 2, 19, 400])
def test_percentiles_are_those_of_the_window_within_the_resolution(seed: int, count: int) -> None:
    """Of the window that ends now, and of one that ended a minute ago."""
    rng = np.random.default_rng(seed)
    latencies = Latencies()
    seconds = [10 ** rng.uniform(-3.9, 3, count) for _ in range(100)]
    for second, values in enumerate(seconds):
        for value in values:
            latencies.add(value, second)
    for end in (99, 39):
        found_count, found = latencies.percentiles(SHARES, end)
        window = np.concatenate(seconds[end - LATENCY_WINDOW_S + 1 : end + 1])
        assert found_count == len(window)
        exact = np.percentile(window, [100 * each for each in SHARES], method="inverted_cdf")
        assert found == pytest.approx(exact, rel=RESOLUTION * 1.001)


def test_a_window_without_values_has_no_percentile() -> None:
    latencies = Latencies()
    assert latencies.percentiles(SHARES, 7.0) == (0, [])
    latencies.add(0.5, 7.0)
    assert latencies.percentiles(SHARES, 7.0)[0] == latencies.percentiles(SHARES, 36.9)[0] == 1
    assert latencies.percentiles(SHARES, 37.0) == latencies.percentiles(SHARES, 6.9) == (0, [])


def test_latencies_that_no_sample_can_show_are_dropped() -> None:
    latencies = Latencies()
    for second in range(1000):
        latencies.add(0.5, second)
        latencies.add(0.5, second + 0.5)
    assert len(latencies._totals) == HISTORY_S + LATENCY_WINDOW_S + 1  # and what was counted before


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 1e9])
def test_a_value_outside_of_the_bins_counts_in_the_nearest(seconds: float) -> None:
    latencies = Latencies()
    latencies.add(seconds, 7.0)
    assert latencies.percentiles((1.0,), 7.0)[0] == 1


class Clock:
    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def sample(recorder: LiveRecorder, before: Snapshot, after: Snapshot) -> LiveSample:
    return make_sample(
        before,
        after,
        uptime_s=recorder.uptime_s(after.at_s),
        latencies=recorder.latencies,
        steps=recorder.take_steps(),
    )


def padded(counts: list[int], length: int) -> list[int]:
    return counts + [0] * (length - len(counts))


@pytest.mark.parametrize("seed", range(5))
def test_samples_add_up_to_what_the_engine_counted(seed: int) -> None:
    """Oracle: the engine's own counters at the end."""
    rng, clock = random.Random(seed), Clock()
    recorder = LiveRecorder(clock)
    recorder.watch()
    stats = EMPTY
    recorder.engine(stats)
    before, samples = recorder.snapshot(), []
    for _ in range(20):
        for _ in range(rng.randrange(5)):
            clock.now_s += 0.1
            stats = after_step(stats, rng)
            recorder.engine(stats)
        clock.now_s += 0.2
        after = recorder.snapshot()
        samples.append(sample(recorder, before, after))
        before = after
    spec, reported = stats.speculation, [each.speculation for each in samples if each.speculation]
    assert spec is not None
    assert sum(each.output for each in samples) == stats.generation_tokens
    assert sum(each.prompt for each in samples) == stats.prompt_tokens
    assert sum(each.steps for each in samples) == stats.num_steps
    assert sum(len(each.timeline) for each in samples) == stats.num_steps - 1  # nothing comes before the first
    gammas = [sum(column) for column in zip(*(padded(each.gammas, CAP + 1) for each in reported), strict=True)]
    assert gammas == [sum(column) for column in zip(*(counts for _, counts in spec.gammas), strict=True)]
    accepted_at = [
        sum(column) for column in zip(*(padded(each.accepted_at, CAP) for each in reported), strict=True)
    ]
    assert accepted_at == list(spec.accepted_per_position)
    for method in spec.methods:
        own = [each.drafters[method.method] for each in reported if method.method in each.drafters]
        assert sum(each.drafted for each in own) == method.drafted
        assert sum(each.accepted for each in own) == method.accepted
        assert all(each.drafted == each.pruned + each.verified for each in own)
    assert {name: sum(each.modes.get(name, 0) for each in reported) for name, _ in spec.mode_steps} == dict(
        spec.mode_steps
    )
    measured_ms = 1e3 * next(each.measured_s for each in spec.roles if each.role == "step")
    assert sum(each.measured_ms for each in reported) == pytest.approx(measured_ms, abs=0.2)
    assert samples[-1].t == pytest.approx(clock.now_s - 50.0)


def test_the_timeline_has_the_times_of_each_step() -> None:
    rng, clock, recorder = random.Random(3), Clock(), None
    recorder = LiveRecorder(clock)
    recorder.watch()
    made = [EMPTY]
    recorder.engine(EMPTY)
    before = recorder.snapshot()
    for _ in range(5):
        clock.now_s += 0.25
        made.append(after_step(made[-1], rng))
        recorder.engine(made[-1])
    found = sample(recorder, before, recorder.snapshot()).timeline
    assert [each.end_ms for each in found] == [-750, -500, -250, 0]
    for step, stats in zip(found, made[2:], strict=True):
        assert stats.speculation is not None
        assert step.step_ms == pytest.approx(1e3 * stats.last_step_s, abs=0.01)
        assert step.draft_ms + step.verify_ms == pytest.approx(step.step_ms, abs=0.02)
        assert (step.rows, step.mode) == (stats.last_step_rows, stats.speculation.mode)


def test_the_timeline_is_bounded_and_has_the_last_steps() -> None:
    rng, recorder, stats = random.Random(4), LiveRecorder(), EMPTY
    recorder.watch()
    before = recorder.snapshot()
    for _ in range(5 * MOST_STEPS):
        stats = after_step(stats, rng)
        recorder.engine(stats)
    found = sample(recorder, before, recorder.snapshot())
    assert found.steps == 5 * MOST_STEPS
    assert len(found.timeline) == MOST_STEPS
    assert found.timeline[-1].rows == stats.last_step_rows


def test_an_engine_that_was_started_again_counts_from_zero() -> None:
    rng, recorder, stats = random.Random(5), LiveRecorder(), EMPTY
    recorder.watch()
    for _ in range(10):
        stats = after_step(stats, rng)
    recorder.engine(stats)
    before = recorder.snapshot()
    recorder.engine_ended()
    recorder.engine(EngineStats())
    between = recorder.snapshot()
    again = after_step(EMPTY, rng)
    recorder.engine(again)
    after = recorder.snapshot()
    first, second = (sample(recorder, one, other) for one, other in pairwise((before, between, after)))
    assert (first.output, first.steps, first.speculation) == (0, 0, None)
    assert second.output == again.generation_tokens
    assert second.steps == 1
    assert second.speculation is not None
    assert second.speculation.drafters["suffix"].drafted == 5


def test_requests_that_end_are_counted_by_reason_and_by_target() -> None:
    recorder = LiveRecorder()
    recorder.slo_result("chat", "ttft", True)
    before = recorder.snapshot()
    recorder.finished(FinishReason.STOP)
    recorder.finished(FinishReason.STOP)
    recorder.finished(FinishReason.ERROR)
    recorder.rejected()
    recorder.slo_result("chat", "ttft", True)
    recorder.slo_result("chat", "ttft", False)
    recorder.slo_result("batch", "tpot", True)
    found = sample(recorder, before, recorder.snapshot())
    assert found.finished == {"stop": 2, "error": 1}
    assert found.rejected == 1
    assert found.slo == {"chat": {"ttft": (1, 1)}, "batch": {"tpot": (1, 0)}}


def test_decisions_of_an_interval_are_by_class_and_target_and_the_outlook_is_the_latest() -> None:
    recorder = LiveRecorder()
    recorder.decided("chat", Decision.REFUSED, Target.TPOT)
    before = recorder.snapshot()
    recorder.decided("chat", Decision.REFUSED, Target.TPOT)
    recorder.decided("chat", Decision.MET, Target.NONE)
    classes = (ClassOutlook(class_name="chat", attainment=0.95, headroom=((0.9, 1.5), (0.99, -0.25))),)
    recorder.expect(Outlook(rate=2.0, capacity=5.0, is_known=True, ttft_s=0.1, tpot_s=0.02, classes=classes))
    found = sample(recorder, before, recorder.snapshot())
    assert found.admission == {"chat": {"refused tpot": 1, "met": 1}}
    assert found.outlook is not None
    assert (found.outlook.ttft, found.outlook.tpot, found.outlook.known) == (100.0, 20.0, True)
    assert found.outlook.headroom == {"chat": [1.5, -0.25]}
    recorder.engine_ended()
    assert sample(recorder, before, recorder.snapshot()).outlook is None


def test_a_quiet_second_is_small() -> None:
    recorder = LiveRecorder()
    first = recorder.snapshot()
    assert len(msgspec.json.encode(sample(recorder, first, recorder.snapshot()))) < 60


def test_without_viewers_it_keeps_a_snapshot_a_second_and_latencies_but_no_steps() -> None:
    rng, clock, stats = random.Random(1), Clock(), EMPTY
    recorder = LiveRecorder(clock)
    for _ in range(500):
        clock.now_s += 0.05
        stats = after_step(stats, rng)
        recorder.engine(stats)
        recorder.latency("itl", 0.01)
    assert 23 <= len(recorder.past) <= 25
    assert all(
        later.at_s - earlier.at_s >= 1.0 for earlier, later in zip(recorder.past, recorder.past[1:], strict=False)
    )
    assert recorder.latencies["itl"].percentiles((1.0,), clock.now_s)[0] == 500
    assert recorder.take_steps() == []


def test_the_past_is_two_minutes_long() -> None:
    clock = Clock()
    recorder = LiveRecorder(clock)
    for _ in range(3 * HISTORY_S):
        clock.now_s += 1.0
        recorder.engine(EMPTY)
    assert len(recorder.past) == HISTORY_S + 1
    assert recorder.past[-1].at_s - recorder.past[0].at_s == HISTORY_S
    clock.now_s += 100.0
    assert len(recorder.past) == 21


def test_metrics_report_all_that_the_view_shows() -> None:
    metrics = Metrics(model_name="tiny", max_model_len=64, speculation=SpeculationConfig())
    recorder = metrics.live
    recorder.watch()
    metrics.engine_state(EngineState.READY)
    metrics.first_token(0.2)
    metrics.tokens(3, None)
    metrics.tokens(2, 0.02)
    metrics.rejected(KEY_LIMIT)
    for reason in (FinishReason.LENGTH, FinishReason.ABORT):
        metrics.finished(
            reason,
            ttft_s=0.2,
            e2e_s=1.0,
            queue_s=0.0,
            prefill_s=0.2,
            decode_s=0.8,
            prompt_tokens=4,
            cached_tokens=0,
            generation_tokens=9,
            longest_generation=9,
            preemptions=0,
        )
    metrics.speculation.finished(SpeculationParams(slo=Slo(ttft_ms=100, tpot_ms=200)), (), ttft_s=0.2, tpot_s=0.1)
    taken = recorder.snapshot()
    assert taken.state is EngineState.READY
    assert {name: each.percentiles((1.0,), taken.at_s)[0] for name, each in recorder.latencies.items()} == {
        "ttft": 1,
        "itl": 1,
        "tpot": 1,
    }
    assert taken.finished == {FinishReason.LENGTH: 1, FinishReason.ABORT: 1}
    assert taken.rejected == 1
    assert taken.slo == {
        ("default", "ttft", False): 1,
        ("default", "tpot", True): 1,
        ("default", "both", False): 1,
    }


def test_a_snapshot_does_not_change_afterwards() -> None:
    recorder = LiveRecorder()
    taken = recorder.snapshot()
    recorder.finished(FinishReason.STOP)
    recorder.slo_result("default", "ttft", True)
    assert not taken.finished
    assert not taken.slo
