"""lm-eval: a task of our own whose answers it ranks by log probabilities, and one whose answers are written.

The first sends token ids to /v1/completions with `echo` and `logprobs`, the second sends chats. It counts nothing,
but saves what it sent and what came back; the tokenizer counts that.
"""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.generators.tool import OFFLINE, Command, Figures, Run, Target

_RANKED = "faser_ranked"
_WRITTEN = "faser_written"
_FACTS = (
    ("The capital of France is", ("Paris", "Rome", "Oslo", "Madrid")),
    ("The colour of the sky is", ("blue", "square", "iron", "loud")),
    ("A cat is an", ("animal", "engine", "ocean", "idea")),
    ("The opposite of hot is", ("cold", "round", "seven", "under")),
)
_QUESTIONS = ("the capital of Norway", "the colour of grass", "the opposite of big", "two plus two")


def runs() -> tuple[Run, ...]:
    return (
        Run(name="ranked answers, echo and logprobs", tool="lm_eval", distribution="lm-eval", command=_ranked),
        Run(name="written answers, chat", tool="lm_eval", distribution="lm-eval", command=_written),
    )


def _ranked(target: Target) -> Command:
    task = {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    }
    questions = [{"question": text, "choices": choices, "answer": 0} for text, choices in _FACTS]
    _write_task(target.folder, _RANKED, task, questions)
    model = f"base_url={target.url}/v1/completions,tokenizer_backend=huggingface,tokenizer={target.tokenizer}"
    options = ["--model", "local-completions", "--model_args", f"model={target.model},num_concurrent=2,{model}"]
    return _command(target, _RANKED, options)


def _written(target: Target) -> Command:
    task = {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["<|im_end|>"], "max_gen_toks": 32, "temperature": 0, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    questions = [{"question": f"What is {text}?", "answer": text} for text in _QUESTIONS]
    _write_task(target.folder, _WRITTEN, task, questions)
    model = f"base_url={target.url}/v1/chat/completions,tokenized_requests=False"
    options = ["--model", "local-chat-completions", "--apply_chat_template"]
    options += ["--model_args", f"model={target.model},num_concurrent=2,{model}"]
    return _command(target, _WRITTEN, options)


def _write_task(folder: Path, name: str, task: dict[str, Any], questions: list[dict[str, Any]]) -> None:
    """JSON is YAML, which the tool reads."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in questions), encoding="utf-8")
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **source, **task}), encoding="utf-8")


def _command(target: Target, task: str, options: Sequence[str]) -> Command:
    common = ["--tasks", task, "--include_path", str(target.folder)]
    common += ["--output_path", str(target.folder / "results"), "--log_samples"]
    return Command(
        arguments=(target.program("lm_eval", "lm_eval"), "run", *options, *common),
        environment={**OFFLINE, "HF_HOME": str(target.folder / "cache")},
        read=partial(read, target.folder / "results", target.tokenizer),
    )


def read(results: Path, tokenizer_folder: Path) -> Figures:
    """Figures from the samples of one task."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    (path,) = results.rglob("samples_*.jsonl")
    samples = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    sent = [(given["arg_0"], given["arg_1"]) for each in samples for given in each["arguments"].values()]
    in_chat = isinstance(sent[0][0], list)
    if in_chat:
        prompts = [json.loads(prompt[0])[-1]["content"] for prompt, _ in sent]
        outputs = sum(len(tokenizer.encode(text)) for text in _texts(samples))
    else:
        prompts = [prompt + continuation for prompt, continuation in sent]
        outputs = len(sent)  # the API makes one token, which lm-eval leaves out
    return Figures(
        completed=len(sent),
        own_input_tokens=sum(len(tokenizer.encode(prompt)) for prompt in prompts),
        own_output_tokens=outputs,
        in_chat=in_chat,
    )


def _texts(samples: list[dict[str, Any]]) -> Iterator[str]:
    for each in samples:
        for answers in each["resps"]:
            yield from answers
