"""Steps of a mixture of experts: what verifying drafts takes, and how well the policy's price foresees it.

    python -m benchmarks speculation.mixture_steps MODEL OUT.json --prompts question.jsonl
        [--sequences 1,4,16] [--lengths 1,3,7] [--tokens 96]

Answers real prompts with drafts from text of one fixed length after the other, in turns with none. Every step
without prompts counts: experts that it has read, its time, and what the cost model said beforehand. Times are
medians by rows and draft rows; "within" is the share of steps that were foreseen within a tenth.
"""

import statistics
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.engines import closed_loop, opened
from benchmarks.prompts import load_prompts, take
from benchmarks.runner import about, command_line, numbers, write_json
from faser.config.engine import EngineConfig
from faser.engine.contract.step_times import Role
from faser.engine.control.step_cost import CostModel, VerificationCost
from faser.engine.text.tokenizer import load_tokenizer
from faser.types import Request, SamplingParams

_FIRST_STEPS = 20  # of each setting, from which the price is still learning
_FEWEST = 3  # steps of a kind that are worth a median


class WatchedCosts:
    """Keeps (rows, drafts, predicted, measured, experts) of every step that the cost model learns from."""

    def __init__(self, costs: CostModel) -> None:
        self.steps: list[tuple[int, int, float, float, int]] = []
        self._costs, self._observe = costs, costs.observe_verification
        watched: Any = costs
        watched.observe_verification = self._watch

    def _watch(self, verification: VerificationCost, measured_s: float, *, experts: int = 0) -> None:
        predicted_s = self._costs.seconds(verification)
        self.steps.append((verification.rows, verification.draft_rows, predicted_s, measured_s, experts))
        self._observe(verification, measured_s, experts=experts)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompts", type=Path, required=True, help="question.jsonl of Spec-Bench")
    parser.add_argument("--sequences", type=numbers, default=[1, 4, 16], help="[1,4,16]")
    parser.add_argument("--lengths", type=numbers, default=[1, 3, 7], help="of drafts [1,3,7]")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer [96]")
    options = parser.parse_args()
    config = EngineConfig(model=options.model, max_num_seqs=max(options.sequences), max_model_len=2048)
    built = opened(config)
    assert built.costs is not None, "default flags speculate"
    watched, engine = WatchedCosts(built.costs), built.engine
    tokenizer = load_tokenizer(Path(options.model))
    prompts = load_prompts(options.prompts)
    cells, asked = [], 0
    for count in options.sequences:
        for length in (0, *options.lengths):
            engine.use_policy("fixed" if length else "off", length or None)
            watched.steps.clear()
            requests = [
                Request(
                    request_id=str(asked + number),
                    prompt_token_ids=tuple(tokenizer.encode(prompt.text)[:256]),
                    sampling=SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True),
                    cache_salt=str(asked + number),
                )
                for number, prompt in enumerate(take(prompts, asked, max(count, 2)))
            ]
            asked += len(requests)
            for _ in closed_loop(engine, requests, count):
                pass
            cells.append({"sequences": count, "draft_tokens": length, **_summary(watched.steps)})
            print(cells[-1], flush=True)
    table = asdict(built.costs.tables[Role.STEP])
    write_json(options.out, {**about("speculation.mixture_steps"), "table": table, "cells": cells})


def _summary(steps: list[tuple[int, int, float, float, int]]) -> dict[str, Any]:
    """Summarize the steps after the first ones, and by kind of step."""
    counted = steps[min(_FIRST_STEPS, len(steps) // 2) :]
    kinds = defaultdict(list)
    for rows, drafts, predicted_s, measured_s, experts in counted:
        kinds[rows - drafts, drafts].append((predicted_s, measured_s, experts))
    return {
        "steps": len(counted),
        "within": round(statistics.mean(abs(p - m) <= 0.1 * m for _, _, p, m, _ in counted), 3),
        "predicted_over_measured": round(statistics.median(p / m for _, _, p, m, _ in counted), 3),
        "kinds": [
            {
                "rows": rows,
                "drafts": drafts,
                "steps": len(found),
                "ms": round(1e3 * statistics.median(m for _, m, _ in found), 2),
                "predicted_ms": round(1e3 * statistics.median(p for p, _, _ in found), 2),
                "experts": round(statistics.mean(experts for _, _, experts in found), 1),
            }
            for (rows, drafts), found in sorted(kinds.items())
            if len(found) >= _FEWEST
        ],
    }
