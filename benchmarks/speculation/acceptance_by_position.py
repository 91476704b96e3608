"""Acceptance of the first, second, … drafted token, by drafter and kind of question, with pictures.

    python -m benchmarks speculation.acceptance_by_position QUESTIONS.jsonl OUT.json
        [--drafter NAME='{"method": …}' ...]
        [--model MODEL] [--count 10] [--tokens 160] [--temperature 0] [--length 6]

QUESTIONS: Spec-Bench's JSON lines. Every step asks for a draft of `length` tokens. `of_steps` counts steps without
a draft as well: it is what a step gains. `of_drafts` counts steps that verified a token at this place. Answers end
by themselves. OUT-KIND.svg shows of_steps.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.prompts import load_prompts
from benchmarks.runner import about, command_line, named, write_json
from benchmarks.spec_bench.chart import line_chart
from faser.cli.console import runs_bar
from faser.offline import LLM
from faser.types.answer import SpeculationSummary
from faser.types.sampling import SamplingParams

KINDS = {
    "chat": ("writing", "roleplay", "reasoning", "math", "extraction", "stem", "humanities", "qa"),
    "code": ("coding",),
    "summaries": ("summarization",),
}
_AT_ONCE = 8


def main() -> None:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("questions", type=Path)
    add("out", type=Path)
    add("--drafter", type=named, action="append", default=[], metavar="NAME=JSON")
    add("--model", help="[the default model]")
    add("--count", type=int, default=10, help="questions of a kind [10]")
    add("--tokens", type=int, default=160, help="of an answer, at most [160]")
    add("--temperature", type=float, default=0.0)
    add("--length", type=int, default=6, help="of a draft [6]")
    options = parser.parse_args()
    drafters = {name: json.loads(config) for name, config in options.drafter} or _DRAFTERS
    found: dict[str, dict[str, dict[str, Any]]] = {kind: {} for kind in KINDS}
    with runs_bar() as bar:
        task = bar.add_task("", total=len(drafters) * len(KINDS))
        for name, speculation in drafters.items():
            drafting = speculation | {"policy": "fixed", "num_speculative_tokens": options.length}
            with LLM(
                options.model,
                speculative_config=drafting,
                per_request_spec_decode_metrics="detailed",
                max_num_seqs=_AT_ONCE,
            ) as llm:
                for kind, categories in KINDS.items():
                    texts = [each.text for each in load_prompts(options.questions, categories)][: options.count]
                    answers = llm.chat(
                        [[{"role": "user", "content": text}] for text in texts],
                        SamplingParams(temperature=options.temperature, max_tokens=options.tokens, seed=1),
                    )
                    said = [each.outputs[0].speculation for each in answers]
                    found[kind][name] = shares([each for each in said if each is not None], options.length)
                    bar.advance(task)
    asked = {name: getattr(options, name) for name in ("model", "count", "tokens", "temperature", "length")}
    write_json(options.out, about("speculation.acceptance_by_position") | asked | {"kinds": found})
    for kind, rows in found.items():
        title = f"Steps whose draft was right up to a token: {kind}, temperature {options.temperature:g}"
        lines = {name: list(enumerate(row["of_steps"], start=1)) for name, row in rows.items()}
        drawn = line_chart(title, "token of the draft", "share of steps", lines)
        if drawn is not None:
            options.out.with_name(f"{options.out.stem}-{kind}.svg").write_text(drawn)
    print(json.dumps(found, indent=1))


def shares(answers: Sequence[SpeculationSummary], length: int) -> dict[str, Any]:
    """Return by position the share of accepted drafts: of all steps and of the drafts that had a token there."""
    steps = sum(each.steps for each in answers)
    drafts = [draft for each in answers for draft in each.per_step]
    accepted = [sum(right > at for _, right in drafts) for at in range(length)]
    verified = [sum(long > at for long, _ in drafts) for at in range(length)]
    return {
        "steps": steps,
        "tokens_per_step": round(1 + sum(accepted) / max(steps, 1), 3),
        "of_steps": [round(each / max(steps, 1), 4) for each in accepted],
        "of_drafts": [round(each / max(of, 1), 4) for each, of in zip(accepted, verified, strict=True)],
    }


_DRAFTERS: dict[str, dict[str, Any]] = {"look-up": {"method": "ngram"}, "n-gram model": {"method": "ngram_model"}}
