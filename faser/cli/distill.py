"""`faser distill MODEL -o DIR`: makes the conversations, then a head that learns from them.

faser.distill does the work. The flags are its own, and those of `faser serve` about the model and its engine.
"""

import argparse
import asyncio
import json
import math
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from faser.cli.console import TERMINATED, ProgressReporter, TokenBar, TrainingBar
from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir
from faser.config.sources import CommandParser, engine_config, engine_settings, number
from faser.distill.dataset import Dataset
from faser.distill.maker import AnswerSettings, ConversationMaker, fill_from_traffic
from faser.distill.operator_files import FileQuestions, TrafficFile, read_conversations
from faser.distill.questions import Answer, AskingSettings, ChatTurns, OnAnswer, SelfAskedQuestions
from faser.engine.checkpoints.files import read_model_config
from faser.engine.checkpoints.source import resolve
from faser.engine.client.async_engine import AsyncEngine
from faser.engine.control.step_cost import CostModel
from faser.engine.text.tokenizer import Tokenizer, load_tokenizer
from faser.errors import ConfigError
from faser.optional import maybe
from faser.processes import exit_on_sigterm
from faser.types.answer import FinishReason
from faser.types.request import Request
from faser.types.sampling import SamplingParams

if TYPE_CHECKING:
    from faser.distill.acceptance import Expected

PROG = "faser distill"

HELP = """usage: faser distill [MODEL] -o DIR [flags]

Make a head that drafts for a model, from nothing but the model: it generates questions and answers them, and a
head of one layer is trained to predict the answers. Text never leaves the machine. The head is in the format of
`speculators`; serve it with --speculative-config '{"model": "DIR"}'.

  MODEL                   a directory, .gguf file or hub id [the embedded SmolLM2-135M-Instruct]
  -o, --output-dir DIR    where all files go; a rerun resumes from them
  --tokens N              tokens of answers to train on, such as 500k [1m]
  --prompts FILE          questions to answer instead: JSON lines, or one question a line
  --from-traffic FILE     conversations to train on as they are: JSON lines with messages and answer
  --only-conversations    stop once the answers are generated
  --block                 make a block drafter (DSpark): two layers, whose one pass drafts all tokens
  --epochs N              passes over the answers [8]
  --hours H               train for this long instead, after the answers are generated
  --draft-vocab-size N    number of most frequent tokens that the head can draft [8192]
  --draft-steps N         draft tokens trained together [3; 4 with --block, which drafts as many]
  --batch-tokens N        tokens of answers per training step [1024]
  --head-dtype TYPE       type of the stored head: int8 or bfloat16 [int8]
  --seed N                random seed of questions, answers and weights [0]

You can stop it at any time (Ctrl-C or SIGTERM); rerun the command to resume.

Flags of faser serve about the model and the engine may follow: faser serve --help=all."""

_DEFAULT_TOKENS = 1_000_000
_MOST_STEPS = 16
_HEAD_STEPS, _BLOCK_STEPS = 3, 4


def _scaled(text: str) -> int:
    """500k is 500,000. Raises ValueError for what is no whole number."""
    unit = {"k": 1_000, "m": 1_000_000}.get(text[-1:].lower(), 1)
    found = float(text[:-1] if unit > 1 else text) * unit
    if not found.is_integer():
        raise ValueError(text)
    return int(found)


