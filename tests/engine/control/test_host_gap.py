"""Host gaps: the usual ones at first, then those that are measured, by kind of step and number of sequences."""

import pytest

from faser.engine.control.step_cost import GapKind, HostGaps


def observed(gaps: HostGaps, kind: GapKind, gap_s: float, count: int = 1, *, steps: int = 150) -> None:
    for _ in range(steps):
        gaps.observe(kind, gap_s, count)


@pytest.mark.parametrize(
    ("count", "drafting_ms", "overlapped_ms"), [(1, 1.1, 0.8), (16, 1.4, 1.1), (64, 2.2, 1.7)]
)
def test_before_any_measurement_gaps_are_those_of_the_benchmark(
    count: int, drafting_ms: float, overlapped_ms: float
) -> None:
    """Oracle: benchmarks/results/host-gap.json, as docs/gpu.md has it."""
    gaps = HostGaps(schedules_async=True)
    assert 1000 * gaps.drafting_s(count, hidden=True) == pytest.approx(drafting_ms, rel=0.06)
    assert 1000 * gaps.drafting_s(count, hidden=True, overlapped=True) == pytest.approx(overlapped_ms, rel=0.08)


def test_without_asynchronous_scheduling_nothing_is_charged_before_it_is_measured() -> None:
    gaps = HostGaps()
    assert gaps.drafting_s(64, hidden=False) == gaps.asking_s(64, hidden=False) == 0.0


def test_gaps_follow_what_is_measured() -> None:
    gaps = HostGaps(schedules_async=True)
    observed(gaps, GapKind.DRAFTED, 0.003)
    observed(gaps, GapKind.ASKED, 0.001)
    assert gaps.drafting_s(1, hidden=True) == pytest.approx(0.003, rel=0.01)
    assert gaps.asking_s(1, hidden=True) == pytest.approx(0.001, rel=0.01)


def test_the_usual_gap_counts_as_four_measured_ones() -> None:
    gaps = HostGaps(schedules_async=True)
    usual_s = gaps.drafting_s(1, hidden=True)
    observed(gaps, GapKind.DRAFTED, 2 * usual_s, steps=4)
    assert gaps.drafting_s(1, hidden=True) == pytest.approx(1.5 * usual_s)
    observed(gaps, GapKind.DRAFTED, 2 * usual_s, steps=12)
    assert gaps.drafting_s(1, hidden=True) == pytest.approx(1.8 * usual_s)


def test_more_sequences_leave_a_longer_gap() -> None:
    gaps = HostGaps(schedules_async=True)
    usual_s = [gaps.drafting_s(count, hidden=True) for count in (1, 64)]
    observed(gaps, GapKind.DRAFTED, 2 * usual_s[0])
    assert gaps.drafting_s(64, hidden=True) == pytest.approx(2 * usual_s[1], rel=0.01)


def test_one_long_pause_hardly_counts() -> None:
    gaps = HostGaps(schedules_async=True)
    observed(gaps, GapKind.DRAFTED, 0.001)
    gaps.observe(GapKind.DRAFTED, 10.0, 1)
    assert gaps.drafting_s(1, hidden=True) < 0.0012


def test_what_a_plain_step_exposes_as_well_is_no_cost_of_drafts() -> None:
    gaps = HostGaps()
    observed(gaps, GapKind.DRAFTED, 0.0012)
    observed(gaps, GapKind.UNASKED, 0.0010)
    observed(gaps, GapKind.AHEAD, 0.0004)
    assert gaps.drafting_s(1, hidden=False) == pytest.approx(0.0002, rel=0.05)
    assert gaps.drafting_s(1, hidden=True) == pytest.approx(0.0008, rel=0.05)
    observed(gaps, GapKind.UNASKED, 0.0020)
    assert gaps.drafting_s(1, hidden=False) == 0.0


def test_until_a_plain_step_is_measured_only_deciding_counts() -> None:
    """An engine that drafts in every step has no other step to compare with."""
    gaps = HostGaps()
    for _ in range(50):
        gaps.observe(GapKind.DRAFTED, 0.0015, 1, deciding_s=0.0003)
    assert gaps.drafting_s(1, hidden=False) == pytest.approx(0.0003, rel=0.05)
    observed(gaps, GapKind.UNASKED, 0.0010)
    assert gaps.drafting_s(1, hidden=False) == pytest.approx(0.0005, rel=0.05)
