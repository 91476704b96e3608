"""Runs vLLM's own API tests against a server, and counts those that pass and fail.

    python -m benchmarks vllm_api_tests SDIST [--model MODEL] [--out FILE] [-k WORDS]

SDIST: vllm-*.tar.gz, from a package index. Only its tests of the HTTP API are unpacked, to a temporary folder.
They need the packages pytest-asyncio, regex and requests, which FASER does not.
"""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.runner import command_line, write_json
from benchmarks.vllm_api_tests.selection import DESELECTED, FILES, LEFT_OUT

_SHIM = "from benchmarks.vllm_api_tests.stand_ins import *\n"
_CONFTEST = "LocalAssetServer = None\n"  # serves images; a test that needs one has no such fixture
_REPOSITORY = Path(__file__).parents[2]


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("sdist", type=Path, help="vllm-*.tar.gz")
    parser.add_argument("--model", default="", help="that faser serves; the default model if none is given")
    parser.add_argument("--out", type=Path, help="file for the counts, as JSON")
    parser.add_argument("-k", default="", help="only tests whose names match, as in pytest")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vllm-api-tests-") as name:
        folder = Path(name)
        version = unpack(options.sdist, folder)
        status = run(folder, options.model, options.k)
        report = summary(folder / "report.xml", version)
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    if options.out is not None:
        write_json(options.out, report)
    return status


def unpack(sdist: Path, folder: Path) -> str:
    """Write the selected test files to folder, with helpers of our own; returns the name of the package."""
    with tarfile.open(sdist) as archive:
        root = archive.getnames()[0].partition("/")[0]
        for path in FILES:
            source = archive.extractfile(f"{root}/tests/entrypoints/{path}")
            assert source is not None, f"{path} is no file"
            target = folder / "tests" / "entrypoints" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read())
    for parent in {parent for path in (folder / "tests").rglob("*.py") for parent in path.parents}:
        if folder in parent.parents:
            (parent / "__init__.py").touch()
    (folder / "tests" / "utils.py").write_text(_SHIM, encoding="utf-8")
    (folder / "tests" / "conftest.py").write_text(_CONFTEST, encoding="utf-8")
    return root


def run(folder: Path, model: str, words: str) -> int:
    """Run pytest in folder; its exit status."""
    environment = dict(os.environ)
    extra = environment.get("PYTHONPATH", "")
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(_REPOSITORY), extra])
    environment["TESTED_MODEL"] = model
    command = [sys.executable, "-m", "pytest", "-q", "--continue-on-collection-errors"]
    command += ["-p", "benchmarks.vllm_api_tests.stand_ins", "-p", "no:cacheprovider", "-c", os.devnull]
    command += ["--rootdir", str(folder), f"--junitxml={folder / 'report.xml'}", "tests"]
    command += ["-k", words] if words else []
    return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


def summary(report: Path, version: str) -> dict[str, Any]:
    """The counts, and the names of what failed, of pytest's report."""
    counts: Counter[str] = Counter()
    failed = {}
    not_applicable: Counter[str] = Counter()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        problem = next((each for each in case if each.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if problem is None else problem.tag
        if problem is not None and outcome != "skipped":
            module = case.get("classname", "").removeprefix("tests.entrypoints.")
            failed[f"{module}::{case.get('name')}"] = problem.get("message", "")[:200]
        elif problem is not None:
            not_applicable[problem.get("message", "")[:120]] += 1
        counts[outcome] += 1
    return {
        "tests_of": version,
        "counts": dict(counts),
        "failed": failed,
        "skipped": dict(not_applicable.most_common()),
        "deselected": DESELECTED,
        "files_left_out": LEFT_OUT,
    }
