"""Lines of a batch, answered by an application over a fake engine."""

import asyncio
import json
from pathlib import Path

from faser.api.app import create_app
from faser.cli.batch.batch_file import BatchLine, ResultsFile
from faser.cli.batch.runner import Totals, run_lines
from faser.errors import OverloadError
from faser.metrics.server import Metrics
from tests.api.server import settings
from tests.fake_engine import FakeEngine, saying


def lines(number: int) -> list[BatchLine]:
    body = b'{"prompt":"hi","max_tokens":5}'
    return [
        BatchLine(number=at, custom_id=f"id-{at}", url="/v1/completions", body=body) for at in range(1, number + 1)
    ]


def run(engine: FakeEngine, path: Path, given: list[BatchLine], at_once: int) -> tuple[Totals, list[str]]:
    app = create_app(engine, settings=settings(), metrics=Metrics(model_name="tiny", max_model_len=4096))
    heard: list[None] = []
    with ResultsFile(path, resume=False) as results:
        totals = asyncio.run(
            run_lines(app, iter(given), results, at_once=at_once, on_result=lambda: heard.append(None))
        )
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(heard) == len(found)
    return totals, [each["custom_id"] for each in found]


def test_no_more_lines_than_allowed_run_at_once(tmp_path: Path) -> None:
    engine = FakeEngine(saying("Hello"))
    most = 0

    def watched(request: object) -> object:
        nonlocal most
        most = max(most, engine.num_open)
        return saying("Hello")(request)  # type: ignore[arg-type]

    engine.script = watched  # type: ignore[assignment]
    totals, ids = run(engine, tmp_path / "out", lines(20), 3)
    assert sorted(ids) == sorted(f"id-{at}" for at in range(1, 21))
    assert (totals.answered, totals.failed) == (20, 0)
    assert (totals.prompt_tokens, totals.generated_tokens) == (40, 100)
    assert most == 3


def test_a_full_queue_is_waited_for(tmp_path: Path) -> None:
    engine = FakeEngine(saying("Hello"))
    full = OverloadError("the queue is full", retry_after_s=0)
    engine.refusals = [full, None, full]
    totals, _ = run(engine, tmp_path / "out", lines(3), 1)
    assert (totals.answered, totals.failed) == (3, 0)


def test_a_line_that_cannot_be_sent_is_a_result_with_its_number(tmp_path: Path) -> None:
    wrong = BatchLine(number=7, custom_id=None, problem="it is not JSON")
    totals, ids = run(FakeEngine(), tmp_path / "out", [wrong, *lines(1)], 2)
    assert (totals.answered, totals.failed) == (1, 1)
    by_id = {each["custom_id"]: each for each in map(json.loads, (tmp_path / "out").read_text().splitlines())}
    assert by_id[None]["error"] == {"code": "invalid_line", "message": "line 7: it is not JSON"}
    assert by_id[None]["response"] is None
    assert len(ids) == 2
