"""`faser models`: the table of families, and what is said of one model, which loads or does not."""

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import LlamaFileType

from faser.cli.main import main
from faser.cli.memory import show_memory
from faser.cli.models import ServedModel, families_text, markdown, model_line, report, show_count
from faser.engine.checkpoints.families import FAMILIES
from faser.engine.checkpoints.stored import RECIPES
from tests.checkpoints import tiny_llama_config, write_json
from tests.cli.small_server import INFO
from tests.engine.checkpoints.fp8_checkpoints import compressed_tensors
from tests.engine.checkpoints.gguf.gguf_files import write_gguf

ROOT = Path(__file__).parents[2]


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """The JSON that the command prints."""
    main(["models", *arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def test_the_page_is_up_to_date() -> None:
    """If this fails: make docs."""
    assert (ROOT / "docs" / "models.md").read_text() == markdown() + "\n"


def test_the_list_fits_a_terminal_and_has_every_family() -> None:
    lines = families_text().splitlines()
    assert max(map(len, lines)) <= 100
    for family in FAMILIES:
        (row,) = [line for line in lines if f" {family.architecture} " in line]
        assert row.split("  ")[0] == family.name


def test_the_list_as_json_says_which_families_gguf_files_have(capsys: pytest.CaptureFixture[str]) -> None:
    found = {each["architecture"]: each for each in told(capsys)}
    assert found["Qwen3ForCausalLM"]["formats"] == ["safetensors", "GGUF"]
    assert found["Gemma2ForCausalLM"]["gguf"] == ["gemma2"]
    assert found["Gemma2ForCausalLM"]["examples"] == ["google/gemma-2-2b-it", "google/gemma-2-9b-it"]


def test_a_checkpoint_that_loads(tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", str(tiny_checkpoint)]) == 0
    said = capsys.readouterr().out
    assert "architecture  Llama (LlamaForCausalLM)\n" in said
    assert "weights       float32, " in said
    assert said.endswith("\nloads         yes\n")
    found = told(capsys, str(tiny_checkpoint))
    assert (found["family"], found["max_model_len"], found["chat_template"]) == ("Llama", 2048, True)
    assert (found["loads"], found["problems"]) == (True, [])
    assert found["weight_bytes"] == (tiny_checkpoint / "model.safetensors").stat().st_size
    assert 0 < found["weight_bytes"] - 4 * found["parameters"] < 10_000  # a header, and four bytes each


def test_a_gguf_file_names_its_recipe(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tokenizer="gpt2", metadata={"general.file_type": LlamaFileType.MOSTLY_Q4_K_M.value})
    found = report(str(path))
    assert (found.family, found.weights) == ("Llama", "GGUF Q4_K_M")
    write_gguf(path, tokenizer="gpt2")  # which names none
    assert report(str(path)).weights == "GGUF F32"


def test_the_recipes_are_those_of_the_library() -> None:
    names = {each.value: each.name.removeprefix("MOSTLY_").removeprefix("ALL_") for each in LlamaFileType}
    assert {number: names[number] for number in RECIPES} == RECIPES


@pytest.mark.parametrize(
    "changes, problems",
    [
        (
            {"architectures": ["DbrxForCausalLM"], "num_experts": 128},
            ["architecture DbrxForCausalLM is not supported (num_experts: it is a mixture of experts); "],
        ),
        (
            {"architectures": ["LlavaForConditionalGeneration"], "vision_config": {"hidden_size": 1}},
            ["architecture LlavaForConditionalGeneration is not supported (vision_config: it reads images); "],
        ),
        ({"num_experts": 8}, ["config.json: num_experts is 8; mixtures of experts are not supported"]),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            ["config.json: quantization_config is 'bitsandb"],
        ),
        ({"num_hidden_layers": 3}, ["{path} lacks the tensor model.layers.2.input_layernorm.weight"]),
        (
            {"hidden_size": 128},
            ["{path}: model.embed_tokens.weight has the shape (512, 64); its config describes (512, 128)"],
        ),
    ],
)
def test_what_does_not_load_is_refused_by_name(
    changes: dict[str, Any], problems: list[str], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    for each in tiny_checkpoint.iterdir():
        (tmp_path / each.name).symlink_to(each)
    (tmp_path / "config.json").unlink()
    write_json(tmp_path / "config.json", tiny_llama_config() | changes)
    found = report(str(tmp_path))
    assert not found.loads
    assert len(found.problems) == len(problems)
    for problem, expected in zip(found.problems, problems, strict=True):
        assert problem.startswith(expected.format(path=tmp_path))


def test_a_config_alone_is_described_with_all_that_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_json(tmp_path / "config.json", tiny_llama_config() | {"architectures": ["FooForCausalLM"]})
    assert main(["models", str(tmp_path)]) == 2
    said = capsys.readouterr().out.splitlines()
    assert said[1] == "architecture  FooForCausalLM"
    assert said[2].startswith(
        "loads         no: architecture FooForCausalLM is not supported; supported are LlamaForCausalLM, "
    )
    assert said[3].strip().startswith(f"{tmp_path} has no .safetensors files and no model.gguf")


def test_a_form_in_fewer_bits_is_named(tiny_checkpoint: Path, tmp_path: Path) -> None:
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(tiny_checkpoint / name)
    for config, form in (
        (compressed_tensors(), "fp8 (compressed-tensors)"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, "int4 (awq)"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "int8 (gptq)"),
    ):
        write_json(tmp_path / "config.json", tiny_llama_config() | {"quantization_config": config})
        assert report(str(tmp_path)).weights == form


@pytest.mark.parametrize(
    "model, problem",
    [
        ("./nowhere", "'./nowhere' is neither a local path nor a hub id (owner/name or owner/name:Q4_K_M)"),
        ("some/model", "some/model is not on this machine; faser pull fetches it"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct is not on this machine; "),
    ],
)
def test_a_model_that_is_not_here_is_not_fetched(
    model: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASER_CACHE_DIR", str(tmp_path))
    (found,) = report(model).problems
    assert found.startswith(problem)


def test_a_folder_of_a_split_gguf_model_is_described_as_that_model(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tokenizer="gpt2", tensors_a_part=8)
    write_json(tmp_path / "config.json", tiny_llama_config())
    found = report(str(tmp_path))
    assert (found.path, found.problems) == (str(tmp_path / "m-00001-of-00003.gguf"), ())
    assert found.weight_bytes == sum(each.stat().st_size for each in tmp_path.glob("*.gguf"))


def test_flags_that_do_not_go_together_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--revision", "main"]) == 2
    assert main(["models", "x", "--markdown"]) == 2
    assert capsys.readouterr().err == (
        "faser models: --revision goes with MODEL\nfaser models: --markdown goes without MODEL\n"
    )


def test_a_server_tells_what_it_serves_and_what_its_cache_holds(tiny_checkpoint: Path) -> None:
    said = model_line(ServedModel.of(tiny_checkpoint), INFO)  # 4 blocks of 16 tokens
    assert said.startswith("Llama (LlamaForCausalLM) · 1 parameters · float32, ")
    assert said.endswith(" on disk, 1B in memory · KV cache: 64 tokens (8 x the 8-token context)")


@pytest.mark.parametrize(
    "number, shown", [(7, "7"), (1_500, "1.5K"), (134_515_008, "134.5M"), (8_000_000_000, "8B")]
)
def test_large_numbers_are_rounded(number: int, shown: str) -> None:
    assert show_count(number) == shown


def test_memory_is_estimated_for_each_size_of_gpu(
    tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", str(tiny_checkpoint), "--memory"]) == 0
    said = capsys.readouterr().out
    rows = [line.split()[0] for line in said.splitlines() if line.strip()]
    assert [each for each in rows if each.endswith("GB")] == ["24GB", "48GB", "80GB", "141GB"]
    assert "the model's context is 2,048 tokens" in said
    assert main(["models", str(tiny_checkpoint), "--memory=1.5GiB,48GB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["total_bytes"] for each in found.values()] == [3 << 29, 46068 << 20]
    assert found["1.5GiB"]["longest_context"] < found["48GB"]["longest_context"] == 2048
    assert found["48GB"]["sequences"] == 0  # of 8192 tokens, which the model does not have


@pytest.mark.parametrize("size", ["", "4x", "0", "-1GiB", "24GB,"])
def test_a_text_that_is_no_size_is_refused(
    tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str], size: str
) -> None:
    assert main(["models", str(tiny_checkpoint), f"--memory={size}"]) == 2
    assert "a size is one of 24GB, 48GB, 80GB, 141GB, or a number such as 40GiB" in capsys.readouterr().err


def test_memory_of_a_model_that_is_not_here_takes_its_config_alone(
    tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    asked: list[tuple[str, str | None, tuple[str, ...]]] = []

    class Hub:
        def snapshot(self, model: str, revision: str | None, patterns: tuple[str, ...], _progress: Any) -> Path:
            asked.append((model, revision, patterns))
            return tiny_checkpoint

    hub: Any = Hub()
    assert show_memory("someone/model", "main", "24GB", as_json=False, downloads=hub) == 0
    assert asked == [("someone/model", "main", ("config.json",))]
    assert "someone/model on one GPU" in capsys.readouterr().out
    assert show_memory("someone/model:Q4_K_M", None, "24GB", as_json=False, downloads=hub) == 2
    assert "faser pull fetches it" in capsys.readouterr().err
    assert show_memory(str(tmp_path / "nothing"), None, "24GB", as_json=False, downloads=hub) == 2
    assert len(asked) == 1


def test_memory_goes_with_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--memory"]) == 2
    assert "--memory goes with MODEL" in capsys.readouterr().err
