"""The command that runs vLLM's API tests: what it unpacks, what it passes on to the server, what it counts."""

import io
import tarfile
from pathlib import Path

from benchmarks.vllm_api_tests.__main__ import summary, unpack
from benchmarks.vllm_api_tests.selection import FILES
from benchmarks.vllm_api_tests.stand_ins import passed_on

_REPORT = """<testsuites><testsuite>
<testcase classname="tests.entrypoints.a.test_b" name="test_fine"/>
<testcase classname="tests.entrypoints.a.test_b" name="test_wrong"><failure message="assert 1 == 2"/></testcase>
<testcase classname="tests.entrypoints.a.test_b" name="test_own"><skipped message="uses vLLM's own X"/></testcase>
</testsuite></testsuites>"""


def test_only_the_selected_tests_are_unpacked_and_their_helpers_are_replaced(tmp_path: Path) -> None:
    archive, folder = tmp_path / "vllm-9.tar.gz", tmp_path / "out"
    with tarfile.open(archive, "w:gz") as writing:
        for name in (*(f"tests/entrypoints/{path}" for path in FILES), "tests/utils.py", "vllm/__init__.py"):
            info = tarfile.TarInfo(f"vllm-9/{name}")
            info.size = len(name)
            writing.addfile(info, io.BytesIO(name.encode()))
    folder.mkdir()
    assert unpack(archive, folder) == "vllm-9"
    assert (folder / "tests/entrypoints" / FILES[1]).read_text() == f"tests/entrypoints/{FILES[1]}"
    assert "benchmarks.vllm_api_tests.stand_ins" in (folder / "tests/utils.py").read_text()
    assert (folder / "tests/entrypoints/openai/__init__.py").exists()
    assert not (folder / "vllm").exists()


def test_flags_that_the_server_knows_are_passed_on_with_their_values() -> None:
    asked = ["--dtype", "half", "--root-path", "/llm", "--enforce-eager", "--enable-force-include-usage"]
    assert passed_on(asked) == ["--root-path", "/llm", "--enable-force-include-usage"]


def test_counts_and_names_are_those_of_the_report(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(_REPORT)
    found = summary(report, "vllm-9")
    assert found["counts"] == {"passed": 1, "failure": 1, "skipped": 1}
    assert found["failed"] == {"a.test_b::test_wrong": "assert 1 == 2"}
    assert found["skipped"] == {"uses vLLM's own X": 1}
