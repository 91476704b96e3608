"""LiveRecorder: what it keeps without viewers and with them, as Metrics reports to it."""

import random

from faser.config.speculation import SpeculationConfig
from faser.metrics.live.recorder import HISTORY_S, LiveRecorder
from faser.metrics.server import KEY_LIMIT, Metrics
from faser.types import EngineState, FinishReason, Slo, SpeculationParams
from tests.metrics.live.statistics import EMPTY, after_step
from tests.metrics.live.test_sample import Clock


def test_without_viewers_it_keeps_a_snapshot_a_second_and_nothing_else() -> None:
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
    assert recorder.latencies == {}
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
    assert {name: each.percentiles((1.0,))[0] for name, each in recorder.latencies.items()} == {
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
    recorder.judged("default", "ttft", True)
    assert not taken.finished
    assert not taken.slo
