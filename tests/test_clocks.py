"""Nothing in the package measures time by the system's clock, which an operator or NTP may set at any moment.

Whole Unix seconds are dates for clients to read, and may be taken anywhere: `int(time.time())`.
"""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "faser"

# Of files, whose times are the system's; of dates that people read; of spans, where they begin, and of KV events.
EXEMPT = {
    *("files.py", "engine/execution/startup/step_times.py"),
    *("api/requests/chat_template.py", "tracing_sdk.py", "engine/kv_events.py"),
}
WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"}


def readings(text: str) -> list[int]:
    """Lines that read the system's clock, other than as whole seconds."""
    tree = ast.parse(text)
    dates = {
        id(call.args[0].func)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) == "int"
        and len(call.args) == 1
        and isinstance(call.args[0], ast.Call)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            found += [node.lineno for name in node.names if name.name in ("time", "time_ns")]
        if isinstance(node, ast.Attribute) and id(node) not in dates and ast.unparse(node) in WALL_CLOCKS:
            found.append(node.lineno)
    return found


def test_time_is_measured_by_clocks_that_never_jump() -> None:
    found = {
        str(path.relative_to(PACKAGE)): lines
        for path in sorted(PACKAGE.rglob("*.py"))
        if (lines := readings(path.read_text(encoding="utf-8")))
    }
    assert set(found) <= EXEMPT, found


@pytest.mark.parametrize(
    "text, lines",
    [
        ("import time\nbegan_s = time.time()", [2]),
        ("import time\ndef late(clock=time.time): ...", [2]),
        ("from time import time", [1]),
        ("from datetime import datetime\nnow = datetime.now()", [2]),
        ("import time\ncreated = int(time.time())", []),
        ("import time\nage = int(time.time() - began)", [2]),
        ("import time\nbegan_s = time.monotonic()", []),
    ],
)
def test_a_reading_is_found(text: str, lines: list[int]) -> None:
    assert readings(text) == lines
