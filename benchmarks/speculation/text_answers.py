"""Conversations of three kinds: ordinary questions, several turns about one, and an agent's loop of tool calls.

Owns what the user and the tools say; what the model says comes from the recording or from a server. Everything is
made from fixed sentences and a seed, but for the questions, which are those of a file in Spec-Bench's format.

Recordings: answers of a model, token by token, with the tokens that it thought likeliest at every position.

Owns the asking and the file: JSON lines, one for each answer.

What drafts bring in the real engine, in counted time: drafts and decisions are real, steps are from a table.

Other work on the machine so does not matter. A step takes what the table of step times says for its rows, a
look-up what the engine expects of it. Reading prompts is not counted.

What drafts from text could bring: answers are recorded once, and drafters are replayed over them.

    python -m benchmarks.speculation.text_answers record QUESTIONS.jsonl ANSWERS.jsonl [--questions 88]
    python -m benchmarks.speculation.text_answers self-made MORE.jsonl [--count 2000]
    python -m benchmarks.speculation.text_answers ngrams MORE.jsonl OUT.npz
    python -m benchmarks.speculation.text_answers replay ANSWERS.jsonl COSTS.json OUT.json [--self-made MORE.jsonl]
    python -m benchmarks.speculation.text_answers counted ANSWERS.jsonl COSTS.json OUT.json [--kinds questions] [--most 64]
    python -m benchmarks.speculation.text_answers served QUESTIONS.jsonl OUT.json [--rounds 5] [--requests 1 4]

A recording has ordinary questions, conversations of several turns, and loops of tool calls, each at every
temperature.
"""

import argparse
import json
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.progress import track

import faser
from benchmarks.prompts import load_prompts, take
from benchmarks.runner import describe_machine
from benchmarks.speculation.text_answers.replay import replay, top_ms
from benchmarks.speculation.text_answers.served import measure
from faser.api.templates.chat_template import ChatTemplate
from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir
from faser.engine.build import build
from faser.engine.checkpoints.ngram_model import LONGEST, count, save
from faser.engine.checkpoints.source import resolve
from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.engine import Engine
from faser.types import Request, SamplingParams

