"""Acceptance of drafts in the second turn of a chat, with its first turn cached and without.

    python -m benchmarks speculation.drafts_after_hits QUESTIONS.jsonl OUT.json --drafter NAME='{"method": …}' ...
        [--model MODEL] [--count 30] [--tokens 96] [--temperature 0] [--length 3]

QUESTIONS: Spec-Bench's JSON lines, of which those with two turns are asked. `cold` computes the second turn's
whole prompt, `cached` only what follows the cached blocks. Both answer the same prompts, so answers are equal.
`first`: share of drafts whose first token was accepted; `tokens`: a step.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.runner import about, command_line, named, write_json
from faser.cli.console import runs_bar
from faser.offline import LLM
from faser.outputs import RequestOutput
from faser.types.sampling import SamplingParams

_AT_ONCE = 4


def main() -> None:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("questions", type=Path)
    add("out", type=Path)
    add("--drafter", type=named, action="append", required=True, metavar="NAME=JSON")
    add("--model", help="[the default model]")
    add("--count", type=int, default=30, help="questions with two turns [30]")
    add("--tokens", type=int, default=96, help="of an answer, at most [96]")
    add("--temperature", type=float, default=0.0)
    add("--length", type=int, default=3, help="of a draft [3]")
    options = parser.parse_args()
    lines = [json.loads(line)["turns"] for line in options.questions.read_text().splitlines()]
    turns = [each for each in lines if len(each) > 1][: options.count]
    sampling = SamplingParams(temperature=options.temperature, max_tokens=options.tokens, seed=1)
    found: dict[str, dict[str, Any]] = {}
    with runs_bar() as bar:
        task = bar.add_task("", total=2 * len(options.drafter))
        for name, config in options.drafter:
            speculation = json.loads(config) | {"policy": "fixed", "num_speculative_tokens": options.length}
            texts = {}
            for arm, caches in (("cold", False), ("cached", True)):
                with LLM(
                    options.model,
                    speculative_config=speculation,
                    per_request_spec_decode_metrics="detailed",
                    enable_prefix_caching=caches,
                    max_num_seqs=_AT_ONCE,
                ) as llm:
                    chats = [[{"role": "user", "content": each[0]}] for each in turns]
                    said = llm.chat(chats, sampling)
                    for chat, answer, each in zip(chats, said, turns, strict=True):
                        chat += [
                            {"role": "assistant", "content": answer.outputs[0].text},
                            {"role": "user", "content": each[1]},
                        ]
                    second = llm.chat(chats, sampling)
                texts[arm] = [each.outputs[0].text for each in second]
                found.setdefault(name, {})[arm] = shares(second)
                bar.advance(task)
            found[name]["equal_answers"] = texts["cold"] == texts["cached"]
    asked = {name: getattr(options, name) for name in ("model", "count", "tokens", "temperature", "length")}
    write_json(options.out, about("speculation.drafts_after_hits") | asked | {"second_turn": found})
    print(json.dumps(found, indent=1))


def shares(answers: list[RequestOutput]) -> dict[str, Any]:
    """Accepted drafts and tokens a step of these answers."""
    said = [each.outputs[0].speculation for each in answers]
    steps = sum([each.steps for each in said if each is not None])
    drafts = [right for each in said if each is not None for _, right in each.per_step]
    return {
        "steps": steps,
        "first": round(sum([right > 0 for right in drafts]) / max(len(drafts), 1), 4),
        "tokens": round(1 + sum(drafts) / max(steps, 1), 3),
        "cached_tokens": sum([each.num_cached_tokens for each in answers]),
    }
