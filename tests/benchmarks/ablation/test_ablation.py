"""The whole program over tiny models: every arm drafts as it should, and all of them say the same."""

import json
from pathlib import Path

import pytest

from benchmarks.ablation.__main__ import main
from benchmarks.ablation.drive import ARMS
from tests.engine.losslessness.equality import write_pair

QUESTION = '{{"question_id": {0}, "category": "any", "turns": ["What is the capital {0}?"]}}'


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    base = tmp_path_factory.mktemp("ablation")
    target, drafter = write_pair(base / "target", base / "drafter")
    stamps = [f"2023-11-16 18:{15 + i // 60}:{i % 60:02}.6805900,{300 + i},{5 + 7 * i % 40}" for i in range(600)]
    trace, prompts = base / "azure.csv", base / "question.jsonl"
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *stamps]))
    prompts.write_text("\n".join(QUESTION.format(i) for i in range(20)))
    given = {"model": target, "drafter": drafter, "trace": trace, "prompts": prompts}
    paths = [text for name, path in given.items() for text in (f"--{name}", str(path))]
    return [*paths, "--seconds", "0.4", "--repeats", "2", "--warm-seconds", "0.1", "--max-tokens", "16"]


def test_every_arm_serves_the_trace_and_all_answers_are_equal(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = ["--load", "0.5", "--at-a-time", "4", "--dtype", "float32", "--capacity", "300"]
    assert main([str(tmp_path / "out"), *arguments, *wanted]) == 0
    found = json.loads((tmp_path / "out" / "ablation.json").read_text())
    assert [row["arm"] for row in found["rows"]] == [arm.name for arm in ARMS]
    off, fixed = found["rows"][0], found["rows"][1]
    assert off["gamma"] == 0
    assert 0 < fixed["gamma"] <= 3
    assert fixed["accepted_share"] > 0
    assert all(row["tokens_per_s"]["median"] > 0 and row["different"] == 0 for row in found["rows"])
    assert str(tmp_path.parent) not in json.dumps(found), "a result names no folder of its machine"
    assert "## Load 0.5 of capacity" in capsys.readouterr().out


@pytest.mark.full
def test_without_a_drafter_drafts_from_text_are_held_against_none(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = arguments.index("--drafter")
    wanted = ["--load", "0.5,0.8", "--at-a-time", "4", "--dtype", "float32", "--capacity", "300"]
    assert main([str(tmp_path / "out"), *arguments[:at], *arguments[at + 2 :], *wanted]) == 0
    found = json.loads((tmp_path / "out" / "ablation.json").read_text())
    assert [(row["load"], row["arm"]) for row in found["rows"]] == [
        (load, arm) for load in (0.5, 0.8) for arm in ("off", "default")
    ]
    off, default = found["rows"][:2]
    assert off["against_base"] == {}
    assert default["against_base"]["mean TPOT"]["rounds"] == 2
    assert default["different"] == 0
    assert "Against off" in capsys.readouterr().out


def test_an_arm_that_there_is_not_ends_the_program_at_once(arguments: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"--arms names 'all'"):
        main([str(tmp_path / "out"), *arguments, "--arms", "all"])
    assert not (tmp_path / "out").exists()