QUESTIONS, TURNS, AGENT = "questions", "turns", "agent"
KINDS = (QUESTIONS, TURNS, AGENT)
CHAT_CATEGORIES = (
    *("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
    *("qa", "math_reasoning", "translation"),
)

Message = dict[str, str]

_FOLLOW_UPS = (
    "Say the same in three short sentences.",
    "Now list the main points as bullets, each with an example.",
    "Which of these points matters most, and why?",
    "Rewrite your first answer so that a child of ten understands it.",
)
_AGENT_STEPS = 6
_TOOLS = """You work through a task by calling tools. Answer with one tool call and nothing else, as JSON:
{"tool": "get_order", "arguments": {"order_id": "A-1001", "fields": ["status", "total", "customer"]}}
Tools:
get_order(order_id, fields): reads an order
set_status(order_id, status, reason): changes the status of an order; status is "open", "paid" or "returned"
write_note(order_id, text): adds a note to an order
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """name: unique. replies: what follows each answer of the model, made from that answer; the first opens it."""

    name: str
    opening: tuple[Message, ...]
    replies: tuple[Callable[[str], str], ...]

    @property
    def num_turns(self) -> int:
        return 1 + len(self.replies)


def conversations(kind: str, questions: Path, *, count: int, start: int = 0) -> list[Conversation]:
    """count of them, from number `start` on."""
    if kind == AGENT:
        return [_agent(number) for number in range(start, start + count)]
    prompts = take(load_prompts(questions, CHAT_CATEGORIES), start, count)
    follow_ups = _FOLLOW_UPS if kind == TURNS else ()
    return [
        Conversation(
            name=f"{kind} {number}",
            opening=({"role": "user", "content": prompt.text},),
            replies=tuple(map(_always, follow_ups)),
        )
        for number, prompt in enumerate(prompts, start=start)
    ]


def _always(text: str) -> Callable[[str], str]:
    return lambda _answer: text


def _agent(number: int) -> Conversation:
    """A task over several orders: the tools answer with the fields of the next order, whatever was called."""
    rng = random.Random(number)
    orders = [f"{rng.choice('ABCD')}-{rng.randrange(1000, 9999)}" for _ in range(_AGENT_STEPS)]
    status = rng.choice(("open", "paid", "returned"))
    task = (
        f"For each of the orders {', '.join(orders)}: read it with get_order, then set its status to "
        f'"{status}" with set_status and give the reason.'
    )
    results = [_result(rng, order) for order in orders]
    return Conversation(
        name=f"{AGENT} {number}",
        opening=({"role": "system", "content": _TOOLS}, {"role": "user", "content": task}),
        replies=tuple(_always(result) for result in results[: _AGENT_STEPS - 1]),
    )


def _result(rng: random.Random, order: str) -> str:
    customer = rng.choice(("Ada Berg", "Tom Finch", "Lina Sato", "Omar Reyes"))
    fields = {"order_id": order, "status": "open", "total": rng.randrange(10, 900), "customer": customer}
    return f"Result: {json.dumps({'ok': True, 'order': fields})}\nNext order, please."


def grown(conversation: Conversation, answers: Sequence[str]) -> list[Message]:
    """The messages of the turn that follows these answers."""
    messages = list(conversation.opening)
    for reply, answer in zip(conversation.replies, answers, strict=False):
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": reply(answer)})
    return messages


TOP = 8
_QUESTION_TOKENS = 96
_FEWEST_QUESTION_TOKENS = 6
_AT_ONCE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer. conversation: its name. top: for each of its tokens the TOP likeliest ids, likeliest first.

    top_logprobs: of these ids, before temperature.
    """

    kind: str
    conversation: str
    temperature: float
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    top: tuple[tuple[int, ...], ...] = ()
    top_logprobs: tuple[tuple[float, ...], ...] = ()

    def cut(self, most: int) -> "Answer":
        """The first tokens of the answer."""
        top, top_logprobs = self.top[:most], self.top_logprobs[:most]
        return replace(self, tokens=self.tokens[:most], top=top, top_logprobs=top_logprobs)


class Model:
    """A model that answers conversations without drafts."""

    def __init__(self, name: str | None) -> None:
        self._llm = faser.LLM(name, speculative_policy="off", max_num_seqs=_AT_ONCE)
        tokenizer = self._llm.tokenizer
        source = tokenizer.chat_template
        if not isinstance(source, str):
            raise SystemExit("the model has no chat template")
        self._template = ChatTemplate(source, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)

    def close(self) -> None:
        self._llm.close()

    def converse(
        self, kind: str, conversations: Sequence[Conversation], *, temperature: float, max_tokens: int
    ) -> list[Answer]:
        """Every turn of every conversation, the first turn of all, then the second, and so on."""
        texts: dict[str, list[str]] = {each.name: [] for each in conversations}
        found: list[Answer] = []
        for turn in range(max(each.num_turns for each in conversations)):
            going = [each for each in conversations if turn < each.num_turns]
            prompts = [self._encode(grown(each, texts[each.name]), open_ended=False) for each in going]
            sampling = [
                SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=number, logprobs=TOP)
                for number in range(len(going))
            ]
            for each, done in zip(going, self._llm.generate(prompts, sampling, progress=True), strict=True):
                sample = done.samples[0]
                texts[each.name].append(sample.text)
                found.append(
                    Answer(
                        kind=kind,
                        conversation=each.name,
                        temperature=temperature,
                        prompt=done.prompt_token_ids,
                        tokens=tuple(sample.token_ids),
                        top=tuple(tuple(token for token, _ in place.top[:TOP]) for place in sample.logprobs),
                        top_logprobs=tuple(
                            tuple(round(value, 3) for _, value in place.top[:TOP]) for place in sample.logprobs
                        ),
                    )
                )
        return found

    def self_made(self, count: int, *, max_tokens: int, seed: int = 0) -> list[Answer]:
        """Questions that the model makes up after its template's opening of the user's turn, and their answers."""
        opening = self._encode([{"role": "user", "content": ""}], open_ended=True)
        sampling = [
            SamplingParams(temperature=1.0, top_p=0.95, max_tokens=_QUESTION_TOKENS, seed=seed + number)
            for number in range(count)
        ]
        asked = [each.samples[0].text for each in self._llm.generate([opening] * count, sampling, progress=True)]
        questions = [text.strip() for text in dict.fromkeys(asked) if len(text.split()) >= _FEWEST_QUESTION_TOKENS]
        prompts = [self._encode([{"role": "user", "content": each}], open_ended=False) for each in questions]
        answering = [
            SamplingParams(temperature=0.0 if number % 2 else 0.8, max_tokens=max_tokens, seed=number)
            for number in range(len(prompts))
        ]
        return [
            Answer(
                kind="self-made",
                conversation=f"self-made {seed + number}",
                temperature=sampled.temperature,
                prompt=done.prompt_token_ids,
                tokens=tuple(done.samples[0].token_ids),
            )
            for number, (done, sampled) in enumerate(
                zip(self._llm.generate(prompts, answering, progress=True), answering, strict=True)
            )
        ]

    def _encode(self, messages: list[dict[str, str]], *, open_ended: bool) -> list[int]:
        """open_ended: the text ends where the content of the last message would go on."""
        text = self._template.render(
            messages, add_generation_prompt=not open_ended, continue_final_message=open_ended, extra={}
        )
        return self._llm.tokenizer.encode(text, add_special_tokens=False)


