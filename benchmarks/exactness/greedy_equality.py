"""Compares FASER's greedy float32 tokens with transformers', prompt by prompt, on a file of real prompts.

    python -m benchmarks exactness.greedy_equality QUESTIONS.jsonl OUT.json [--tokens 128] [--model DIR]

Sixteen prompts run at once, chunked by a small token budget, with prefix caching. Oracle: one transformers
forward over prompt and answer; where each answered token is the arg-max before it, greedy decoding gives
that answer. A token that is not is reported with the gap between the oracle's two best logits there.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from benchmarks.engines import model_directory
from benchmarks.prompts import load_prompts
from benchmarks.runner import about, command_line, write_json
from faser import LLM, SamplingParams
from faser.engine.execution.models.loader import open_source
from faser.outputs import RequestOutput

CONCURRENCY, CHUNK = 16, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first answered token that the oracle would not choose. gap: its logit below the best, there."""

    question_id: int
    position: int
    gap: float


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("questions", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of every answer (default 128)")
    parser.add_argument("--model", help="model directory (default: the embedded model)")
    options = parser.parse_args()
    directory = model_directory(options.model)
    prompts = load_prompts(options.questions)
    began_s = time.perf_counter()
    generations = answer(directory, [prompt.text for prompt in prompts], options.tokens)
    answered_s = time.perf_counter() - began_s
    oracle = load_oracle(directory)
    found = [
        divergence(prompt.question_id, generation, oracle)
        for prompt, generation in zip(track(prompts, "comparing with transformers"), generations, strict=True)
    ]
    diverged = [each for each in found if each is not None]
    result: dict[str, Any] = {
        **about("exactness.greedy_equality"),
        "dtype": "float32",
        "concurrency": CONCURRENCY,
        "max_num_batched_tokens": CHUNK,
        "prefix_caching": True,
        "prompts": len(prompts),
        "tokens": sum(len(each.outputs[0].token_ids) for each in generations),
        "prompts_equal": len(prompts) - len(diverged),
        "answered_s": round(answered_s, 1),
        "diverged": [
            {"question_id": each.question_id, "position": each.position, "gap": each.gap} for each in diverged
        ],
    }
    write_json(options.out, result)
    print(f"{result['prompts_equal']} of {result['prompts']} prompts equal over {options.tokens} tokens")


def answer(directory: Path, texts: list[str], num_tokens: int) -> list[RequestOutput]:
    """Greedy answers through the chat template, all of the same length."""
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    with LLM(
        str(directory),
        dtype="float32",
        quantization="none",
        max_num_seqs=CONCURRENCY,
        max_num_batched_tokens=CHUNK,
    ) as model:
        return model.chat([[{"role": "user", "content": text}] for text in texts], sampling, use_tqdm=True)


def load_oracle(directory: Path) -> torch.nn.Module:
    """The model in transformers' arithmetic, float32; tensors of a GGUF file are dequantised."""
    from transformers import AutoConfig, AutoModelForCausalLM

    source = open_source(directory)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32)
    found = model.load_state_dict({name: source.get(name) for name in source.names()}, strict=False)
    if found.unexpected_keys or set(found.missing_keys) - {"lm_head.weight"}:
        raise ValueError(f"{directory} has other tensors than transformers' model: {found}")
    if found.missing_keys:
        model.tie_weights()
    evaluating: torch.nn.Module = model.eval()
    return evaluating


@torch.inference_mode()
def divergence(question_id: int, generation: RequestOutput, oracle: torch.nn.Module) -> Divergence | None:
    prompt, answered = generation.prompt_token_ids, torch.tensor(generation.outputs[0].token_ids)
    tokens = torch.cat((torch.tensor(prompt), answered))[None]
    logits = oracle(tokens, logits_to_keep=len(answered) + 1).logits[0, :-1]
    wrong = (logits.argmax(-1) != answered).nonzero()
    if not len(wrong):
        return None
    position = int(wrong[0])
    gap = float(logits[position].max() - logits[position, answered[position]])
    return Divergence(question_id=question_id, position=position, gap=gap)
