"""What drafts of a 4-bit copy bring by what a pass of it costs: real acceptance, counted time.

    python -m benchmarks.self_quantized MODEL QUESTIONS.jsonl OUT.json [--passes 0.35 0.5] [--count 12]

Requests are answered one at a time under the default policy, with drafts from text, from a copy and from both.
Drafts, acceptance and decisions are those of the engine. Time is counted, so that other work on the machine does
not matter: a step of r rows takes 1 + SLOPE (r - 1), a pass of the copy a share of a step. gain: tokens in the
time that a step of one row takes. Reading prompts is not counted.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks.prompts import load_prompts
from faser.api.templates.chat_template import ChatTemplate
from faser.config.engine import EngineConfig
from faser.engine.build import build
from faser.engine.contract.plan import DraftPlan, SequenceStart
from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.engine import Engine
from faser.engine.execution.drafters.drafter import Continuation, Drafter, Proposals
from faser.engine.text.tokenizer import load_tokenizer
from faser.types import Request, SamplingParams

STEP_S = 0.05
SLOPE = 0.025  # of a step's time, for a further row: while weights come from memory, rows are nearly free
TEXT_S = 3e-5
_LONGEST_PROMPT = 400
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_DRAFTERS: dict[str, dict[str, Any]] = {
    "text": {},
    "copy": {"method": "self_quantized"},
    "text and copy": {"bits": 4},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("questions", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--passes", type=float, nargs="+", default=[0.35, 0.5], help="time of one, in steps")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--count", type=int, default=12, help="of questions")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    options = parser.parse_args()
    prompts = _prompts(options.model, options.questions, options.count)
    found = []
    for name, drafting in _DRAFTERS.items():
        for share in options.passes if name != "text" else options.passes[:1]:
            counted = CountedTime(share)
            engine = _engine(options.model, drafting, counted)
            for temperature in options.temperatures:
                answers = track(prompts, description=f"{name}, a pass {share} steps, temperature {temperature}")
                gain = _gain(engine, counted, answers, temperature, options.tokens)
                found.append({"drafts": name, "pass": share, "temperature": temperature, "gain": round(gain, 3)})
                print(json.dumps(found[-1]))
    result = {"model": options.model.name, "questions": len(prompts), "tokens": options.tokens, "gains": found}
    options.out.write_text(json.dumps(result, indent=1) + "\n")


class CountedTime:
    """Steps so far, in seconds of the tables. share: of a step, that a pass takes."""

    def __init__(self, share: float) -> None:
        self.seconds = 0.0
        self.tables = {
            Role.STEP: _table(STEP_S),
            Role.PASS: _table(STEP_S * share),
            Role.TEXT: CostTable(rows=(1, 2), seconds=(TEXT_S, 2 * TEXT_S)),
        }

    def step(self, num_rows: int) -> None:
        self.seconds += self.tables[Role.STEP].seconds_at(num_rows)

    def passes(self, count: int) -> None:
        self.seconds += count * self.tables[Role.PASS].seconds_at(1)


class CountingDrafter:
    """A drafter whose passes are counted."""

    def __init__(self, drafter: Drafter, counted: CountedTime) -> None:
        self._drafter = drafter
        self._counted = counted

    @property
    def drafts_overlapped(self) -> bool:
        return self._drafter.drafts_overlapped

    def start(self, start: SequenceStart) -> None:
        self._drafter.start(start)

    def propose(self, plan: DraftPlan, until: Callable[[], bool] | None = None, /) -> Proposals:
        proposals = self._drafter.propose(plan, until)
        self._counted.passes(proposals.passes)
        return proposals

    def commit(self, continuations: list[Continuation]) -> None:
        self._drafter.commit(continuations)

    def release(self, slot: int) -> None:
        self._drafter.release(slot)


def _table(step_s: float) -> CostTable:
    return CostTable(rows=_ROWS, seconds=tuple(step_s * (1 + SLOPE * (rows - 1)) for rows in _ROWS))


def _engine(model: Path, drafting: dict[str, Any], counted: CountedTime) -> Engine:
    """Its cost model keeps to the tables, and its executor counts the rows of every step."""
    tables = dict(counted.tables)
    if not drafting:
        del tables[Role.PASS]
    built = build(
        EngineConfig(model=str(model), max_num_seqs=1, max_model_len=1024, speculative_config=drafting),
        model,
        lambda _stage, _done, _total: None,
        step_times=StepTimes(tables=tables, measured_at="", busy_share=0.0),
        wrap_drafter=lambda drafter: CountingDrafter(drafter, counted),  # type: ignore[arg-type,return-value]
    )
    costs: Any = built.costs
    for observer in (costs, costs.host_gaps):
        observer.observe = _ignore
    costs.observe_verification = _ignore
    executor: Any = built.engine._executor
    run = executor.run

    def counted_run(plan: Any) -> Any:
        counted.step(sum(len(each.token_ids) for each in plan.rows))
        return run(plan)

    executor.run = counted_run
    return built.engine


def _ignore(*_args: object, **_named: object) -> None:
    """In place of what would learn from measured times."""


def _gain(engine: Engine, counted: CountedTime, prompts: Any, temperature: float, num_tokens: int) -> float:
    tokens, seconds = 0, 0.0
    for i, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=temperature, max_tokens=num_tokens, seed=i)
        name = f"{temperature} {i}"
        engine.add(Request(request_id=name, prompt_token_ids=prompt, sampling=sampling, cache_salt=name))
        while engine.has_work() and not any(delta.token_ids for delta in engine.step()):
            pass
        counted.seconds = 0.0
        while engine.has_work():
            tokens += sum(len(delta.token_ids) for delta in engine.step())
        seconds += counted.seconds
    return tokens * STEP_S / seconds


def _prompts(model: Path, questions: Path, count: int) -> list[tuple[int, ...]]:
    tokenizer = load_tokenizer(model)
    source = tokenizer.chat_template
    if not isinstance(source, str):
        raise SystemExit(f"{model} has no chat template")
    template = ChatTemplate(source, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
    found: list[tuple[int, ...]] = []
    for question in load_prompts(questions):
        message = [{"role": "user", "content": question.text}]
        text = template.render(message, add_generation_prompt=True, continue_final_message=False, extra={})
        token_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
        if len(token_ids) <= _LONGEST_PROMPT:
            found.append(token_ids)
    return found[:count]


if __name__ == "__main__":
    main()
