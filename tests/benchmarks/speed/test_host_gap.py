"""The clock in a GPU's place: what the host adds is what steps take beyond the work that the clock was given."""

import pytest

from benchmarks.speed.host_gap import GAMMA, OVERLAPPED, PLAIN, SERIAL, SHORT, Wanted, measure

pytestmark = pytest.mark.alone  # measures time
STEP_S, PASS_S, SMALL_S = 0.02, 0.001, 0.001


def measured(mode: str, sequences: int) -> dict[str, float]:
    found = measure(Wanted(mode=mode, sequences=sequences, step_s=STEP_S, pass_s=PASS_S, blocks=1))
    assert found["gap_ms"] == pytest.approx(found["period_ms"] - found["device_ms"], abs=0.002)
    # Of a block of 20 steps, the one in flight as it begins may have been counted before.
    assert found["gap_ms"] > -1000 * STEP_S / 20
    return found


def test_a_plain_step_is_one_trunk_and_a_token_for_everybody() -> None:
    found = measured(PLAIN, 4)
    assert found["tokens"] == 4
    assert 1000 * STEP_S <= found["device_ms"] < 1000 * (STEP_S + SMALL_S)


def test_drafts_of_every_step_are_all_accepted_and_their_passes_add_up() -> None:
    found = measured(SERIAL, 4)
    assert found["tokens"] == 4 * (GAMMA + 1)
    drafted_s = GAMMA * PASS_S
    assert 1000 * (STEP_S + drafted_s) <= found["device_ms"] < 1000 * (STEP_S + drafted_s + SMALL_S)
    parts_ms = found["before_step_ms"], found["before_draft_ms"]
    assert min(parts_ms) > 0


@pytest.mark.parametrize("sequences", [1, 4])
def test_of_two_lanes_the_longer_one_counts(sequences: int) -> None:
    """Caught: an engine for one sequence, whose steps on a lane were not recorded, and took the device no time."""
    found = measured(OVERLAPPED, sequences)
    assert found["tokens"] > sequences
    assert 1000 * STEP_S <= found["device_ms"] < 1000 * (STEP_S + SMALL_S)


def test_clients_with_short_answers_ask_again_and_every_step_is_launched_ahead() -> None:
    """Several requests end and begin within the steps, which compute prompts.

    A step that is in flight when the block of steps begins or ends moves its work to the other side.
    """
    found = measure(Wanted(mode=SHORT, sequences=8, step_s=STEP_S, pass_s=PASS_S, blocks=1))
    assert 6 < found["tokens"] <= 8
    assert found["gap_ms"] > -0.2 * 1000 * STEP_S


def test_plans_of_attention_are_made_where_pieces_change() -> None:
    """Four drafted tokens cross a piece of 128 in every 32nd pass or so, where nothing else changes."""
    assert measured(SERIAL, 4)["plans"] < 2.5
