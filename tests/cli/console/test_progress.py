"""Progress of long work: a few lines in a log, bars on a terminal."""

import pytest

from faser.cli.console.progress import ProgressReporter


def test_a_stage_says_when_it_begins_and_when_it_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressReporter(live=False) as report:
        for done in range(101):
            report("reading", done, 100)
        report("reading", 100, 100)
    assert capsys.readouterr().err.splitlines() == ["reading: 0 %", "reading: 100 %"]


def test_a_stage_of_unknown_length_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressReporter(live=False) as report:
        report("asking", 0, 0)
    assert capsys.readouterr().err == "asking\n"


def test_a_stage_of_unknown_length_says_how_long_it_has_taken(capsys: pytest.CaptureFixture[str]) -> None:
    times_s = iter([100.0, 100.1, 101.9, 103.0, 104.0, 106.0])
    with ProgressReporter(live=False, clock=lambda: next(times_s)) as report:
        for _ in range(6):
            report("compiling", 0, 0)
    assert capsys.readouterr().err.splitlines() == ["compiling", "compiling: 3 s", "compiling: 6 s"]


def test_a_terminal_sees_bars(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressReporter(live=True) as report:
        report("reading", 5, 10)
        report("writing", 10, 10)
    shown = capsys.readouterr().err
    assert "50%" in shown
    assert "100%" in shown


def test_a_stage_of_unknown_length_ends_when_the_next_begins(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressReporter(live=True) as report:
        report("asking", 0, 0)
        report("reading", 5, 10)
    assert "100%" in capsys.readouterr().err
