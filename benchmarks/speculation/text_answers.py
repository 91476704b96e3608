"""Answers of a model without drafts, recorded once: the text of its n-gram model, and drafts in counted time.

    python -m benchmarks speculation.text_answers record QUESTIONS.jsonl ANSWERS.jsonl [--count 48] [--by-category]
    python -m benchmarks speculation.text_answers self-made MORE.jsonl [--count 2000]
    python -m benchmarks speculation.text_answers ngrams MORE.jsonl OUT.npz
    python -m benchmarks speculation.text_answers counted ANSWERS.jsonl COSTS.json OUT.json [--most 64] [--shared]

record: answers to questions, at every temperature; by category: each category of questions has a system prompt of
its own. self-made: the model makes up questions after its template's opening of the user's turn, and answers them.
ngrams: counts these answers, for --speculative-config's ngram_model.
counted: what drafts from text gain in the real engine. Its drafts and decisions are real, its answers are those
recorded, and its steps take what a table of step times says for their rows, so that other work on the machine does
not matter. COSTS.json is a file of step times from the cache folder. Reading prompts is not counted, and no guard
stops drafts that do not pay.
"""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import faser
from benchmarks.engines import Tokens, closed_loop, opened
from benchmarks.prompts import load_prompts, take
from benchmarks.runner import Json, about, command_line, write_json
from faser.api.requests.chat_template import ChatTemplate
from faser.config.engine import EngineConfig
from faser.engine.checkpoints.ngram_model import LONGEST, count, save
from faser.engine.contract.plan import StepPlan, StepResult, StepRows
from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.execution.overlap.partition import PendingResult
from faser.engine.execution.runner.batch import RowBatch
from faser.engine.execution.sampling.rows import StepTokens
from faser.outputs import RequestOutput
from faser.types.request import Request
from faser.types.sampling import SamplingParams

