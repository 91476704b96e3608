"""What people type by habit, from vLLM, llama.cpp and Ollama, and what FASER says or does.

Each line is a command line as it stands in scripts and tutorials. Honoured: the settings that follow. Ignored:
accepted, with a warning that says why. Refused: the words of the message that lead on.
"""

import shlex
from typing import Any

import pytest

from faser.cli.main import main
from faser.config.declaration import did_you_mean
from faser.config.sources import SETTINGS, UsageError, parse, server_settings

HONOURED: list[tuple[str, dict[str, Any]]] = [
    # vLLM
    ("Qwen/Qwen3-0.6B --dtype bfloat16", {"model": "Qwen/Qwen3-0.6B", "dtype": "bfloat16"}),
    ("--model m --max-model-len 8k --max-num-seqs 32", {"model": "m", "max_model_len": 8000, "max_num_seqs": 32}),
    ("--host 0.0.0.0 --port 8001", {"host": "0.0.0.0", "port": 8001}),
    ("--served-model-name a b", {"served_model_name": ("a", "b")}),
    ("--api-key k", {"api_key": ("k",)}),
    ("-tp 1 -pp 1 -dp 1", {"tensor_parallel_size": 1, "data_parallel_size": 1}),
    ("-q awq", {"quantization": "awq"}),
    ("--quantization gptq_marlin", {"quantization": "gptq"}),
    ("--quantization compressed-tensors", {"quantization": "compressed-tensors"}),
    ("--quantization gguf", {"quantization": "gguf"}),
    ("--max-num-batched-tokens 4096", {"max_num_batched_tokens": 4096}),
    ("--enable-prefix-caching", {"enable_prefix_caching": True}),
    ("--no-enable-prefix-caching", {"enable_prefix_caching": False}),
    ("--seed 0", {"seed": 0}),
    ("--load-format auto --tokenizer-mode auto --task generate", {"model": None}),
    ("--enable-auto-tool-choice --tool-call-parser hermes", {"tool_call_parser": "hermes"}),
    ("--speculative-config.method ngram", {}),
    ("--root-path /v", {"root_path": "/v"}),
    # llama.cpp
    ("-m model.gguf -c 4096", {"model": "model.gguf", "max_model_len": 4096}),
    ("-m model.gguf --ctx-size 0", {"max_model_len": None}),
    ("-hf owner/name:Q4_K_M", {"model": "owner/name:Q4_K_M"}),
    ("--hf-repo owner/name", {"model": "owner/name"}),
    ("--parallel 4", {"max_num_seqs": 4}),
    ("-np 4 -t 8", {"max_num_seqs": 4, "num_threads": 8}),
    ("--threads 2", {"num_threads": 2}),
    ("-b 512", {"max_num_batched_tokens": 512}),
    ("-a name", {"served_model_name": ("name",)}),
    ("--no-webui", {"page": False}),
    ("--jinja --metrics -cb --slots", {"page": True}),
]
IGNORED = {
    # vLLM
    "--trust-remote-code": "no code of a checkpoint is ever run",
    "--swap-space 4": "preempted sequences are computed again",
    "-O3": "torch compiles nothing here",
    "--compilation-config '{\"level\": 3}'": "torch compiles nothing here",
    "--disable-log-requests": "prompts are not logged",
    "--enable-chunked-prefill": "long prompts are always prefilled in chunks",
    "--chat-template-content-format string": "in the form that they expect",
    # llama.cpp
    "-ngl 99": "the whole model is on the device that --device chooses",
    "--n-gpu-layers 99": "the whole model is on the device that --device chooses",
    "-fa": "the attention kernel follows from --backend",
    "--mlock": "not swapped",
    "--no-mmap": "packed for this processor",
    "-ub 512": "--batch-size bounds a step",
    "-v": "--log-level debug",
}
REFUSED = {
    # vLLM
    "--pipeline-parallel-size 2": "a model runs on one device",
    "--enable-lora-bias": "adapters with biases are not served",
    "--quantization bitsandbytes": "it is not supported; use a checkpoint in 16 bits, AWQ, GPTQ",
    "--max-model-length 4096": "Did you mean '--max-model-len'?",
    "--speculative-model m": '--speculative-config \'{"model": "m"}\'',
    # llama.cpp
    "--temp 0.7": "--override-generation-config '{\"temperature\": 0.7}'",
    "-n 256": "--override-generation-config '{\"max_tokens\": 256}'",
    "--top-k 40": "--override-generation-config '{\"top_k\": 40}'",
    "-md draft.gguf": '--speculative-config \'{"model": "draft.gguf"}\'',
    "--draft-max 16": "--speculative-config '{\"num_speculative_tokens\": 16}'",
    "--lora adapter.gguf": "use --lora-modules NAME=adapter.gguf",
    "--mmproj file": "models read and write text only",
    "--pooling mean": "the checkpoint says how embeddings are made",
    "-ctk q8_0": "--kv-cache-dtype",
    "--grammar-file g": "structured_outputs",
    "-np 0": "--max-num-seqs is 0; it must be at least 1",
    # mistakes
    "--prot 80": "Did you mean '--port'?",
    "--max-seqs 8": "Did you mean '--max-num-seqs'?",
    "--gpu-memory 0.9": "Did you mean '--gpu-memory-utilization'?",
}
COMMANDS = {
    "run llama3": "faser chat --in-process MODEL",
    "list": "faser models",
    "ps": "/v1/models",
    "show llama3": "faser models MODEL",
    "llama-server": "faser serve",
    "complete": "faser chat",
    "serv": "Did you mean 'serve'?",
}


def typed(line: str) -> tuple[dict[str, Any], list[str]]:
    """The settings of `faser serve` with this line, and the warnings."""
    findings = parse("faser serve", shlex.split(line), SETTINGS)
    engine, server = server_settings(findings)
    values = {each.name: getattr(config, each.name) for config in (engine, server) for each in SETTINGS
              if hasattr(config, each.name)}  # fmt: skip
    return values, findings.warnings


@pytest.mark.parametrize(("line", "expected"), HONOURED, ids=[line for line, _ in HONOURED])
def test_a_flag_that_faser_has_is_honoured_by_its_other_names(line: str, expected: dict[str, Any]) -> None:
    values, warnings = typed(line)
    assert {name: values[name] for name in expected} == expected
    assert warnings == []


@pytest.mark.parametrize("line", IGNORED)
def test_a_flag_that_can_only_change_speed_is_ignored_with_a_reason(line: str) -> None:
    values, warnings = typed(line)
    assert values == typed("")[0]
    assert len(warnings) == 1
    assert IGNORED[line] in "".join(warnings)


@pytest.mark.parametrize("line", REFUSED)
def test_a_flag_that_faser_cannot_honour_is_refused_with_a_way_on(line: str) -> None:
    with pytest.raises(UsageError) as caught:
        typed(line)
    (problem,) = caught.value.problems
    assert REFUSED[line] in problem


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_another_program_leads_to_ours(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(line)) == 2
    assert COMMANDS[line] in capsys.readouterr().err


@pytest.mark.parametrize(
    "word", ["--gpu", "--debug", "--tp-size", "--fast", "--workers", "--draft-model", "--context-length"]
)
def test_an_unknown_flag_is_not_taken_for_another_one(word: str) -> None:
    known = [flag for each in SETTINGS for flag in (each.flag, *each.aliases)]
    assert did_you_mean(word, known) == ""


def test_a_short_flag_is_not_an_abbreviation() -> None:
    """argparse takes -dc for -dcp where no other flag begins so."""
    with pytest.raises(UsageError, match="-dc: unknown flag"):
        typed("-dc 1")
