"""What a result says about its origin."""

from pathlib import Path

from benchmarks.runner import describe_machine, portable


def test_results_name_no_directories_of_the_machine_they_were_measured_on() -> None:
    text = f"--model {Path.home() / '.cache' / 'small'} --out {Path.cwd() / 'here'}"

    assert portable(text) == "--model ~/.cache/small --out ./here"


def test_the_machine_is_described_with_the_cores_that_were_used() -> None:
    found = describe_machine((1, 3))

    assert found["cores_used"] == [1, 3]
    assert found["cpu_model"]
    assert found["memory_bytes"] > 1 << 28