def write(path: Path, answers: Iterable[Answer]) -> None:
    """Append a line for each."""
    with path.open("a", encoding="utf-8") as file:
        for each in answers:
            file.write(json.dumps(asdict(each), separators=(",", ":")) + "\n")


def read(path: Path) -> list[Answer]:
    found = []
    for line in path.read_text("utf-8").splitlines():
        raw = json.loads(line)
        for name in ("prompt", "tokens"):
            raw[name] = tuple(raw[name])
        for name in ("top", "top_logprobs"):
            raw[name] = tuple(map(tuple, raw[name]))
        found.append(Answer(**raw))
    return found


TEXT_S = 3e-5
OFF = "off"
ARMS: dict[str, dict[str, Any] | None] = {
    OFF: None,
    "look-up from 2 tokens": {"ngram_model": "none", "prompt_lookup_min": 2},
    "look-up": {"ngram_model": "none"},
    "default": {},
    "default, no past answers": {"suffix_decoding_max_cached_requests": 0},
}
_MOST_DRAFTED = 16


def count_arms(
    model: str | None,
    asked: Sequence[Answer],
    seconds: Mapping[int, float],
    *,
    arms: Sequence[str],
    requests: Sequence[int],
    most: int,
    one_salt: bool,
) -> list[dict[str, Any]]:
    """A row for each number of requests at once, temperature and arm. gain: over the first arm."""
    rows: list[dict[str, Any]] = []
    for at_once in requests:
        first: dict[float, float] = {}
        for arm in arms:
            engine = CountedEngine(model, ARMS[arm], seconds, at_once)
            for temperature in sorted({each.temperature for each in asked}):
                some = [each for each in asked if each.temperature == temperature]
                found = engine.answer(some, most, one_salt=one_salt)
                rate = first.setdefault(temperature, found["tokens_per_s"])
                rows.append(
                    {
                        "requests": at_once,
                        "temperature": temperature,
                        "arm": arm,
                        "gain": round(found["tokens_per_s"] / rate, 3),
                        "rows_per_step": round(found["rows_per_step"], 2),
                        "tokens": found["tokens"],
                    }
                )
                print(json.dumps(rows[-1]), flush=True)
    return rows


