"""The step trace is a file that trace viewers open: valid JSON, every span on its line, at its time."""

import json
import logging
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from faser.engine.contract.drafts import Drafts, table_of
from faser.engine.contract.plan import DraftPlan, DraftRequest, SequenceRows, StepPlan, StepResult, StepRows
from faser.engine.step_trace import StepTraceFile
from faser.errors import ConfigError
from faser.types.answer import SequenceError

PLAN = StepPlan(
    step=7,
    released=(),
    started=(),
    rows=StepRows.of(
        SequenceRows(slot=2, start=10, token_ids=(5, 6, 7), samples=True, num_drafts=2),
        SequenceRows(slot=4, start=0, token_ids=(1, 2, 3, 4), samples=False),
    ),
)
RESULT = StepResult(step=7, counts=[2, 0], token_ids=[6, 9], run_s=0.050, began_s=1.010)
OVERLAPPED = DraftPlan(
    step=7, width=3, requests=(DraftRequest(slot=2, max_tokens=3, new_blocks=(), unverified=(6, 7)),), share=0.5
)


def drafts(began_s: float, run_s: float, *token_ids: int) -> Drafts:
    count = len(token_ids)
    table = table_of([2], "draft_model", [token_ids], [(1.0,) * count], width=count)
    return Drafts(step=7, table=table, run_s=run_s, began_s=began_s, passes=count, catchup_tokens=1)


def events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def spans(path: Path) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in events(path) if each["ph"] == "X"}


def lines(path: Path) -> dict[int, str]:
    return {each["tid"]: each["args"]["name"] for each in events(path) if each["name"] == "thread_name"}


def test_a_step_that_drafted_before_it_verified_has_its_spans_one_after_another(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = StepTraceFile(path)
    trace.step(1.0, 1.070, PLAN, RESULT, drafts=drafts(1.001, 0.005, 6, 7))
    trace.close()
    found = spans(path)
    order = ["propose", "draft", "plan", "verify", "commit"]
    assert sorted(found, key=lambda name: found[name]["ts"]) == order
    for name, following in pairwise(order):
        assert found[name]["ts"] + found[name]["dur"] == pytest.approx(found[following]["ts"], abs=1.0)
    assert found["verify"]["ts"] == pytest.approx(1.010e6)
    assert found["verify"]["dur"] == pytest.approx(0.050e6)
    on_line = {name: lines(path)[span["tid"]] for name, span in found.items()}
    assert on_line["draft"] == "draft lane"
    assert on_line["verify"] == "verify lane"
    assert on_line["propose"] == on_line["plan"] == on_line["commit"] == "host"


def test_accepted_tokens_and_rows_are_in_the_span(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = StepTraceFile(path)
    trace.step(1.0, 1.070, PLAN, RESULT)
    trace.close()
    assert spans(path)["verify"]["args"] == {
        "step": 7,
        "rows": 7,
        "slots": [2],
        "drafted": [2],
        "accepted": [1],
        "prompt_rows": 4,
    }


def test_of_a_sequence_that_failed_all_tokens_were_drafted(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = StepTraceFile(path)
    trace.step(1.0, 1.070, PLAN, replace(RESULT, errors={0: SequenceError.NOT_FINITE}))
    trace.close()
    assert spans(path)["verify"]["args"]["accepted"] == [2]


def test_lanes_that_ran_together_overlap_and_the_step_ends_with_the_longer(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = StepTraceFile(path)
    trace.step(
        1.0, 1.080, PLAN, RESULT, overlapped_plan=OVERLAPPED, overlapped_drafts=drafts(1.011, 0.060, 8, 9, 1)
    )
    trace.close()
    found = spans(path)
    draft, verify = found["draft ahead"], found["verify"]
    assert draft["ts"] < verify["ts"] + verify["dur"] < draft["ts"] + draft["dur"]
    assert draft["args"]["behind"] == [2]
    assert draft["args"]["drafted"] == [3]
    assert found["commit"]["ts"] == pytest.approx(1.071e6)


@pytest.mark.parametrize(
    ("sampled", "stands"),
    [((6, 7, 8), True), ((6, 7, 5), False), ((6, 9), False), ((6, 7), False), ((), False)],
)
def test_an_overlapped_draft_stands_if_its_chunk_and_its_first_token_were_sampled(
    tmp_path: Path, sampled: tuple[int, ...], stands: bool
) -> None:
    path = tmp_path / "trace.json"
    trace = StepTraceFile(path)
    result = replace(RESULT, counts=[len(sampled), 0], token_ids=[*sampled])
    trace.step(
        1.0, 1.080, PLAN, result, overlapped_plan=OVERLAPPED, overlapped_drafts=drafts(1.011, 0.060, 8, 9, 1)
    )
    trace.close()
    assert spans(path)["draft ahead"]["args"]["stands"] == [stands]


def test_a_trace_that_was_not_closed_only_lacks_its_bracket(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = StepTraceFile(path)
    trace.step(1.0, 1.070, PLAN, RESULT)
    trace.close()
    trace.close()
    trace.step(2.0, 2.070, PLAN, RESULT)
    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n]\n")
    assert json.loads(text.removesuffix("\n]\n") + "]") == events(path)
    assert len(spans(path)) == 3


def test_an_engine_that_is_killed_leaves_whole_events(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = StepTraceFile(path)
    trace.step(1.0, 1.070, PLAN, RESULT)
    assert len(json.loads(path.read_text(encoding="utf-8") + "]")) > 5
    trace.close()


def test_a_trace_ends_at_its_most_bytes_and_stays_valid(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.json"
    trace = StepTraceFile(path, most_bytes=2000)
    with caplog.at_level(logging.WARNING):
        for step in range(100):
            trace.step(step, step + 0.070, PLAN, RESULT)
    assert 2000 <= path.stat().st_size < 2600
    assert events(path)
    assert "tracing stopped" in caplog.text


@pytest.mark.parametrize("num_steps", [0, 1, 500])
def test_a_disk_that_is_full_ends_the_trace_in_one_line_and_not_the_engine(
    num_steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    trace = StepTraceFile(Path("/dev/full"))
    for _ in range(num_steps):
        trace.step(1.0, 1.1, PLAN, RESULT)
    trace.close()
    assert caplog.messages == ["the step trace /dev/full ends here: No space left on device"]


def test_a_path_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--trace-steps is .*nowhere.* No such file"):
        StepTraceFile(tmp_path / "nowhere" / "trace.json")
