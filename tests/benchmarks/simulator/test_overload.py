"""Classes under overload: what is counted, and that admission keeps what the classes without it lose."""

import argparse

import pytest

from benchmarks.simulator.machines import cpu
from benchmarks.simulator.overload import met, recovered_s, run
from benchmarks.simulator.simulation import Outcome, Served
from faser.types.request import Slo

ASKED = argparse.Namespace(over=3.0, overload=10.0)
SLO = Slo(ttft_ms=1000, tpot_ms=100)


def served(at_s: float, *, first_s: float = 0.5, num_tokens: int = 11, token_s: float = 0.05) -> Served:
    begun_s = at_s + first_s
    return Served(
        number=0,
        arrival_s=at_s,
        prompt_len=1,
        first_s=begun_s,
        finished_s=begun_s + token_s * (num_tokens - 1),
        num_tokens=num_tokens,
        class_name="interactive",
    )


def test_a_target_is_met_by_both_times() -> None:
    assert met(served(0.0), SLO)
    assert not met(served(0.0, first_s=1.5), SLO)
    assert not met(served(0.0, token_s=0.2), SLO)
    assert met(served(0.0, num_tokens=1, token_s=9.0), SLO)


def test_recovery_is_the_first_window_that_is_as_good_as_before() -> None:
    """Late for 20 s after an overload that ends at 100 s, and in time from then on."""
    kept = [served(float(at)) for at in range(60)]
    late = [served(100.0 + at, first_s=5.0) for at in range(20)]
    again = [served(120.0 + at) for at in range(40)]
    assert recovered_s(Outcome(served=[*kept, *late, *again]), SLO, 100.0) == 19.5
    assert recovered_s(Outcome(served=[*kept, *late]), SLO, 100.0) is None


@pytest.mark.full
def test_interactive_requests_keep_their_targets_only_with_admission_and_none_is_lost() -> None:
    without, with_it = (run(cpu(), arm, ASKED, 0) for arm in ("today", "all"))
    assert without["lost"] == with_it["lost"] == 0
    assert without["classes"]["interactive"]["attainment"] < 0.5
    assert with_it["classes"]["interactive"]["attainment"] > 0.9
    assert with_it["classes"]["interactive"]["served"] > with_it["classes"]["interactive"]["refused"]
    assert with_it["classes"]["batch"]["served"] == without["classes"]["batch"]["served"]
