"""The flags of `faser distill`: its own, and those of `faser serve` about the model and its engine."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faser.config.engine import EngineConfig
from faser.config.sources import CommandParser, engine_config, engine_settings, number

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


_hours = number(float, "a number of hours above 0", lambda found: 0 < found < math.inf)
_steps = number(
    int, f"a whole number of at least 1 and at most {_MOST_STEPS}", lambda found: 1 <= found <= _MOST_STEPS
)


def _scaled(text: str) -> int:
    """500k is 500,000. Raises ValueError for what is no whole number."""
    unit = {"k": 1_000, "m": 1_000_000}.get(text[-1:].lower(), 1)
    found = float(text[:-1] if unit > 1 else text) * unit
    if not found.is_integer():
        raise ValueError(text)
    return int(found)


_count = number(_scaled, "a whole number of at least 1, like 500k or 2m", lambda found: found >= 1)


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
    findings = engine_settings(PROG, rest)
    findings.problems[:0] = problems
    config = engine_config(findings)
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
