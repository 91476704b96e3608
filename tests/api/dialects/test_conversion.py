"""What dialects share."""

import logging

import pytest

from faser.api.bodies.fields import FieldChecker
from faser.api.dialects.conversion import IGNORED_HEADER, ignored


def test_what_is_left_out_is_named_in_each_answer_and_once_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    fields = FieldChecker(strict=False)
    with caplog.at_level(logging.WARNING, "faser.api"):
        first = ignored({"tools.1": "web_search", "tools.3": "mcp"}, fields)
        second = ignored({"tools.0": "web_search"}, fields)
        none = ignored({}, fields)
    assert first == {IGNORED_HEADER: "tools.1 (web_search), tools.3 (mcp)"}
    assert second == {IGNORED_HEADER: "tools.0 (web_search)"}
    assert none == {}
    assert [record.getMessage() for record in caplog.records] == [
        "requests have tools of type web_search, which has no effect",
        "requests have tools of type mcp, which has no effect",
    ]


def test_a_header_names_sixteen_parts_at_most() -> None:
    header = ignored({f"tools.{at}": "mcp" for at in range(20)}, FieldChecker(strict=False))[IGNORED_HEADER]
    assert header.endswith("tools.15 (mcp), 4 more")
