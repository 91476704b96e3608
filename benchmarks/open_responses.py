"""Runs the Open Responses compliance suite against a server with the default model.

    python -m benchmarks open_responses FOLDER [--bun BUN] [--out FILE]

FOLDER: a checkout of github.com/openresponses/openresponses with the package zod installed. A server with the
default model and a store of responses answers. So small a model calls a function only when it must: a proxy sets
tool_choice to required in requests with tools.
"""

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.runner import command_line, write_json
from benchmarks.servers import Server, faser_recipe
from tests.clients.scripted import Json, Script, scripted

_MODEL = "default"

# Tests of what FASER does not have, by the beginning of their names.
_LEFT_OUT = {
    "websocket-": "FASER has no WebSocket",
    "compact-": "FASER has no /responses/compact",
    "image-": "the model reads text only",
}


class _Demanding(Script):
    """Leaves requests as they are, but for a call that must be made."""

    def fixed(self, path: str, body: Json) -> Json:
        del path
        return body | {"tool_choice": "required"} if body.get("tools") else body


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("folder", type=Path, help="of the suite")
    parser.add_argument("--bun", default="bun", help="the program bun")
    parser.add_argument("--out", type=Path, help="file for the results, as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="open-responses-") as name:
        flags = ("--served-model-name", _MODEL, "--responses-store", "64MiB")
        with (
            Server(faser_recipe("faser", flags, Path(name))) as server,
            scripted(server.url, _Demanding((), "")) as proxy,
        ):
            server.wait_until_healthy(route="/ready")
            command = [options.bun, "run", "bin/compliance-test.ts", "--base-url", f"{proxy.url}/v1"]
            command += ["--api-key", "none", "--model", _MODEL, "--json"]
            done = subprocess.run(command, cwd=options.folder, capture_output=True, text=True, check=False)
    report = summary(json.loads(done.stdout)["results"], _commit(options.folder))
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    if options.out is not None:
        write_json(options.out, report)
    return 1 if report["failed"] else 0


def summary(results: list[dict[str, Any]], commit: str) -> dict[str, Any]:
    """Return the tests that passed, failed and were left out, with the reason."""
    report: dict[str, Any] = {"tests_of": commit, "counts": {}, "passed": [], "failed": {}, "left_out": {}}
    for result in results:
        name = result["id"]
        why = next((reason for begin, reason in _LEFT_OUT.items() if name.startswith(begin)), None)
        if result["status"] == "passed":
            report["passed"].append(name)
        elif why is not None:
            report["left_out"][name] = why
        else:
            report["failed"][name] = result.get("errors") or result["status"]
    report["counts"] = dict(Counter({key: len(report[key]) for key in ("passed", "failed", "left_out")}))
    return report


def _commit(folder: Path) -> str:
    command = ["git", "-C", str(folder), "log", "-1", "--format=openresponses %h of %cs"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