class CountedEngine:
    """drafting: keys of --speculative-config; None: no drafts. seconds: of a step, by its rows."""

    def __init__(
        self, model: str | None, drafting: Mapping[str, Any] | None, seconds: Mapping[int, float], requests: int
    ) -> None:
        self._step = CostTable(rows=tuple(seconds), seconds=tuple(seconds.values()))
        self._requests = requests
        self._seconds, self._tokens, self._rows, self._steps = 0.0, 0, 0, 0
        text = CostTable(rows=(1, 2), seconds=(TEXT_S, 2 * TEXT_S))
        options: dict[str, Any] = (
            {"speculative_policy": "off"} if drafting is None else {"speculative_config": dict(drafting)}
        )
        built = build(
            EngineConfig(model=model, max_num_seqs=requests, max_model_len=2048, **options),
            resolve(model, cache_dir(), progress=lambda _stage, _done, _total: None),
            lambda _stage, _done, _total: None,
            step_times=StepTimes(tables={Role.STEP: self._step, Role.TEXT: text}, measured_at="", busy_share=0.0),
        )
        costs: Any = built.costs
        if costs is not None:
            for observer in (costs, costs.host_gaps):
                observer.observe = _ignore
            costs.observe_verification = _ignore
        self._engine: Engine = built.engine
        executor: Any = built.engine._executor
        run = executor.run

        def counted_run(plan: Any) -> Any:
            self._count([len(each.token_ids) for each in plan.rows])
            return run(plan)

        executor.run = counted_run

    def answer(self, asked: Sequence[Answer], most: int, *, one_salt: bool) -> dict[str, float]:
        """Answer the prompts of these answers anew. most: tokens of an answer.

        one_salt: all have one cache_salt; else each conversation has one.
        """
        self._seconds, self._tokens, self._rows, self._steps = 0.0, 0, 0, 0
        waiting = iter(enumerate(track(asked, "counted")))
        open_ones = 0
        while True:
            while open_ones < self._requests and (following := next(waiting, None)) is not None:
                number, answer = following
                name = f"{number} {answer.temperature}"
                sampling = SamplingParams(temperature=answer.temperature, max_tokens=most, seed=number)
                self._engine.add(
                    Request(
                        request_id=name,
                        prompt_token_ids=answer.prompt,
                        sampling=sampling,
                        cache_salt="one" if one_salt else f"{answer.conversation} {answer.temperature}",
                    )
                )
                open_ones += 1
            if not self._engine.has_work():
                break
            for delta in self._engine.step():
                self._tokens += len(delta.token_ids)
                open_ones -= delta.finish_reason is not None
        return {
            "tokens_per_s": self._tokens / self._seconds,
            "rows_per_step": self._rows / self._steps,
            "tokens": self._tokens,
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


_VOCAB_SIZE = 49152
MAX_TOKENS = {QUESTIONS: 256, TURNS: 160, AGENT: 96}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("questions_file", type=Path)
    recording.add_argument("out", type=Path)
    recording.add_argument("--questions", type=int, default=88)
    recording.add_argument("--turns", type=int, default=24)
    recording.add_argument("--agent", type=int, default=16)
    recording.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    making = commands.add_parser("self-made")
    making.add_argument("out", type=Path)
    making.add_argument("--count", type=int, default=2000)
    making.add_argument("--seed", type=int, default=0)
    serving = commands.add_parser("served")
    serving.add_argument("questions_file", type=Path)
    serving.add_argument("out", type=Path)
    serving.add_argument("--rounds", type=int, default=5)
    serving.add_argument("--requests", type=int, nargs="+", default=[1, 4])
    counting = commands.add_parser("ngrams")
    counting.add_argument("made", type=Path)
    counting.add_argument("out", type=Path)
    playing = commands.add_parser("replay")
    playing.add_argument("--self-made", type=Path)
    in_engine = commands.add_parser("counted")
    in_engine.add_argument("--arms", nargs="+", default=list(ARMS)[:-1])
    in_engine.add_argument("--requests", type=int, nargs="+", default=[1, 4])
    in_engine.add_argument("--one-salt", action="store_true")
    in_engine.add_argument("--model")
    for each in (playing, in_engine):
        each.add_argument("answers", type=Path)
        each.add_argument("costs", type=Path, help="a file of step times, from the cache")
        each.add_argument("out", type=Path)
        each.add_argument("--kinds", nargs="+", default=KINDS)
        each.add_argument("--most", type=int, default=256, help="tokens of an answer that count")
    for each in (recording, making):
        each.add_argument("--model")
    options = parser.parse_args()
    if options.command == "ngrams":
        made = read(options.made)
        about = {"answers": len(made), "tokens": sum(len(each.tokens) for each in made)}
        save(count([(*each.prompt[-LONGEST:], *each.tokens) for each in made], about=about), options.out)
        return
    if options.command in ("replay", "counted"):
        _replay(options)
        return
    if options.command == "served":
        rows = measure(
            options.questions_file, rounds=options.rounds, concurrency=options.requests, max_tokens=MAX_TOKENS
        )
        result = {
            "machine": describe_machine(sorted(os.sched_getaffinity(0))),
            "rounds": options.rounds,
            "rows": rows,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
        return
    model = Model(options.model)
    try:
        if options.command == "record":
            _record(model, options)
        else:
            write(options.out, model.self_made(options.count, max_tokens=256, seed=options.seed))
    finally:
        model.close()


def _record(model: Model, options: argparse.Namespace) -> None:
    counts = {QUESTIONS: options.questions, TURNS: options.turns, AGENT: options.agent}
    for temperature in options.temperatures:
        for kind, num_talks in counts.items():
            talks = conversations(kind, options.questions_file, count=num_talks)
            write(
                options.out,
                model.converse(kind, talks, temperature=temperature, max_tokens=MAX_TOKENS[kind]),
            )


def _replay(options: argparse.Namespace) -> None:
    recorded = [each for each in read(options.answers) if each.kind in options.kinds]
    step = json.loads(options.costs.read_text("utf-8"))["roles"]["step"]
    seconds = dict(zip(step["rows"], step["seconds"], strict=True))
    result: dict[str, Any] = {
        "answers": len(recorded),
        "most_tokens": options.most,
        "tokens": sum(len(each.tokens) for each in recorded),
        "step_ms": {rows: round(1e3 * each, 2) for rows, each in seconds.items()},
    }
    if options.command == "replay":
        made = read(options.self_made) if options.self_made else []
        result["self_made_tokens"] = sum(len(each.tokens) for each in made)
        result["top_8_ms"] = {rows: top_ms(rows, _VOCAB_SIZE) for rows in (1, 4, 16)}
        result["rows"] = replay(recorded, made, seconds, options.most)
    else:
        result["salts"] = "one for all" if options.one_salt else "one for each conversation"
        result["rows"] = count_arms(
            options.model,
            recorded,
            seconds,
            arms=options.arms,
            requests=options.requests,
            most=options.most,
            one_salt=options.one_salt,
        )
    options.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
