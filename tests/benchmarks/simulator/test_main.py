"""The simulator's command on small files: what it writes, prints and refuses."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.simulator.__main__ import main, simulate
from benchmarks.simulator.synthetic import iid_trace
from benchmarks.simulator.trace import write_trace
from faser.bench.chart import line_chart
from faser.bench.policy_spec import parse_policy
from faser.bench.prompts import questions_of, spread
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


def test_one_load_has_no_chart(tmp_path: Path) -> None:
    options = ["--num-requests", "3", "--policies", "off", "--out", str(tmp_path / "out")]
    assert simulate([*files(tmp_path), *options]) == 0
    assert not list((tmp_path / "out").glob("*.svg"))


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
    assert all(line.startswith("python -m benchmarks.simulator: ") for line in lines)


def test_a_closed_workload_needs_an_end(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it never ends"):
        simulate(files(tmp_path))


@pytest.mark.parametrize(
    "text", ["fixed", "fixed:0", "fixed:6", "fixed:x", "quick", "off:1", "table:", "table:4=9"]
)
def test_a_policy_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--policies names '{text}'"):
        parse_policy(text, cap=5)


def test_a_table_is_spelled_by_its_bounds() -> None:
    assert parse_policy("table:4=5/16=2/64=0", cap=5).table == ((1, 4, 5), (5, 16, 2), (17, 64, 0))
    with pytest.raises(ConfigError, match="ascending"):
        parse_policy("table:4=5/4=2", cap=5)


def test_prompts_are_lines_or_first_turns(tmp_path: Path) -> None:
    text, records = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_text("one\n\ntwo\n")
    records.write_text('{"category": "code", "turns": ["first", "second"]}\n{"turns": ["third"]}\n')
    assert questions_of(text) == [("", "one"), ("", "two")]
    assert questions_of(records) == [("code", "first"), ("", "third")]


@pytest.mark.parametrize("name, text", [("a.jsonl", "{}"), ("a.jsonl", "no JSON"), ("a.txt", "\n")])
def test_prompts_that_cannot_be_read_are_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=f"--prompts is .*{name}"):
        questions_of(tmp_path / name)


def test_a_sample_of_prompts_spreads_over_all() -> None:
    questions = [(kind, str(number)) for kind in "abc" for number in range(4)]
    assert [kind for kind, _ in spread(questions, 3)] == ["a", "b", "c"]
    assert spread(questions, 100) == questions


def test_a_chart_names_its_lines_and_is_well_formed() -> None:
    svg = line_chart("A & B", "load", "ms", {"off": [(1, 2.0), (2, 3.0)], "<new>": [(1, 0.0), (2, 1.0)]})
    assert svg is not None
    texts = [each.text for each in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert {"A & B", "off", "<new>", "load", "ms"} <= set(texts)
