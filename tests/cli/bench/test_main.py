"""`faser bench` finds the measurement, and refuses an unknown one."""

import pytest

from faser.cli.main import main


@pytest.mark.parametrize("kind", ["serve", "latency", "throughput", "sweep"])
def test_a_measurement_of_vllms_is_refused_by_name(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", kind]) == 2
    assert f"'bench {kind}' is known from vLLM but not supported" in capsys.readouterr().err


def test_the_simulators_new_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "simulate", "--help"]) == 2
    assert "python -m benchmarks.simulator" in capsys.readouterr().err


def test_an_unknown_measurement_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "spek"]) == 2
    assert "unknown measurement 'spek'. Did you mean 'spec'?" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["bench", "--help"], ["bench", "spec", "--help"]])
def test_help_is_printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("usage: faser bench")
