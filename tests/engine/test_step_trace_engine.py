"""What an engine writes with --trace-steps is a trace by the format, and tells what its steps did.

Oracles: the format's own demands, the answers, and how drafts made ahead turn into chunks.
"""

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.engine.losslessness.equality import CAP, answers, build, requests, write_pair
from tests.engine.trace_events import CLOCK_US, checked

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two lanes take two cores")

Event = dict[str, Any]

NUM_REQUESTS, NUM_TOKENS = 4, 40


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[Event], int]]:
    """By overlap, on or off: the events, and how many tokens the answers have."""
    pair = write_pair(tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter"))
    return {
        overlap: traced(pair, overlap, tmp_path_factory.mktemp("trace") / "t.json") for overlap in ("on", "off")
    }


def traced(pair: tuple[Path, Path], overlap: str, path: Path) -> tuple[list[Event], int]:
    drafter = {"method": "draft_model", "model": str(pair[1])}
    engine = build(pair, drafter, spec_overlap=overlap, trace_steps=str(path))
    engine.use_policy("fixed", CAP)
    said = answers(engine, requests(temperature=0.0, max_tokens=NUM_TOKENS)[:NUM_REQUESTS])
    engine.close()
    return checked(path), sum(len(token_ids) for token_ids, _ in said.values())


def spans(events: list[Event], name: str) -> list[Event]:
    return [each for each in events if each["ph"] == "X" and each["name"] == name]


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_accepted_tokens_and_the_targets_own_are_the_answers(
    written: dict[str, tuple[list[Event], int]], overlap: str
) -> None:
    events, num_tokens = written[overlap]
    verified = [each["args"] for each in spans(events, "verify")]
    assert all(
        0 <= kept <= drafted
        for each in verified
        for kept, drafted in zip(each["accepted"], each["drafted"], strict=True)
    )
    sampled = sum(sum(each["accepted"]) + len(each["accepted"]) for each in verified)
    assert (
        num_tokens <= sampled < num_tokens + NUM_REQUESTS * (CAP + 1)
    )  # the last step of an answer may go beyond its end
    assert sum(sum(each["accepted"]) for each in verified) > 0


def test_lanes_run_next_to_each_other_where_drafts_are_made_ahead_and_only_there(
    written: dict[str, tuple[list[Event], int]],
) -> None:
    """Between plan and commit; a short one may be over before the other wakes."""
    assert not spans(written["off"][0], "draft ahead")
    verify, ahead, commits = (spans(written["on"][0], name) for name in ("verify", "draft ahead", "commit"))
    plans = spans(written["on"][0], "plan")
    assert len(ahead) > 10
    for each in ahead:
        (at,) = (i for i, other in enumerate(verify) if other["args"]["step"] == each["args"]["step"])
        assert each["tid"] != verify[at]["tid"]
        assert plans[at]["ts"] <= each["ts"]
        assert each["ts"] + each["dur"] <= commits[at]["ts"] + CLOCK_US
        assert verify[at]["ts"] + verify[at]["dur"] <= commits[at]["ts"] + CLOCK_US


def test_drafts_made_before_a_step_are_over_when_it_begins(written: dict[str, tuple[list[Event], int]]) -> None:
    for events, _ in written.values():
        verify = {each["args"]["step"]: each for each in spans(events, "verify")}
        for draft in spans(events, "draft"):
            assert draft["ts"] + draft["dur"] <= verify[draft["args"]["step"]]["ts"] + CLOCK_US
    assert len(spans(written["off"][0], "draft")) > 10


def test_a_chunk_is_what_stood_of_the_draft_made_during_the_step_before(
    written: dict[str, tuple[list[Event], int]],
) -> None:
    events, _ = written["on"]
    verify = [each["args"] for each in spans(events, "verify")]
    ahead = {each["args"]["step"]: each["args"] for each in spans(events, "draft ahead")}
    seen = set()
    for before, after in pairwise(verify):
        made = ahead.get(before["step"])
        if made is None:
            continue
        chunks = dict(zip(after["slots"], after["drafted"], strict=True))
        for slot, drafted, stands in zip(made["slots"], made["drafted"], made["stands"], strict=True):
            if slot in chunks and slot in before["slots"]:
                assert chunks[slot] <= (drafted - 1 if stands else 0)
                seen.add((stands, chunks[slot] > 0))
    assert {(True, True), (False, False)} <= seen


def test_the_first_token_of_a_draft_is_behind_the_chunk_that_is_verified(
    written: dict[str, tuple[list[Event], int]],
) -> None:
    events, _ = written["on"]
    chunks = {each["args"]["step"]: each["args"] for each in spans(events, "verify")}
    for each in (span["args"] for span in spans(events, "draft ahead")):
        drafted = dict(zip(chunks[each["step"]]["slots"], chunks[each["step"]]["drafted"], strict=True))
        accepted = dict(zip(chunks[each["step"]]["slots"], chunks[each["step"]]["accepted"], strict=True))
        for slot, behind, stands in zip(each["slots"], each["behind"], each["stands"], strict=True):
            assert drafted[slot] == behind
            assert not stands or accepted[slot] == behind
