"""A picture of a step trace shows the lanes' times, the chunks and their verdicts."""

import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.render_trace import Panel, drawn, panel_of, read_steps
from faser.engine.contract.drafts import Drafts, table_of
from faser.engine.contract.plan import DraftPlan, DraftRequest, SequenceRows, StepPlan, StepResult, StepRows
from faser.engine.step_trace import StepTrace
from faser.errors import ConfigError

SVG = "{http://www.w3.org/2000/svg}"
GREEN, RED, BLUE, BROWN, PALE = "#1a7f37", "#cf222e", "#0969da", "#9a6700", "#c9b58a"


def plan(step: int, *drafted: int) -> StepPlan:
    rows = SequenceRows(slot=2, start=9, token_ids=(5, *drafted), samples=True, num_drafts=len(drafted))
    return StepPlan(step=step, released=(), started=(), rows=StepRows.of(rows))


def result(step: int, began_s: float, *token_ids: int) -> StepResult:
    return StepResult(step=step, counts=[len(token_ids)], token_ids=[*token_ids], run_s=0.050, began_s=began_s)


def drafts(step: int, began_s: float, run_s: float, *token_ids: int) -> Drafts:
    count = len(token_ids)
    table = table_of([2], "draft_model", [token_ids], [(1.0,) * count], width=count)
    return Drafts(step=step, table=table, run_s=run_s, began_s=began_s, passes=count)


def written(path: Path) -> Path:
    """A step with a draft before it: of three one accepted. A step beside which a draft is made that stands."""
    trace = StepTrace(path)
    trace.step(1.0, 1.1, plan(0, 6, 7, 8), result(0, 1.045, 6, 9), drafts=drafts(0, 1.005, 0.035, 6, 7, 8))
    ahead = DraftPlan(step=1, width=3, requests=(DraftRequest(slot=2, max_tokens=3, new_blocks=()),), share=0.5)
    beside = drafts(1, 1.103, 0.040, 4, 3, 2)
    trace.step(1.1, 1.2, plan(1), result(1, 1.102, 4), overlapped_plan=ahead, overlapped_drafts=beside)
    trace.close()
    return path


def dots(picture: str) -> list[str]:
    return [each.get("fill", "") for each in ET.fromstring(picture).iter(f"{SVG}circle")][:-5]  # without the key


def test_a_trace_is_read_step_by_step(tmp_path: Path) -> None:
    first, second = read_steps(written(tmp_path / "trace.json"))
    assert [span.name for span in first] == ["propose", "draft", "plan", "verify", "commit"]
    assert {span.name for span in second} == {"plan", "verify", "draft ahead", "commit"}
    verify = next(span for span in first if span.name == "verify")
    assert (verify.line, verify.args["accepted"]) == ("verify lane", [1])
    assert verify.end_us - verify.begin_us == pytest.approx(50_000)


def test_a_trace_that_was_not_closed_can_be_read(tmp_path: Path) -> None:
    path = written(tmp_path / "trace.json")
    path.write_text(path.read_text(encoding="utf-8").removesuffix("\n]\n"), encoding="utf-8")
    assert len(read_steps(path)) == 2


def test_dots_are_the_verdicts(tmp_path: Path) -> None:
    steps = read_steps(written(tmp_path / "trace.json"))
    before, beside = (drawn([Panel(title="a", steps=(step,))]) for step in steps)
    assert sorted(dots(before)) == sorted([BROWN] * 3 + [GREEN, BLUE, RED, RED])
    assert sorted(dots(beside)) == sorted([BLUE, GREEN, BROWN, BROWN])


def test_a_draft_made_ahead_that_does_not_stand_is_pale(tmp_path: Path) -> None:
    step = read_steps(written(tmp_path / "trace.json"))[1]
    fallen = tuple(
        replace(span, args=span.args | {"stands": [False]}) if span.name == "draft ahead" else span
        for span in step
    )
    assert dots(drawn([Panel(title="a", steps=(fallen,))])).count(PALE) == 3


def test_widths_are_times_and_all_panels_have_one_scale(tmp_path: Path) -> None:
    steps = read_steps(written(tmp_path / "trace.json"))
    panels = [Panel(title="both", steps=tuple(steps)), Panel(title="one", steps=tuple(steps[:1]))]
    picture = ET.fromstring(drawn(panels))
    boxes = {}
    for number, each in enumerate(picture.iter(f"{SVG}rect")):
        title = each.find(f"{SVG}title")
        if title is not None and title.text is not None:
            boxes[title.text, number] = float(each.get("width", 0))
    verify = [wide for (text, _), wide in boxes.items() if text == "verify, 50.0 ms"]
    (draft,) = {wide for (text, _), wide in boxes.items() if text == "draft, 35.0 ms"}
    assert len(verify) == 3
    assert max(verify) - min(verify) < 0.2
    assert draft / verify[0] == pytest.approx(35 / 50, rel=0.01)


def test_a_panel_says_its_tokens_and_its_time(tmp_path: Path) -> None:
    path = written(tmp_path / "trace.json")
    assert "before &amp; after: 2 steps, 3 tokens in 200 ms" in drawn([panel_of(f"before & after={path}", 0, 2)])


def test_what_is_no_trace_or_too_short_is_refused_by_name(tmp_path: Path) -> None:
    path = written(tmp_path / "trace.json")
    with pytest.raises(ConfigError, match="has 2 steps; 5 are to be read"):
        panel_of(f"a={path}", 1, 4)
    with pytest.raises(ConfigError, match="TITLE=FILE"):
        panel_of(str(path), 0, 1)
    other = tmp_path / "other.json"
    other.write_text('{"a": 1}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"other.json is no step trace"):
        read_steps(other)
