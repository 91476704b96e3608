"""`faser bench spec`: what it refuses before a model is loaded, and a whole run on a real engine."""

import json
import re
from pathlib import Path

import pytest

from faser.cli.bench.command import given_acceptance, own_parser
from faser.cli.bench.drafters import GivenAcceptance
from faser.cli.main import main


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--concurrency", "0"], "faser bench: --concurrency is 0; it must be numbers of at least 1, like 1,2,4"),
        (["--concurrency", "x"], "faser bench: --concurrency is x; it must be numbers of at least 1, like 1,2,4"),
        (["--concurrency", "4,x"], "faser bench: --concurrency is x; it must be numbers of at least 1"),
        (["--concurrency", ","], "faser bench: --concurrency is ','; it must be numbers of at least 1"),
        (["--concurrency", "5000"], "faser bench: --concurrency is 5000; it must be at least 1 and at most 4096"),
        (["--rounds", "1.5"], "faser bench: --rounds is 1.5; it must be a whole number of at least 1"),
        (
            ["--temperature", "3"],
            "faser bench: --temperature is 3; it must be a number of at least 0 and at most 2",
        ),
        (["--temperature", ","], "faser bench: --temperature is ','; it must be numbers from 0 to 2, like 0,0.8"),
        (
            ["--acceptance", "0.4,0.8"],
            "--acceptance is 0.4,0.8; it must be 1 to 32 numbers from 0 to 1 that never rise",
        ),
        (["--acceptance", "high"], "--acceptance is high; it must be 1 to 32 numbers from 0 to 1"),
        (["--draft-ms", "5"], "--draft-ms is 5; it is of a drafter of --acceptance, and there is none"),
        (["--acceptance", "1", "--draft-ms", "-1"], "--draft-ms is -1; it must be a number of milliseconds"),
        (["--drafters", "n-grams"], "--drafters names 'n-grams'; it must be among off, default, ngram_model,"),
        (["--drafters", "off"], "--drafters is 'off'; it must name a drafter besides off"),
        (["--output", "found.txt"], "--output is found.txt; it must be a file that ends in .json"),
        (["--plot", "found.png"], "--plot is found.png; it must be a file that ends in .svg"),
        (["--output", "/no/such/found.json"], "--output is /no/such/found.json; there is no folder /no/such"),
        (["--temperature", "hot"], "faser bench: --temperature is hot; it must be a number of at least 0"),
        (["--policies", "fixed:99"], "fixed:N needs an N of 1 … 16"),
        (["--policies", "table:4=5"], "names 'table:4=5'; table takes no number"),
        (["--policies", "table"], "names 'table'; it needs 'num_speculative_tokens_per_batch_size'"),
        (["--policies", "fast"], "names 'fast'; it must be one of fixed, table,"),
        (["--policies", "off"], "names 'off'; it must be one of fixed, table,"),
        (["--dtype", "int8"], "faser bench: --dtype is int8; it must be one of auto, bfloat16"),
        (
            ["--speculative-policy", "off"],
            "the policy of default is off; then it has no drafts to measure, so leave that out",
        ),
        (
            ["--prompts", "/no/such/file"],
            "--prompts is /no/such/file; it cannot be read: No such file or directory",
        ),
        (["--speculative-config", "[1]"], "it must be a JSON object"),
        (["--speculative-config", "{"], "it must be a JSON object"),
        (["--out", "report"], "--out: unknown flag."),
    ],
)
def test_a_wrong_command_line_is_refused_before_a_model_is_loaded(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "spec", "/no/such/model", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["serve", "latency", "throughput", "sweep"])
def test_a_measurement_of_vllms_is_refused_by_name(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", kind]) == 2
    assert f"'bench {kind}' is known from vLLM but not supported" in capsys.readouterr().err


def test_an_unknown_measurement_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "spek"]) == 2
    assert "unknown measurement 'spek'. Did you mean 'spec'?" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["bench", "--help"], ["bench", "spec", "--help"]])
def test_help_is_printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("usage: faser bench")


def test_a_given_acceptance_has_its_time_in_seconds() -> None:
    given = given_acceptance(own_parser().parse_args(["--acceptance", "0.8,0.4", "--draft-ms", "20"]))
    assert given == GivenAcceptance(rates=(0.8, 0.4), draft_s=0.02)
    assert given_acceptance(own_parser().parse_args([])) is None


SMALL = ["--backend", "torch", "--dtype", "float32", "--num-threads", "1", "--max-model-len", "64"]


def test_a_real_engine_answers_the_same_with_and_without_drafts(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], full: bool
) -> None:
    """A run takes three seconds; with --full samples are drawn too."""
    temperatures = [0.0, 0.8] if full else [0.0]
    prompts, out = tmp_path / "two words.txt", tmp_path / "found.json"
    prompts.write_text("the cat the cat the cat\n")
    flags = ["--prompts", str(prompts), "--concurrency", "2", "--rounds", "1"]
    flags += ["--temperature", ",".join(map(str, temperatures))]
    flags += ["--output-tokens", "4", "--ignore-eos", "--policies", "fixed:2"]
    flags += ["--acceptance", "1,0.5", "--draft-ms", "0.1"]
    flags += ["--speculative-config", json.dumps({"method": "draft_model", "model": str(tiny_checkpoint)})]
    flags += ["--drafters", f"default,given,{tiny_checkpoint.name}", "--output", str(out)]
    assert main(["bench", "spec", str(tiny_checkpoint), *flags, *SMALL]) == 0
    said = capsys.readouterr().out
    assert len(re.findall(rf"^(off|default|given|{tiny_checkpoint.name}) ", said, re.M)) == 4 * len(temperatures)
    assert "answers are token for token those without drafts." in said
    found = json.loads(out.read_text("utf-8"))
    assert [(each["temperature"], each["concurrency"]) for each in found["loads"]] == [
        (each, 2) for each in temperatures
    ]
    assert all(len({each["answers_hash"] for each in load["drafters"]}) == 1 for load in found["loads"])
    by_name = {each["drafter"]: each for each in found["loads"][0]["drafters"]}
    assert by_name["given"]["tokens_per_step"] > 1
    assert by_name[tiny_checkpoint.name]["accepted_share"] == 1  # it drafts for itself
    assert "given" in (tmp_path / "found.svg").read_text("utf-8")
