"""Samples: added up they are what the engine counted."""

import random
from itertools import pairwise

import msgspec
import pytest

from faser.metrics.live.recorder import MOST_STEPS, LiveRecorder, Snapshot
from faser.metrics.live.sample import LiveSample, make_sample
from faser.types import EngineStats, FinishReason
from tests.metrics.live.statistics import CAP, EMPTY, after_step


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
    spec, told = stats.speculation, [each.speculation for each in samples if each.speculation]
    assert spec is not None
    assert sum(each.output for each in samples) == stats.generation_tokens
    assert sum(each.prompt for each in samples) == stats.prompt_tokens
    assert sum(each.steps for each in samples) == stats.num_steps
    assert sum(len(each.timeline) for each in samples) == stats.num_steps - 1  # nothing comes before the first
    gammas = [sum(column) for column in zip(*(padded(each.gammas, CAP + 1) for each in told), strict=True)]
    assert gammas == [sum(column) for column in zip(*(counts for _, counts in spec.gammas), strict=True)]
    accepted_at = [sum(column) for column in zip(*(padded(each.accepted_at, CAP) for each in told), strict=True)]
    assert accepted_at == list(spec.accepted_per_position)
    for method in spec.methods:
        own = [each.drafters[method.method] for each in told if method.method in each.drafters]
        assert sum(each.drafted for each in own) == method.drafted
        assert sum(each.accepted for each in own) == method.accepted
        assert all(each.drafted == each.pruned + each.verified for each in own)
    assert {name: sum(each.modes.get(name, 0) for each in told) for name, _ in spec.mode_steps} == dict(
        spec.mode_steps
    )
    measured_ms = 1e3 * next(each.measured_s for each in spec.roles if each.role == "step")
    assert sum(each.measured_ms for each in told) == pytest.approx(measured_ms, abs=0.2)
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
    recorder.judged("chat", "ttft", True)
    before = recorder.snapshot()
    recorder.finished(FinishReason.STOP)
    recorder.finished(FinishReason.STOP)
    recorder.finished(FinishReason.ERROR)
    recorder.rejected()
    recorder.judged("chat", "ttft", True)
    recorder.judged("chat", "ttft", False)
    recorder.judged("batch", "tpot", True)
    found = sample(recorder, before, recorder.snapshot())
    assert found.finished == {"stop": 2, "error": 1}
    assert found.rejected == 1
    assert found.slo == {"chat": {"ttft": (1, 1)}, "batch": {"tpot": (1, 0)}}


def test_a_quiet_second_is_small() -> None:
    recorder = LiveRecorder()
    first = recorder.snapshot()
    assert len(msgspec.json.encode(sample(recorder, first, recorder.snapshot()))) < 60
