"""`faser distill` with a tiny model, as a user runs it; what is refused before a model is loaded."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from faser.cli.distill import read_arguments
from faser.cli.main import main
from faser.distill.dataset import Dataset

FLAGS = ("--backend", "torch", "--num-threads", "1", "--max-num-seqs", "32", "--max-model-len", "64")


@pytest.fixture(autouse=True)
def denormals() -> Iterator[None]:
    """`faser distill` flushes them in its process, which other tests run in too."""
    yield
    torch.set_flush_denormal(False)


@pytest.mark.slow
def test_questions_of_a_file_are_answered_and_kept(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the fox\nthe dog\nthe wizards\n")
    command = ["distill", str(tiny_checkpoint), "-o", str(tmp_path / "out"), "--prompts", str(prompts)]

    command += ["--only-conversations", *FLAGS, "--tokens", "100"]

    assert main(command) == 0

    assert "00000.npz: 6 of 6 questions kept" in capsys.readouterr().err
    dataset = Dataset(tmp_path / "out" / "conversations")
    assert dataset.answer_tokens >= 100
    assert main(command) == 0
    assert "questions kept" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_head_is_made_measured_and_written(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out"
    prompts.write_text("".join(f"the fox {at}\n" for at in range(18)))
    command = [
        "distill",
        str(tiny_checkpoint),
        "-o",
        str(out),
        "--prompts",
        str(prompts),
        "--tokens",
        "1k",
        *FLAGS,
    ]
    command += ["--epochs", "1", "--draft-vocab-size", "96", "--batch-tokens", "1024", "--draft-steps", "2"]

    assert main(command) == 0

    found = capsys.readouterr()
    assert "0.0 % of the training (epoch 1): loss" in found.err
    assert (
        "| accepted on held-out answers | token 1 | token 2 | token 3 | token 4 | token 5 | tokens of a draft |"
        in found.out
    )
    assert "| temperature 0 |" in found.out
    assert "| temperature 0.8, at most |" in found.out
    assert "| expected speed-up, temperature 0 (drafted tokens) |" in found.out
    assert "The head is worth using" in found.out or "The head is not worth using" in found.out
    config = json.loads((out / "config.json").read_text())
    assert (config["speculators_model_type"], config["draft_vocab_size"]) == ("eagle3", 96)
    made = json.loads((out / "distillation.json").read_text())
    assert (made["target"], made["training"]["epochs"]) == (tiny_checkpoint.name, 1)
    before = (out / "model.safetensors").read_bytes()
    assert main(command) == 0
    assert (out / "model.safetensors").read_bytes() == before


@pytest.mark.slow
@pytest.mark.full
def test_a_block_drafter_is_made_measured_and_written(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traffic, out = tmp_path / "traffic.jsonl", tmp_path / "out"
    line = json.dumps({"prompt": "the fox", "answer": "jumps over the lazy dog while seven wizards judge"})
    traffic.write_text(f"{line}\n" * 40)
    command = ["distill", str(tiny_checkpoint), "-o", str(out), "--from-traffic", str(traffic), "--block", *FLAGS]
    command += ["--epochs", "2", "--draft-vocab-size", "96"]

    assert main(command) == 0

    found = capsys.readouterr()
    assert (
        "| accepted on held-out answers | token 1 | token 2 | token 3 | token 4 | tokens of a draft |" in found.out
    )
    assert "| expected speed-up, temperature 0.8, at most (drafted tokens) |" in found.out
    assert "The block drafter is worth using" in found.out or "The block drafter is not worth using" in found.out
    config = json.loads((out / "config.json").read_text())
    assert (config["speculators_model_type"], config["block_size"]) == ("dspark", 4)
    before = (out / "model.safetensors").read_bytes()
    assert main(command) == 0
    assert (out / "model.safetensors").read_bytes() == before
    assert main([command[0], *command[1:], "--draft-steps", "3"]) == 2
    assert "was begun with steps 4, not 3" in capsys.readouterr().err


@pytest.mark.full
def test_another_vocabulary_than_that_of_the_training_is_refused(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traffic, out = tmp_path / "traffic.jsonl", tmp_path / "out"
    line = json.dumps({"prompt": "the fox", "answer": "jumps over the lazy dog while seven wizards judge"})
    traffic.write_text(f"{line}\n" * 40)
    command = [
        "distill",
        str(tiny_checkpoint),
        "-o",
        str(out),
        "--from-traffic",
        str(traffic),
        *FLAGS,
        "--epochs",
        "1",
    ]

    assert main([*command, "--draft-vocab-size", "32"]) == 0
    assert main([*command, "--draft-vocab-size", "64"]) == 2

    assert "was begun with draft_vocab_size 32, not 64" in capsys.readouterr().err


def test_its_own_flags_and_those_of_the_engine_are_read() -> None:
    found = read_arguments(["tiny", "-o", "out", "--tokens", "1.5m", "--seed", "7", "--max-num-seqs", "8"])
    assert found is not None
    own, config = found
    assert (own.output, own.answer_tokens, own.seed) == (Path("out"), 1_500_000, 7)
    assert (config.model, config.max_num_seqs) == ("tiny", 8)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "faser distill: -o is missing; it names the folder where everything goes"),
        (
            ["-o", "out", "--prompts", "a", "--from-traffic", "b"],
            "--prompts and --from-traffic exclude each other: both are given",
        ),
        (["-o", "out", "--tokens", "0"], "--tokens is 0; it must be a whole number of at least 1"),
        (["-o", "out", "--tokens", "many"], "--tokens is many; it must be a whole number of at least 1"),
        (["-o", "out", "--tokens", "1.5"], "--tokens is 1.5; it must be a whole number of at least 1"),
        (["-o", "out", "--hours", "0"], "--hours is 0; it must be a number of hours above 0"),
        (["-o", "out", "--epochs", "x"], "--epochs is x; it must be a whole number of at least 1"),
        (
            ["-o", "out", "--draft-steps", "17"],
            "--draft-steps is 17; it must be a whole number of at least 1 and at",
        ),
        (["-o", "out", "--head-dtype", "int4"], "--head-dtype: invalid choice: 'int4'"),
        (["-o", "out", "--port", "8000"], "faser distill: --port: unknown flag."),
        (["-o", "out", "--max-num-seqs", "0"], "faser distill: --max-num-seqs is 0; it must be"),
    ],
)
def test_a_wrong_command_line_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["distill", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["distill", "--help"]) == 0
    assert "usage: faser distill" in capsys.readouterr().out
