"""The flags of `faser distill`: its own, and those of `faser serve` about the model and its engine."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faser.config.declaration import settings_of
from faser.config.engine import EngineConfig
from faser.config.environment import flag_environment
from faser.config.sources import CommandParser, add_environment, parse, settle

PROG = "faser distill"

HELP = """usage: faser distill [MODEL] -o DIR [flags]

Make a head that drafts for a model, from nothing but the model: it asks itself questions and answers them, and a
head of one layer learns to say what it says. Text never leaves the machine. The head is in the format of
`speculators`; serve it with --speculative-config '{"model": "DIR"}'.

  MODEL                   a directory, .gguf file or hub id [the embedded SmolLM2-135M-Instruct]
  -o, --output-dir DIR    where everything goes; run again, it goes on from what is there
  --tokens N              tokens of answers to learn from, such as 500k [1m]
  --prompts FILE          questions to answer instead: JSON lines, or one question a line
  --from-traffic FILE     conversations to learn from as they are: JSON lines with messages and answer
  --only-conversations    end when the answers are there
  --epochs N              how often each answer is learned [8]
  --hours H               learn for so long instead; the answers are made before
  --draft-vocab-size N    most frequent tokens, which the head can draft [8192]
  --draft-steps N         tokens of a draft that are learned together [3]
  --batch-tokens N        tokens of answers in a step of the training [1024]
  --head-dtype TYPE       of the stored head: int8 or bfloat16 [int8]
  --seed N                of questions, answers and weights [0]

Stop it at any time, with Ctrl-C or SIGTERM: run again, it goes on.

Flags of faser serve about the model and the engine may follow: faser serve --help=all."""

_DEFAULT_TOKENS = 1_000_000
_MOST_STEPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillArguments:
    """What the command is asked. tokens: of answers; None: not stated. prompts, traffic: one at most."""

    output: Path
    tokens: int | None
    prompts: Path | None
    traffic: Path | None
    only_conversations: bool
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
    settings = settings_of(EngineConfig)
    parsed = parse(PROG, rest, settings)
    parsed.findings.problems[:0] = problems
    add_environment(
        parsed.findings, settings, lambda each: (flag_environment(each)[0], [])
    )  # variables may be a server's
    (config,) = settle(parsed.findings, (EngineConfig,))
    return _own(own), config


def _own(own: argparse.Namespace) -> DistillArguments:
    return DistillArguments(
        output=Path(own.output_dir),
        tokens=own.tokens,
        prompts=None if own.prompts is None else Path(own.prompts),
        traffic=None if own.from_traffic is None else Path(own.from_traffic),
        only_conversations=own.only_conversations,
        epochs=own.epochs,
        hours=own.hours,
        draft_vocab_size=own.draft_vocab_size,
        steps=own.draft_steps,
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
    add("--epochs", type=_count, default=8)
    add("--hours", type=_hours)
    add("--draft-vocab-size", type=_count, default=8192)
    add("--draft-steps", type=_steps, default=3)
    add("--batch-tokens", type=_count, default=1024)
    add("--head-dtype", choices=("int8", "bfloat16"), default="int8")
    add("--seed", type=int, default=0)
    add("--help", "-h", action="store_true")
    return parser


def _hours(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"it is {text}; it must be a number of hours above 0")
    return number


def _steps(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_STEPS:
        raise argparse.ArgumentTypeError(
            f"it is {text}; it must be a whole number of at least 1 and at most {_MOST_STEPS}"
        )
    return int(text)


def _count(text: str) -> int:
    units = {"k": 1_000, "m": 1_000_000}
    unit = units.get(text[-1:].lower(), 1)
    try:
        number = float(text[:-1] if unit > 1 else text) * unit
    except ValueError:
        number = math.nan
    if not (1 <= number < math.inf and number == int(number)):
        raise argparse.ArgumentTypeError(f"it is {text}; it must be a whole number of at least 1, like 500k or 2m")
    return int(number)
