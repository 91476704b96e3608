"""Does γ follow when the text changes, and when the drafter breaks? One running batch, three phases, one plot.

    python -m benchmarks.speculation.spec_shift QUESTIONS.jsonl OUT_DIR --model BIG --drafter SMALL [--at-a-time 4]

Phase 1 answers prompts of one category, phase 2 those of another, and in phase 3 the drafter collapses in the
middle of the answers of the first category: every token it proposes is wrong. Requests follow each other without
a pause, under policy `faser`. Written: shift.json (γ and accepted tokens of every step) and shift.svg.

γ has followed at the first step from which the mean of 8 steps stays within half a token of the phase's own level,
which is the median of its last third.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines import model_directory, quiet
from benchmarks.prompts import load_prompts
from benchmarks.runner import about, command_line, write_json
from benchmarks.spec_bench.chart import Chart
from faser.config.engine import EngineConfig
from faser.engine.build import build_engine
from faser.engine.contract.drafts import NO_TOKEN
from faser.engine.contract.plan import DraftPlan, SequenceStart
from faser.engine.engine import Engine
from faser.engine.execution.drafting.drafter import Drafter, Proposals
from faser.engine.text.tokenizer import Tokenizer, load_tokenizer
from faser.types import Request, SamplingParams

WINDOW = 8
CLOSE = 0.5
WITHIN = 20


class Breakable:
    """A drafter that can be broken: from then on every proposed token is another one than the drafter meant."""

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self._drafter = drafter
        self._vocab_size = vocab_size
        self.broken = False

    @property
    def drafts_overlapped(self) -> bool:
        return self._drafter.drafts_overlapped

    def start(self, start: SequenceStart) -> None:
        self._drafter.start(start)

    def propose(self, plan: DraftPlan, until: Callable[[], bool] | None = None, /) -> Proposals:
        proposals = self._drafter.propose(plan, until)
        if not self.broken:
            return proposals
        table = proposals.table
        wrong = np.where(table.token_ids == NO_TOKEN, NO_TOKEN, (table.token_ids + 1) % self._vocab_size)
        return replace(proposals, table=table._replace(token_ids=wrong))

    def commit(self, slots: Sequence[int], counts: Sequence[int], token_ids: Sequence[int]) -> None:
        self._drafter.commit(slots, counts, token_ids)

    def release(self, slot: int) -> None:
        self._drafter.release(slot)


@dataclass(slots=True)
class Hold:
    """Keeps the engine's drafter, which it makes breakable while the engine is built."""

    vocab_size: int
    held: Breakable | None = None

    def drafter(self, drafter: Drafter) -> Drafter:
        self.held = Breakable(drafter, self.vocab_size)
        return self.held


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPoint:
    """One step. gamma, accepted: tokens per sequence."""

    at_s: float
    phase: int
    gamma: float
    accepted: float


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("questions", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", help="target (default: the embedded model)")
    parser.add_argument("--drafter", help="draft model (default: drafts from text)")
    parser.add_argument("--at-a-time", type=int, default=4)
    parser.add_argument("--steps", type=int, default=90, help="of each phase (default 90)")
    parser.add_argument("--first", default="summarization", help="category of phases 1 and 3")
    parser.add_argument("--second", default="math_reasoning", help="category of phase 2")
    options = parser.parse_args()
    points = measure(options)
    phases = [[point for point in points if point.phase == phase] for phase in (1, 2, 3)]
    result: dict[str, Any] = {
        **about("benchmarks.speculation.spec_shift"),
        "window": WINDOW,
        "phases": [summary(phase) for phase in phases],
        "points": [[point.phase, round(point.gamma, 3), round(point.accepted, 3)] for point in points],
    }
    write_json(options.out / "shift.json", result)
    (options.out / "shift.svg").write_text(picture(points), encoding="utf-8")
    print(json.dumps(result["phases"], indent=2))


def measure(options: argparse.Namespace) -> list[StepPoint]:
    directory = model_directory(options.model)
    tokenizer = load_tokenizer(directory)
    speculation = {"method": "draft_model", "model": options.drafter} if options.drafter else {}
    config = EngineConfig(model=options.model, max_model_len=2048, speculative_config=speculation)
    hold = Hold(vocab_size=40_000)
    engine, _ = build_engine(config, directory, quiet, wrap_drafter=hold.drafter)
    assert hold.held is not None
    prompts = load_prompts(options.questions)
    points: list[StepPoint] = []
    began_s = time.perf_counter()
    for phase, category in ((1, options.first), (2, options.second), (3, options.first)):
        asked = _requests(prompts, category, tokenizer, phase)
        hold.held.broken = phase == 3
        points += _phase(engine, asked, phase, options, began_s)
    return points


def _requests(prompts: Any, category: str, tokenizer: Tokenizer, phase: int) -> Iterator[Request]:
    of_category = [prompt for prompt in prompts if prompt.category == category]
    assert of_category, f"no prompt is of category {category}"
    number = 0
    while True:
        for prompt in of_category:
            number += 1
            yield Request(
                request_id=f"{phase}/{number}",
                prompt_token_ids=tuple(tokenizer.encode(prompt.text))[:400],
                sampling=SamplingParams(temperature=0.0, max_tokens=96, ignore_eos=True),
                arrival_s=time.monotonic(),
            )


def _phase(
    engine: Engine, asked: Iterator[Request], phase: int, options: argparse.Namespace, began_s: float
) -> list[StepPoint]:
    """Steps that only decode, options.steps of them. What ran when the last phase ended goes on running."""
    points: list[StepPoint] = []
    while len(points) < options.steps:
        while engine.stats().num_running + engine.stats().num_waiting < options.at_a_time:
            engine.add(next(asked))
        before = engine.stats().speculation
        deltas = engine.step()
        after = engine.stats().speculation
        assert before is not None
        assert after is not None
        if engine.stats().last_step_rows > 8 * options.at_a_time:
            continue  # a prompt is being computed
        count = max(sum(bool(delta.token_ids) for delta in deltas), 1)
        verified, accepted = (
            sum(getattr(each, name) for each in after.methods)
            - sum(getattr(each, name) for each in before.methods)
            for name in ("verified", "accepted")
        )
        at_s = time.perf_counter() - began_s
        points.append(StepPoint(at_s=at_s, phase=phase, gamma=verified / count, accepted=accepted / count))
    return points


def summary(points: list[StepPoint]) -> dict[str, Any]:
    """Return where the phase's γ settled, and after how many of its steps the running mean was there to stay."""
    gammas = [point.gamma for point in points]
    level = statistics.median(gammas[-len(gammas) // 3 :])
    means = [statistics.fmean(gammas[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(gammas))]
    away = [i for i, mean in enumerate(means[: 2 * len(means) // 3]) if abs(mean - level) > max(CLOSE, level / 3)]
    followed = away[-1] + 1 if away else 0
    return {
        "steps": len(points),
        "gamma_level": round(level, 2),
        "accepted_mean": round(statistics.fmean(point.accepted for point in points), 2),
        "steps_to_follow": followed,
        "within_20": followed <= WITHIN,
    }


def picture(points: list[StepPoint]) -> str:
    top = max(max(point.gamma for point in points), 1.0)
    chart = Chart(
        title="γ while the text changes and the drafter breaks",
        x_label="step",
        y_label="tokens per sequence",
        low=0,
        high=len(points),
        top=top,
    )
    for step in (i for i in range(1, len(points)) if points[i].phase != points[i - 1].phase):
        chart.rule((step, 0), (step, top))
    chart.line("γ verified", [(i, point.gamma) for i, point in enumerate(points)], marks=False)
    chart.line("accepted", [(i, point.accepted) for i, point in enumerate(points)], marks=False)
    return chart.svg()


if __name__ == "__main__":
    main()
