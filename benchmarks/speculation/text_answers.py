"""Answers of a model without drafts, recorded once: the text of its n-gram model, and drafts in counted time.

    python -m benchmarks.speculation.text_answers record QUESTIONS.jsonl ANSWERS.jsonl [--count 48]
    python -m benchmarks.speculation.text_answers self-made MORE.jsonl [--count 2000]
    python -m benchmarks.speculation.text_answers ngrams MORE.jsonl OUT.npz
    python -m benchmarks.speculation.text_answers counted ANSWERS.jsonl COSTS.json OUT.json [--most 64]

record: answers to questions, at every temperature. self-made: the model makes up questions after its template's
opening of the user's turn, and answers them. ngrams: counts these answers, for --speculative-config's ngram_model.
counted: what drafts from text gain in the real engine, whose drafts and decisions are real and whose steps take
what a table of step times says for their rows, so that other work on the machine does not matter. COSTS.json is a
file of step times from the cache folder. Reading prompts is not counted.
"""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import faser
from benchmarks.engines import closed_loop, opened
from benchmarks.prompts import load_prompts, take
from benchmarks.runner import Json, about, command_line, write_json
from faser.api.requests.chat_template import ChatTemplate
from faser.config.engine import EngineConfig
from faser.engine.checkpoints.ngram_model import LONGEST, count, save
from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.offline import RequestOutput
from faser.types import Request, SamplingParams

