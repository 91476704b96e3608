"""How often one model would accept what another one drafts, token by token, on answers to real prompts.

    python -m benchmarks.draft_agreement TARGET_DIR DRAFTER_DIR [--prompts FILE] [--count 8] [--tokens 48]

The target answers by sampling at the temperature; both models then read the answer (transformers, float32 unless
--dtype says otherwise). A greedy draft is accepted with probability p(argmax q), a sampled one with Σ min(p, q), a
coupled one where both choose the same token for the same number, here averaged over evenly spread numbers.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

from benchmarks.prompts import load_prompts
from faser.cli.bench_prompts import QUESTIONS
from faser.engine.execution.sampling.distribution import fixed_point_probs
from faser.engine.execution.sampling.kernels import nearest

_SEED = 7
_WINDOWS = (0.0, 0.02, 0.05, 0.1)
_NUMBERS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Means over positions. greedy: both would choose the same token. temperature: of target and drafter.

    accepted_coupled_draft: by window, see CoupledChoice.
    """

    positions: int
    temperature: float
    greedy: float
    accepted_greedy_draft: float
    accepted_sampled_draft: float
    accepted_coupled_draft: dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("drafters", type=Path, nargs="+")
    parser.add_argument("--prompts", type=Path, help="Spec-Bench's JSON lines (default: the built-in questions)")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    texts = [each.text for each in (load_prompts(options.prompts) if options.prompts else QUESTIONS)]
    step = max(1, len(texts) // options.count)
    torch.manual_seed(_SEED)
    target = load(options.target, options.dtype)
    answers = [
        answer(target, prompt, options.tokens, options.temperature)
        for prompt in track(chat_tokens(options.target, texts[::step][: options.count]), "answering")
    ]
    target_logits = [logits_of(target, tokens, options.tokens) for tokens in answers]
    del target
    for path in options.drafters:
        drafter = load(path, options.dtype)
        found = agreement(
            torch.cat(target_logits),
            torch.cat([logits_of(drafter, tokens, options.tokens) for tokens in answers]),
            options.temperature,
        )
        print(json.dumps({"drafter": path.name} | asdict(found)))


def agreement(target_logits: Tensor, draft_logits: Tensor, temperature: float) -> Agreement:
    """Both [T, V] float32, after the same tokens."""
    target_probs, draft_probs = ((logits / temperature).softmax(-1) for logits in (target_logits, draft_logits))
    target_masses, draft_masses = (fixed_point_probs(each / temperature) for each in (target_logits, draft_logits))
    drafted = draft_logits.argmax(-1, keepdim=True)
    return Agreement(
        positions=len(target_logits),
        temperature=temperature,
        greedy=float((target_logits.argmax(-1, keepdim=True) == drafted).float().mean()),
        accepted_greedy_draft=float(target_probs.gather(-1, drafted).mean()),
        accepted_sampled_draft=float(torch.minimum(target_probs, draft_probs).sum(-1).mean()),
        accepted_coupled_draft={str(window): coupled(target_masses, draft_masses, window) for window in _WINDOWS},
    )


def coupled(target_masses: Tensor, draft_masses: Tensor, window: float) -> float:
    """Share of (position, number) pairs at which the drafted token is the target's own."""
    same = 0.0
    for step in range(_NUMBERS):
        number = torch.full((len(target_masses),), (step + 0.5) / _NUMBERS, dtype=torch.float64)
        own = nearest(target_masses, number, 0.0)
        same += float((nearest(draft_masses, number, window) == own).float().mean())
    return same / _NUMBERS


def load(directory: Path, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()


def chat_tokens(directory: Path, texts: list[str]) -> list[Tensor]:
    """[1, T] each: the question as a user's message, ready to be answered."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        for text in texts
    ]


@torch.inference_mode()
def answer(model: Any, prompt: Tensor, num_tokens: int, temperature: float) -> Tensor:
    tokens: Tensor = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=True,
        temperature=temperature,
        top_k=0,
        min_new_tokens=num_tokens,
        max_new_tokens=num_tokens,
        pad_token_id=0,
    )
    return tokens


@torch.inference_mode()
def logits_of(model: Any, tokens: Tensor, num_answered: int) -> Tensor:
    """[num_answered, V] float32: the logits that judge each answered token."""
    logits: Tensor = model(tokens, logits_to_keep=num_answered + 1).logits[0, :-1].float()
    return logits


if __name__ == "__main__":
    main()