CHAT_CATEGORIES = (
    *("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
    *("qa", "math_reasoning", "translation"),
)
LOOK_UP = CostTable(rows=(1, 64), seconds=(3e-5, 9e-5))  # what look-ups are counted with, by sequences
ARMS: dict[str, dict[str, Any] | None] = {
    "off": None,
    "look-up from 2 tokens": {"ngram_model": "none", "prompt_lookup_min": 2},
    "look-up": {"ngram_model": "none"},
    "default": {},
}
_AT_ONCE = 64
_ANSWER_TOKENS, _QUESTION_TOKENS, _FEWEST_WORDS = 256, 96, 6
_SYSTEM = "{} is what you are asked for. Answer as well as you can, and say nothing else."


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
    recording.add_argument("--by-category", action="store_true")
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
    counted.add_argument("--shared", action="store_true", help="requests may draft from each other's answers")
    counted.add_argument("--mixed", action="store_true", help="answers of all temperatures at once")
    for each in (recording, making, counted):
        each.add_argument("--model")
    options = parser.parse_args()
    {"record": _record, "self-made": _self_made, "ngrams": _ngrams, "counted": _counted}[options.command](options)


def _record(options: argparse.Namespace) -> None:
    prompts = take(
        load_prompts(options.questions, () if options.by_category else CHAT_CATEGORIES), 0, options.count
    )
    with faser.LLM(options.model, speculative_policy="off", max_num_seqs=_AT_ONCE) as llm:
        for temperature in options.temperatures:
            sampling = [
                SamplingParams(temperature=temperature, max_tokens=_ANSWER_TOKENS, seed=number)
                for number in range(len(prompts))
            ]
            chats = [[{"role": "user", "content": prompt.text}] for prompt in prompts]
            if options.by_category:
                chats = [
                    [{"role": "system", "content": _SYSTEM.format(prompt.category)}, *chat]
                    for prompt, chat in zip(prompts, chats, strict=True)
                ]
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
    result: Json = about("speculation.text_answers") | {
        "answers": len(recorded),
        "most_tokens": options.most,
        "step_ms": {rows: round(1e3 * each, 2) for rows, each in seconds.items()},
        "rows": [],
    }
    for at_once in options.requests:
        first: dict[float, float] = {}
        for arm in options.arms:
            engine = CountedEngine(options.model, ARMS[arm], seconds, at_once, shared=options.shared)
            temperatures = sorted({each.temperature for each in recorded})
            for temperature in [-1.0] if options.mixed else temperatures:
                asked = [each for each in recorded if options.mixed or each.temperature == temperature]
                found = engine.answer(asked, options.most)
                gain = found["tokens_per_s"] / first.setdefault(temperature, found["tokens_per_s"])
                row = {
                    "requests": at_once,
                    "temperature": "all" if options.mixed else temperature,
                    "arm": arm,
                    "gain": round(gain, 4),
                    **found,
                }
                result["rows"].append(row)
                print(json.dumps(row), flush=True)
    write_json(options.out, result)


class CountedEngine:
    """drafting: keys of --speculative-config; None: no drafts. seconds: of a step, by its rows.

    shared: requests may draft from each other's answers.
    """

    def __init__(
        self,
        model: str | None,
        drafting: Mapping[str, Any] | None,
        seconds: Mapping[int, float],
        requests: int,
        *,
        shared: bool = False,
    ) -> None:
        self._step = CostTable(rows=tuple(seconds), seconds=tuple(seconds.values()))
        self._requests, self._shared = requests, shared
        self._looks_up = drafting is not None
        self._seconds, self._rows, self._steps, self._accepted = 0.0, 0, 0, 0
        self._asked: Sequence[Answer] = ()
        self._said: dict[int, Tokens] = {}  # by slot: prompt and answer
        settings: dict[str, Any] = (
            {"speculative_policy": "off"} if drafting is None else {"speculative_config": dict(drafting)}
        )
        config = EngineConfig(model=model, max_num_seqs=requests, max_model_len=2048, **settings)
        times = StepTimes(tables={Role.STEP: self._step, Role.TEXT: LOOK_UP}, measured_at="", busy_share=0.0)
        built = opened(config, step_times=times)
        costs: Any = built.costs
        if costs is not None:  # nothing is learned from times that are not those of the table
            costs.observe = costs.observe_verification = costs.posterior.observe_gap = _ignore
        self._engine = built.engine
        control: Any = built.engine._scheduler._speculation
        if drafting is not None:
            control._guards.current = None
        executor: Any = built.engine._executor
        run = executor.run

        def counted_run(plan: StepPlan) -> StepResult:
            for start in plan.started:
                answer = self._asked[start.sampling.seed or 0]
                self._said[start.slot] = (*answer.prompt, *answer.tokens)
            result: StepResult = run(plan)
            self._count(plan.rows, result.counts)
            return result

        executor.run, executor._verify = counted_run, self._replay

    def answer(self, asked: Sequence[Answer], most: int) -> dict[str, float]:
        """Give these answers anew, each in a namespace of its own unless they are shared. most: tokens of each."""
        self._seconds, self._rows, self._steps, self._accepted = 0.0, 0, 0, 0
        self._asked = asked
        requests = [
            Request(
                request_id=f"{number} {answer.temperature}",
                prompt_token_ids=answer.prompt,
                sampling=SamplingParams(
                    temperature=answer.temperature, max_tokens=min(most, len(answer.tokens)), seed=number
                ),
                cache_salt=None if self._shared else f"{number} {answer.temperature}",
            )
            for number, answer in enumerate(asked)
        ]
        tokens = sum(len(said) for _, said in closed_loop(self._engine, requests, self._requests))
        return {
            "tokens_per_s": round(tokens / self._seconds, 2),
            "rows_per_step": round(self._rows / self._steps, 3),
            "accepted": self._accepted,
            "tokens": tokens,
        }

    def _replay(
        self, rows: StepRows, batch: RowBatch
    ) -> PendingResult[tuple[StepRows, RowBatch, StepTokens, int]]:
        """Sample the tokens of the answers that were recorded."""
        counts, token_ids = [0] * len(rows), list[int]()
        for at, each in enumerate(rows):
            if each.samples:
                first = each.start + len(each.token_ids) - each.num_drafts
                said = self._said[each.slot][first : first + each.num_drafts + 1]
                drafts = each.token_ids[len(each.token_ids) - each.num_drafts :]
                wrong = [k for k, (draft, token) in enumerate(zip(drafts, said, strict=False)) if draft != token]
                said = said[: wrong[0] + 1] if wrong else said
                token_ids += said
                counts[at] = len(said)
        tokens = StepTokens(counts=counts, token_ids=token_ids)
        return PendingResult(lambda: (rows, batch, tokens, 0))

    def _count(self, rows: StepRows, counts: Sequence[int]) -> None:
        """Sequences that read their prompts do not count."""
        columns = zip(rows.counts, rows.num_drafts, counts, strict=True)
        decoding = [(count, said) for count, num_drafts, said in columns if count == 1 + num_drafts]
        if decoding:
            num_rows = sum(count for count, _ in decoding)
            self._seconds += self._step.seconds_at(num_rows)
            if self._looks_up:
                self._seconds += LOOK_UP.seconds_at(len(decoding))
            self._rows += num_rows
            self._steps += 1
            self._accepted += sum(said - 1 for _, said in decoding if said)


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