CHAT_CATEGORIES = (
    *("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
    *("qa", "math_reasoning", "translation"),
)
TEXT_S = 3e-5  # that a look-up is counted with
ARMS: dict[str, dict[str, Any] | None] = {
    "off": None,
    "look-up from 2 tokens": {"ngram_model": "none", "prompt_lookup_min": 2},
    "look-up": {"ngram_model": "none"},
    "default": {},
}
_AT_ONCE = 64
_ANSWER_TOKENS, _QUESTION_TOKENS, _FEWEST_WORDS = 256, 96, 6
_MOST_DRAFTED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    temperature: float
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


def main() -> None:
    parser = command_line(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("questions", type=Path)
    recording.add_argument("out", type=Path)
    recording.add_argument("--count", type=int, default=48)
    recording.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    making = commands.add_parser("self-made")
    making.add_argument("out", type=Path)
    making.add_argument("--count", type=int, default=2000)
    making.add_argument("--seed", type=int, default=0)
    counting = commands.add_parser("ngrams")
    counting.add_argument("made", type=Path)
    counting.add_argument("out", type=Path)
    counted = commands.add_parser("counted")
    counted.add_argument("answers", type=Path)
    counted.add_argument("costs", type=Path, help="a file of step times, from the cache")
    counted.add_argument("out", type=Path)
    counted.add_argument("--arms", nargs="+", default=list(ARMS))
    counted.add_argument("--requests", type=int, nargs="+", default=[1, 4])
    counted.add_argument("--most", type=int, default=256, help="tokens of an answer that count")
    for each in (recording, making, counted):
        each.add_argument("--model")
    options = parser.parse_args()
    {"record": _record, "self-made": _self_made, "ngrams": _ngrams, "counted": _counted}[options.command](options)


def _record(options: argparse.Namespace) -> None:
    prompts = take(load_prompts(options.questions, CHAT_CATEGORIES), 0, options.count)
    with faser.LLM(options.model, speculative_policy="off", max_num_seqs=_AT_ONCE) as llm:
        for temperature in options.temperatures:
            sampling = [
                SamplingParams(temperature=temperature, max_tokens=_ANSWER_TOKENS, seed=number)
                for number in range(len(prompts))
            ]
            chats = [[{"role": "user", "content": prompt.text}] for prompt in prompts]
            done = llm.chat(chats, sampling, use_tqdm=True)
            write(options.out, _answers(done, sampling))


def _self_made(options: argparse.Namespace) -> None:
    with faser.LLM(options.model, speculative_policy="off", max_num_seqs=_AT_ONCE) as llm:
        tokenizer = llm.tokenizer
        if not isinstance(tokenizer.chat_template, str):
            raise SystemExit("the model has no chat template")
        template = ChatTemplate(
            tokenizer.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token
        )
        opening = template.render(
            [{"role": "user", "content": ""}], add_generation_prompt=False, continue_final_message=True, extra={}
        )
        asking = [
            SamplingParams(temperature=1.0, top_p=0.95, max_tokens=_QUESTION_TOKENS, seed=options.seed + number)
            for number in range(options.count)
        ]
        prompt = tokenizer.encode(opening, add_special_tokens=False)
        asked = [each.outputs[0].text for each in llm.generate([prompt] * options.count, asking, use_tqdm=True)]
        questions = [text.strip() for text in dict.fromkeys(asked) if len(text.split()) >= _FEWEST_WORDS]
        sampling = [
            SamplingParams(temperature=0.0 if number % 2 else 0.8, max_tokens=_ANSWER_TOKENS, seed=number)
            for number in range(len(questions))
        ]
        done = llm.chat([[{"role": "user", "content": each}] for each in questions], sampling, use_tqdm=True)
        write(options.out, _answers(done, sampling))


def _answers(done: Sequence[RequestOutput], sampling: Sequence[SamplingParams]) -> list[Answer]:
    return [
        Answer(
            temperature=asked.temperature,
            prompt=tuple(each.prompt_token_ids),
            tokens=tuple(each.outputs[0].token_ids),
        )
        for each, asked in zip(done, sampling, strict=True)
    ]


def _ngrams(options: argparse.Namespace) -> None:
    made = read(options.made)
    conditions = {"answers": len(made), "tokens": sum(len(each.tokens) for each in made)}
    save(count([(*each.prompt[-LONGEST:], *each.tokens) for each in made], about=conditions), options.out)


def _counted(options: argparse.Namespace) -> None:
    recorded = read(options.answers)
    step = json.loads(options.costs.read_text("utf-8"))["roles"]["step"]
    seconds = dict(zip(step["rows"], step["seconds"], strict=True))
    result: Json = about("benchmarks.speculation.text_answers") | {
        "answers": len(recorded),
        "most_tokens": options.most,
        "step_ms": {rows: round(1e3 * each, 2) for rows, each in seconds.items()},
        "rows": [],
    }
    for at_once in options.requests:
        first: dict[float, float] = {}
        for arm in options.arms:
            engine = CountedEngine(options.model, ARMS[arm], seconds, at_once)
            for temperature in sorted({each.temperature for each in recorded}):
                found = engine.answer([each for each in recorded if each.temperature == temperature], options.most)
                gain = found["tokens_per_s"] / first.setdefault(temperature, found["tokens_per_s"])
                row = {
                    "requests": at_once,
                    "temperature": temperature,
                    "arm": arm,
                    "gain": round(gain, 3),
                    **found,
                }
                result["rows"].append(row)
                print(json.dumps(row), flush=True)
    write_json(options.out, result)


class CountedEngine:
    """drafting: keys of --speculative-config; None: no drafts. seconds: of a step, by its rows."""

    def __init__(
        self, model: str | None, drafting: Mapping[str, Any] | None, seconds: Mapping[int, float], requests: int
    ) -> None:
        self._step = CostTable(rows=tuple(seconds), seconds=tuple(seconds.values()))
        self._requests = requests
        self._seconds, self._rows, self._steps = 0.0, 0, 0
        text = CostTable(rows=(1, 2), seconds=(TEXT_S, 2 * TEXT_S))
        settings: dict[str, Any] = (
            {"speculative_policy": "off"} if drafting is None else {"speculative_config": dict(drafting)}
        )
        config = EngineConfig(model=model, max_num_seqs=requests, max_model_len=2048, **settings)
        times = StepTimes(tables={Role.STEP: self._step, Role.TEXT: text}, measured_at="", busy_share=0.0)
        built = opened(config, step_times=times)
        costs: Any = built.costs
        if costs is not None:  # nothing is learned from times that are not those of the table
            costs.observe = costs.observe_verification = costs.posterior.observe_gap = _ignore
        self._engine = built.engine
        executor: Any = built.engine._executor
        run = executor.run

        def counted_run(plan: Any) -> Any:
            self._count([len(each.token_ids) for each in plan.rows])
            return run(plan)

        executor.run = counted_run

    def answer(self, asked: Sequence[Answer], most: int) -> dict[str, float]:
        """Answer the prompts of these answers anew, each in a namespace of its own. most: tokens of an answer."""
        self._seconds, self._rows, self._steps = 0.0, 0, 0
        requests = [
            Request(
                request_id=f"{number} {answer.temperature}",
                prompt_token_ids=answer.prompt,
                sampling=SamplingParams(temperature=answer.temperature, max_tokens=most, seed=number),
                cache_salt=f"{number} {answer.temperature}",
            )
            for number, answer in enumerate(asked)
        ]
        tokens = sum(len(said) for _, said in closed_loop(self._engine, requests, self._requests))
        return {
            "tokens_per_s": tokens / self._seconds,
            "rows_per_step": round(self._rows / self._steps, 2),
            "tokens": tokens,
        }

    def _count(self, rows: Sequence[int]) -> None:
        """Sequences with more rows than a draft can have are reading their prompts."""
        decoding = [each for each in rows if each <= 1 + _MOST_DRAFTED]
        if decoding:
            self._seconds += self._step.seconds_at(sum(decoding)) + len(decoding) * TEXT_S
            self._rows += sum(decoding)
            self._steps += 1


def _ignore(*_args: object, **_named: object) -> None:
    """In place of what would learn from measured times."""


def write(path: Path, answers: Iterable[Answer]) -> None:
    """Append a line for each."""
    with path.open("a", encoding="utf-8") as file:
        for each in answers:
            file.write(json.dumps(asdict(each), separators=(",", ":")) + "\n")


def read(path: Path) -> list[Answer]:
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return [
        Answer(temperature=each["temperature"], prompt=tuple(each["prompt"]), tokens=tuple(each["tokens"]))
        for each in lines
    ]


if __name__ == "__main__":
    main()
