"""What is shown: lines in a log, bars on a terminal."""

import io

import pytest
from rich.console import Console

from faser.cli.console import ProgressReporter, TokenBar, TrainingBar
from faser.cli.distill import acceptance_table
from faser.distill.trainer import TrainingProgress


def progress(share: float) -> TrainingProgress:
    return TrainingProgress(
        share=share, epoch=1, loss=2.5, expected_length=1.25, rows=4096, rows_per_s=270.4, seconds=1800.0
    )


def test_a_log_has_a_line_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([0.0, 10.0, 600.0, 610.0])
    with TrainingBar(Console(file=io.StringIO()), clock=lambda: next(times)) as shown:
        for share in (0.25, 0.3, 0.5, 0.75):
            shown(progress(share))
    assert capsys.readouterr().err.splitlines() == [
        "faser distill: 25.0 % of the training (epoch 2): loss 2.500, 1.25 tokens accepted, 270 tokens/s",
        "faser distill: 50.0 % of the training (epoch 2): loss 2.500, 1.25 tokens accepted, 270 tokens/s, "
        "20 min remain",
    ]


def test_a_terminal_has_a_bar_with_loss_and_accepted_tokens() -> None:
    screen = io.StringIO()
    with TrainingBar(Console(file=screen, force_terminal=True, width=120)) as shown:
        shown(progress(0.5))
    assert "loss 2.500, 1.25 tokens accepted" in screen.getvalue()
    assert "50%" in screen.getvalue()


def test_tokens_are_counted_on_a_terminal_and_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    screen = io.StringIO()
    with TokenBar(Console(file=screen, force_terminal=True, width=120)) as bar:
        bar("answers", 1500, 2000)
        bar.say("a shard is there")
    assert "1,500 of 2,000 tokens" in screen.getvalue()
    assert "a shard is there" in screen.getvalue()
    now = 0.0
    with TokenBar(Console(file=io.StringIO()), clock=lambda: now) as bar:
        bar("answers", 1500, 2000)
        now = 61.0
        bar("answers", 1600, 2000)
        bar("answers", 1700, 2000)
    assert capsys.readouterr().err == "faser distill: answers: 1600 of 2000 tokens\n"


def test_the_table_has_what_was_measured() -> None:
    assert acceptance_table((0.6, 0.4), (), 0.8).splitlines() == [
        "| accepted on held-out answers | token 1 | token 2 | tokens of a draft |",
        "| --- | ---: | ---: | ---: |",
        "| temperature 0 | 0.60 | 0.40 | 1.00 |",
    ]
    assert "| temperature 0.8, at most | 0.50 | 0.50 |" in acceptance_table((), (0.5,), 0.8)


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
