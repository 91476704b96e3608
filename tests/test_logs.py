"""One JSON object a line, whatever is logged."""

import json
import logging
import sys
from datetime import datetime
from typing import Any

import pytest

from faser.logs import JsonLines, begin, bind, without_query


def formatted(record: logging.LogRecord) -> dict[str, Any]:
    line = JsonLines("front-end").format(record)
    assert line.splitlines() == [line]
    found: dict[str, Any] = json.loads(line)
    return found


def record_of(message: str, *args: object, name: str = "faser.api", **fields: Any) -> logging.LogRecord:
    record = logging.LogRecord(name, logging.WARNING, "x.py", 1, message, args, None)
    record.__dict__.update(fields)
    return record


@pytest.fixture(autouse=True)
def _no_request() -> None:
    begin()


def test_a_line_has_these_keys_and_no_others() -> None:
    line = formatted(record_of("it is %d", 3))
    assert list(line) == ["ts", "level", "logger", "message", "process"]
    moment = datetime.fromisoformat(line.pop("ts"))
    assert moment.utcoffset() is not None
    assert line == {"level": "WARNING", "logger": "faser.api", "message": "it is 3", "process": "front-end"}


@pytest.mark.parametrize("text", ["a\nb", "a\r\nb", "\u2028x\u2029", "\x85\x0b\x0c\x1c", '"quoted" \\n', "\ud800"])
def test_no_message_breaks_the_line(text: str) -> None:
    assert formatted(record_of("%s", text))["message"] == text


def test_an_exception_is_a_field() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = record_of("it failed", exc_info=sys.exc_info())
    line = formatted(record)
    assert line["message"] == "it failed"
    assert "Traceback" in line["exception"]
    assert line["exception"].endswith("ValueError: two\nlines")


def test_the_request_of_the_context_is_named_and_a_records_own_wins() -> None:
    begin(request_id="r1")
    bind(trace_id="t", span_id="s")
    line = formatted(record_of("x"))
    assert (line["request_id"], line["trace_id"], line["span_id"]) == ("r1", "t", "s")
    assert formatted(record_of("x", request_id="r2"))["request_id"] == "r2"


def test_the_access_log_has_its_parts_as_fields() -> None:
    parts = ("127.0.0.1:5", "POST", "/v1/completions", "1.1", 200)
    line = formatted(record_of('%s - "%s %s HTTP/%s" %d', *parts, name="uvicorn.access"))
    assert line["message"] == '127.0.0.1:5 - "POST /v1/completions HTTP/1.1" 200'
    assert (line["client"], line["method"], line["path"], line["status"]) == (parts[0], parts[1], parts[2], 200)


@pytest.mark.parametrize(
    "target",
    ["/v1/models", "/v1/models?", "/v1/models?api_key=sk-1", "/v1/models?a=b?c=d", "/v1/models%3Fapi_key=sk-1"],
)
def test_the_access_log_has_no_query_string(target: str) -> None:
    record = record_of('%s - "%s %s HTTP/%s" %d', "127.0.0.1:5", "GET", target, "1.1", 200, name="uvicorn.access")
    assert without_query(record)
    assert record.getMessage() == '127.0.0.1:5 - "GET /v1/models HTTP/1.1" 200'
    assert formatted(record)["path"] == "/v1/models"


def test_other_lines_of_the_access_log_stay_as_they_are() -> None:
    record = record_of("%s - refused: %d %s", ("127.0.0.1", 5), 400, "why?", name="uvicorn.access")
    assert without_query(record)
    assert record.getMessage() == "('127.0.0.1', 5) - refused: 400 why?"