_hours = number(float, "a number of hours above 0", lambda found: 0 < found < math.inf)
_steps = number(
    int, f"a whole number of at least 1 and at most {_MOST_STEPS}", lambda found: 1 <= found <= _MOST_STEPS
)
_count = number(_scaled, "a whole number of at least 1, like 500k or 2m", lambda found: found >= 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillArguments:
    """Arguments of the command. tokens: of answers; None: not stated. prompts, traffic: one at most."""

    output: Path
    tokens: int | None
    prompts: Path | None
    traffic: Path | None
    only_conversations: bool
    block: bool
    epochs: int
    hours: float | None
    draft_vocab_size: int
    steps: int
    rows: int
    int8: bool
    seed: int

    measured_temperature = 0.8

    @property
    def answer_tokens(self) -> int:
        return self.tokens or _DEFAULT_TOKENS


def distill(arguments: Sequence[str]) -> int:
    """Returns the exit status. Raises ConfigError for what cannot work."""
    given = read_arguments(arguments)
    if given is None:
        print(HELP)
        return 0
    own, config = given
    with exit_on_sigterm(TERMINATED):
        with ProgressReporter() as report:
            directory = resolve(config.model, cache_dir(), revision=config.revision, progress=report)
        tokenizer = load_tokenizer(Path(config.tokenizer or directory))
        dataset = make_conversations(own, config, directory, tokenizer)
        if not dataset.records:
            raise ConfigError(f"{own.output} has no conversations to learn from")
        if own.only_conversations:
            return 0
        return train_head(own, config, directory, dataset)


def make_conversations(
    own: DistillArguments, config: EngineConfig, directory: Path, tokenizer: Tokenizer
) -> Dataset:
    """The conversations in the output folder, as many as asked for."""
    model = read_model_config(directory)
    eos_token_ids = model.eos_token_ids
    context = min(config.max_model_len or math.inf, model.spec.max_position_embeddings)
    folder = own.output / "conversations"
    asking, answering = AskingSettings(seed=own.seed), AnswerSettings(seed=own.seed)
    about: dict[str, Any] = {"model": directory.name, "answers": _described(answering)}
    if own.traffic is not None:
        dataset = Dataset(folder, {"model": directory.name, "traffic": str(own.traffic)})
        turns = ChatTurns(tokenizer, eos_token_ids) if tokenizer.chat_template is not None else None
        found = TrafficFile(
            own.traffic, tokenizer, turns, next(iter(eos_token_ids), None), vocab_size=model.spec.vocab_size
        )
        fill_from_traffic(dataset, found, own.tokens)
        return dataset
    turns = ChatTurns(tokenizer, eos_token_ids)
    prompts = maybe(read_conversations, own.prompts)
    about |= {"questions": asdict(asking)} if prompts is None else {"prompts": str(own.prompts)}
    dataset = Dataset(folder, json.loads(json.dumps(about)))
    asking = replace(asking, max_tokens=min(asking.max_tokens, int(context) // 2))
    answering = replace(answering, context=int(context))
    if dataset.answer_tokens >= own.answer_tokens:
        return dataset
    engine = replace(config, speculative_policy="off") if config.speculative_config is None else config
    with ExitStack() as stack:
        with ProgressReporter() as report:
            source = stack.enter_context(EngineSource(engine, directory, tokenizer, report))
        bar = stack.enter_context(TokenBar())
        questions = SelfAskedQuestions(source, turns, asking) if prompts is None else FileQuestions(prompts)
        maker = ConversationMaker(dataset, source, turns, answering, report=bar, say=bar.say)
        maker.fill(questions, own.answer_tokens)
    return dataset


def _described(answering: AnswerSettings) -> dict[str, Any]:
    """The settings that answers follow from wherever there is room for them."""
    found = asdict(answering)
    del found["context"]
    return found


def train_head(own: DistillArguments, config: EngineConfig, directory: Path, dataset: Dataset) -> int:
    """Returns the exit status: 0 when the head is written, 143 when SIGTERM stopped the training."""
    import torch

    from faser.distill.acceptance import LOADS, expected_speedup, speedup_in_words
    from faser.distill.distillation import Distillation, HeadSettings
    from faser.distill.target import load_target
    from faser.distill.trainer import TrainingSettings

    settings = TrainingSettings(seed=own.seed, epochs=own.epochs, hours=own.hours, steps=own.steps, rows=own.rows)
    head = HeadSettings(block=own.block, draft_vocab_size=own.draft_vocab_size, int8=own.int8)
    torch.set_num_threads(config.threads)
    torch.set_flush_denormal(True)  # what is almost impossible would take ten times as long as the rest
    with ProgressReporter() as report:
        target = load_target(config, directory, report)
    made = Distillation(own.output, target, directory.name, config, settings, head)
    with TokenBar() as bar:
        made.record(dataset, bar)
    with _stop_on_signal() as stops, TrainingBar() as shown:
        finished = made.train(dataset, shown, stops)
    if not finished:
        print(f"faser distill: stopped; run it again to go on from {own.output}", file=sys.stderr)
        return TERMINATED
    with TokenBar(unit="batches") as bar:
        found = made.measure(
            temperature=own.measured_temperature, on_batch=lambda done, total: bar("measuring", done, total)
        )
    about = {"acceptance": {"greedy": found.greedy, "sampled": found.sampled}}
    made.write(about)
    print(acceptance_table(found.greedy, found.sampled, own.measured_temperature), end="\n\n")
    del made, target  # the engine needs their memory
    costs = head_costs(config, directory, own.output)
    loads = [load for load in LOADS if load <= config.max_num_seqs]
    greedy, sampled = (
        [expected_speedup(costs, shares, load) for load in loads if shares]
        for shares in (found.greedy, found.sampled)
    )
    print(speedup_table(greedy, sampled, own.measured_temperature), end="\n\n")
    kind = "block drafter" if own.block else "head"
    print(f"The {kind} is {speedup_in_words(greedy or sampled)}.")
    print(
        f'{kind}: {own.output}\nserve it: faser serve MODEL --speculative-config \'{{"model": "{own.output}"}}\''
    )
    return 0


def acceptance_table(greedy: Sequence[float], sampled: Sequence[float], temperature: float) -> str:
    """Shares of drafts on conversations that were not learned from, as Markdown."""
    steps = len(greedy) or len(sampled)
    lines = [
        "| accepted on held-out answers | "
        + " | ".join(f"token {at + 1}" for at in range(steps))
        + " | tokens of a draft |",
        "| --- |" + " ---: |" * (steps + 1),
    ]
    for name, shares in (("temperature 0", greedy), (f"temperature {temperature:g}, at most", sampled)):
        if shares:
            cells = " | ".join(f"{share:.2f}" for share in shares)
            lines.append(f"| {name} | {cells} | {sum(shares):.2f} |")
    return "\n".join(lines)


def speedup_table(greedy: "Sequence[Expected]", sampled: "Sequence[Expected]", temperature: float) -> str:
    """Return the expected speedup by load, as a Markdown table."""
    lines = [
        "| requests at once | " + " | ".join(str(each.requests) for each in greedy or sampled) + " |",
        "| --- |" + " ---: |" * len(greedy or sampled),
    ]
    for name, found in (("temperature 0", greedy), (f"temperature {temperature:g}, at most", sampled)):
        if found:
            cells = " | ".join(f"{each.speedup:.2f}x ({each.draft_tokens})" for each in found)
            lines.append(f"| expected speed-up, {name} (drafted tokens) | {cells} |")
    return "\n".join(lines)


def head_costs(config: EngineConfig, directory: Path, head: Path) -> CostModel:
    """Measure what steps and the drafter's passes take in an engine on this machine."""
    from faser.engine.build import build

    serving = replace(config, speculative_policy=None, speculative_config={"model": str(head)})
    with ProgressReporter() as report:
        costs = build(serving, directory, report).costs
    assert costs is not None, "an engine that speculates has costs"
    return costs


@contextmanager
def _stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether a signal asks to stop; training ends after the batch that runs."""
    asked = []

    def note(number: int, frame: object) -> None:
        del frame
        asked.append(number)

    stops = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        stops.append(signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in stops}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class EngineSource:
    """Loads the model on entry, frees it on exit. Prompts wait here beyond what the engine's queue holds."""

    def __init__(
        self, config: EngineConfig, directory: Path, tokenizer: Tokenizer, report: ProgressReporter
    ) -> None:
        self._engine = AsyncEngine(config, directory, tokenizer, transport="thread", on_progress=report)
        self._at_once = config.max_num_seqs + min(config.max_num_queued_reqs, config.max_num_seqs)
        self._runner = asyncio.Runner()
        self._answering: asyncio.Task[list[Answer]] | None = None

    def answer(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], on_answer: OnAnswer
    ) -> list[Answer]:
        """Raises RequestError for a prompt longer than the context, EngineError if the engine dies."""
        return self._runner.run(self._answer_all(prompts, sampling, on_answer))

    def __enter__(self) -> Self:
        """Raises ConfigError if the model cannot be served."""
        try:
            self._runner.run(self._load())
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        self._runner.run(self._stop())
        self._runner.close()

    async def _stop(self) -> None:
        if self._answering is not None and not self._answering.done():  # SIGTERM has left it behind
            self._answering.cancel()
            await asyncio.gather(self._answering, return_exceptions=True)
        await self._engine.stop()

    async def _load(self) -> None:
        await self._engine.start()
        await self._engine.wait_ready()

    async def _answer_all(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], on_answer: OnAnswer
    ) -> list[Answer]:
        self._answering = asyncio.current_task()
        free = asyncio.Semaphore(self._at_once)

        async def answer(prompt: Sequence[int], params: SamplingParams) -> Answer:
            async with free:
                found = await self._one(prompt, params)
            on_answer(len(found.token_ids))
            return found

        work = [asyncio.ensure_future(answer(*each)) for each in zip(prompts, sampling, strict=True)]
        try:
            return list(await asyncio.gather(*work))
        finally:
            for each in work:
                each.cancel()
            await asyncio.gather(*work, return_exceptions=True)

    async def _one(self, prompt: Sequence[int], sampling: SamplingParams) -> Answer:
        request = Request(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            arrival_s=time.monotonic(),
        )
        token_ids: list[int] = []
        texts: list[str] = []
        finish = None
        async with self._engine.submit(request) as stream:
            async for output in stream:
                for delta in output.deltas:
                    token_ids += delta.token_ids
                    texts.append(delta.text)
                    finish = delta.finish_reason
        return Answer(token_ids=tuple(token_ids), text="".join(texts), ended=finish is FinishReason.STOP)


def read_arguments(arguments: Sequence[str]) -> tuple[DistillArguments, EngineConfig] | None:
    """The flags; None: help was asked for. Raises UsageError that names every problem."""
    own, rest = _own_parser().parse_known_args(arguments)
    if own.help:
        return None
    problems = []
    if own.output_dir is None:
        problems.append("-o is missing; it names the folder where everything goes")
    if own.prompts is not None and own.from_traffic is not None:
        problems.append("--prompts and --from-traffic exclude each other: both are given")
    findings = engine_settings(PROG, rest)
    findings.problems[:0] = problems
    config = engine_config(findings)
    return _own(own), config


def _own(own: argparse.Namespace) -> DistillArguments:
    return DistillArguments(
        output=Path(own.output_dir),
        tokens=own.tokens,
        prompts=maybe(Path, own.prompts),
        traffic=maybe(Path, own.from_traffic),
        only_conversations=own.only_conversations,
        block=own.block,
        epochs=own.epochs,
        hours=own.hours,
        draft_vocab_size=own.draft_vocab_size,
        steps=own.draft_steps or (_BLOCK_STEPS if own.block else _HEAD_STEPS),
        rows=own.batch_tokens,
        int8=own.head_dtype == "int8",
        seed=own.seed,
    )


def _own_parser() -> CommandParser:
    parser = CommandParser(PROG)
    add: Any = parser.add_argument
    add("--output-dir", "-o")
    add("--tokens", type=_count)
    add("--prompts")
    add("--from-traffic")
    add("--only-conversations", action="store_true")
    add("--block", action="store_true")
    add("--epochs", type=_count, default=8)
    add("--hours", type=_hours)
    add("--draft-vocab-size", type=_count, default=8192)
    add("--draft-steps", type=_steps)
    add("--batch-tokens", type=_count, default=1024)
    add("--head-dtype", choices=("int8", "bfloat16"), default="int8")
    add("--seed", type=int, default=0)
    add("--help", "-h", action="store_true")
    return parser
