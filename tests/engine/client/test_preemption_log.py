"""When frequent preemption is logged. The counts and the times are made up."""

from collections.abc import Sequence

import pytest

from faser.engine.client.queue import PreemptionLog


def warnings(counts: Sequence[tuple[float, int]], caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines that are logged. counts: (seconds, preemptions since the engine started)."""
    log = PreemptionLog(max_num_seqs=64)
    for at_s, count in counts:
        log.note(count, at_s, 1 << 20)
    return caplog.messages


def test_a_storm_is_one_line_with_the_settings_that_help(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = warnings([(5000 + i / 100, i) for i in range(5000)], caplog)
    assert line == (
        "the KV cache is too small for this load: 20 sequences were preempted within a minute, and what they had "
        "computed is computed again; raise --kv-cache-memory, which is 1MiB, or lower --max-num-seqs, which is 64"
    )


def test_a_storm_that_lasts_is_told_every_ten_minutes(caplog: pytest.LogCaptureFixture) -> None:
    assert len(warnings([(5000 + i, i) for i in range(1500)], caplog)) == 3


def test_a_preemption_now_and_then_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings([(5000 + 4 * i, i) for i in range(1000)], caplog) == []


def test_an_engine_that_was_started_again_counts_from_zero(caplog: pytest.LogCaptureFixture) -> None:
    counts = [(5000 + i, i) for i in range(15)] + [(5020 + i, i) for i in range(15)]
    assert warnings(counts, caplog) == []
    counts += [(5040 + i, 15 + i) for i in range(15)]
    assert len(warnings(counts, caplog)) == 1
