"""A trial that fails is reported and does not stop the others."""

import pytest

from benchmarks.image.__main__ import Found, tried
from benchmarks.image.containers import Engine, TrialError


def test_a_broken_promise_is_a_result(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(_: Engine, image: str) -> Found:
        raise TrialError(f"{image} has /usr/bin/gcc")

    outcome = tried("contents", broken, Engine(program="podman"), "faser")
    assert (outcome["held"], outcome["error"]) == (False, "faser has /usr/bin/gcc")
    assert "contents             FAILS" in capsys.readouterr().out
