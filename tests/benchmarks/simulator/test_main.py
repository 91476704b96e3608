"""The simulator's command on small files: what it writes, prints and refuses."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.simulator.__main__ import main, simulate
from benchmarks.simulator.trace import iid_trace, write_trace
from faser.engine.contract.step_times import StepTimes
from faser.errors import ConfigError


def files(tmp_path: Path) -> list[str]:
    """A cost model and a trace, as arguments."""
    cost, trace = tmp_path / "cost.json", tmp_path / "trace.jsonl"
    StepTimes.proportional(step_s=0.02, row_s=0.001, pass_s=0.002).save(cost)
    write_trace(iid_trace(0.7, max_tokens=5, num_requests=4, output_len=12), trace)
    return ["--cost", str(cost), "--trace", str(trace)]


def test_a_report_has_every_policy_at_every_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--arrivals", "poisson:4", "--speed-up", "1,4", "--duration", "3", "--policies", "off,fixed:2"]
    targets = ["--slo-tpot-ms", "25", "--slo-ttft-ms", "1000", "--out", str(tmp_path / "out")]
    assert simulate([*files(tmp_path), *options, *targets]) == 0
    shown = capsys.readouterr().out
    assert shown.count("| fixed:2 |") == shown.count("| off |") == 2
    report = json.loads((tmp_path / "out" / "simulate.json").read_text())
    assert [(cell["load"], cell["policy"]) for cell in report["cells"]] == [
        (1.0, "off"),
        (1.0, "fixed:2"),
        (4.0, "off"),
        (4.0, "fixed:2"),
    ]
    assert report["about"]["drafter"] == "draft_model"
    assert all(0 <= cell["slo_share"] <= 1 for cell in report["cells"])
    assert "![tpot_p99](tpot_p99.svg)" in (tmp_path / "out" / "simulate.md").read_text()
    for name in ("tpot_mean", "tpot_p99", "e2e_mean", "tokens_per_s"):
        ElementTree.parse(tmp_path / "out" / f"{name}.svg")


def test_a_csv_of_arrivals_is_replayed(tmp_path: Path) -> None:
    rows = "".join(f"2024-01-01 00:00:{second:02}.5000000,{second + 1},30\n" for second in range(40))
    csv = tmp_path / "azure.csv"
    csv.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    options = [
        "--arrivals",
        str(csv),
        "--scale-tokens",
        "0.5",
        "--policies",
        "off",
        "--out",
        str(tmp_path / "out"),
    ]
    assert simulate([*files(tmp_path), *options, "--speed-up", "2", "--duration", "10"]) == 0
    (cell,) = json.loads((tmp_path / "out" / "simulate.json").read_text())["cells"]
    assert (cell["num_requests"], cell["output_tokens"]) == (20, 20 * 15)


def test_acceptance_can_be_made_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cost = files(tmp_path)[:2]
    assert simulate([*cost, "--trace", "iid:1.0", "--num-requests", "2", "--policies", "fixed:3"]) == 0
    assert "100%" in capsys.readouterr().out


def test_help_names_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(flag in shown for flag in ("--record", "--check-live", "--arrivals"))


@pytest.mark.parametrize(
    "options, message",
    [
        ([], "--trace and --cost are needed"),
        (["--check-live"], "--check-live needs"),
        (["--nonsense"], "--nonsense"),
        (["--speed-up", "0"], "must be a number above 0"),
        (["--num-prompts", "0"], "at least 1"),
        (["--trace", "iid:x", "--cost", "c"], "iid:A needs"),
        (["--record", "t", "--speculative-config", "{"], "not JSON"),
        (["--record", "t", "--speculative-config", "[]"], "must be an object"),
    ],
)
def test_what_cannot_be_is_refused(options: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(options)


def test_an_error_is_one_line_that_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--trace", "iid:x", "--cost", "c"]) == 2
    assert main(["--nonsense"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("python -m benchmarks simulator: ") for line in lines)


def test_a_closed_workload_needs_an_end(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it never ends"):
        simulate(files(tmp_path))
