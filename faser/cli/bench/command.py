"""`faser bench spec [MODEL]`: every drafter at hand next to no speculation, on your prompts and this machine."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from faser import __version__
from faser.cli.bench.comparison import Comparison, Load, Measured
from faser.cli.bench.drafters import GivenAcceptance, built_arms, policies_of, wanted_drafters
from faser.cli.bench.prompts import BenchPrompt, fitting_prompts, read_prompts, read_questions
from faser.cli.bench.report import about_machine, console, tables, write_json, write_picture
from faser.cli.console import runs_bar
from faser.config.declaration import did_you_mean
from faser.config.sources import CommandParser, UsageError, number, whole_number
from faser.config.speculation_keys import read_rates
from faser.engine.text.tokenizer import load_tokenizer
from faser.errors import ConfigError

PROG = "faser bench spec"

_HELP = """usage: faser bench spec [MODEL] [flags]

Compare drafters with no speculation on this machine, with your prompts, and check that drafts change no answer.
Without flags: every drafter that comes with FASER or with the model's checkpoint.

  MODEL                   a directory, .gguf file or hub id [the embedded SmolLM2-135M-Instruct]

Prompts and load
  --prompts FILE          JSON lines as in Spec-Bench, or one text per line [built-in prompts]
  --max-prompt-tokens N   leave out longer prompts
  --concurrency N,N       requests at a time [1,4,16]
  --temperature X,X       of all requests; seeded [0]
  --output-tokens N       most tokens of an answer [128]
  --ignore-eos            go on to that length after the end of an answer
  --rounds N              drafters take turns in each; the table has medians and 95 % intervals [3]

What is compared; off, an engine without speculation, always is
  --drafters NAME,NAME    default, ngram_model, mtp, text (the request's own and past answers), or the names of
                          further ones [all at hand]
  --speculative-config JSON
                          one more drafter, such as {"model": "HEAD"} or {"model": "DRAFT"}; may be repeated
  --policies NAME,NAME    of each drafter, such as fixed:3,faser [that of its configuration]
  --acceptance X,X        one more drafter, 'given', to plan with: the share of its drafts that are right up to the
                          first, second, … token, such as 0.8,0.6,0.4 (as in synthetic_acceptance_rates). It drafts
                          the answers of off with mistakes at random, so answers stay exact, and verification
                          takes its real time
  --draft-ms X            with --acceptance: what drafting takes before each step, in milliseconds [0]

Results
  --output FILE.json      everything that was measured, also by request; the table as a picture goes to FILE.svg
  --plot FILE.svg         the picture elsewhere

Each drafter loads the model once. Flags of faser serve about the model and the engine may follow: faser serve
--help=all. The exit status is 1 if an answer differs from the one without drafts."""

_KINDS = {"spec": "drafters next to no speculation, over load and temperature, on your prompts"}
_VLLM_KINDS = ("serve", "latency", "throughput", "sweep", "startup", "mm-processor")

_concurrency = number(int, "numbers of at least 1, like 1,2,4", lambda found: found >= 1)
_temperature = number(float, "a number of at least 0 and at most 2", lambda found: 0 <= found <= 2)
_draft_ms = number(float, "a number of milliseconds from 0 to 10000", lambda found: 0 <= found <= 10_000)


def bench(arguments: Sequence[str]) -> int:
    """Run one kind of measurement; returns its exit status. Raises UsageError for an unknown kind."""
    if not arguments or arguments[0] in ("-h", "--help"):
        lines = "\n".join(f"  {kind:<9} {what}" for kind, what in _KINDS.items())
        print(f"usage: faser bench WHAT …\n\n{lines}\n\nRun 'faser bench WHAT --help' for details.")
        return 0 if arguments else 2
    kind, rest = arguments[0], arguments[1:]
    if kind == "spec":
        return spec(rest)
    if kind in _VLLM_KINDS:
        raise UsageError([f"'bench {kind}' is known from vLLM but not supported by FASER {__version__}"])
    raise UsageError([f"unknown measurement '{kind}'.{did_you_mean(kind, _KINDS)} There are: {', '.join(_KINDS)}"])


def spec(arguments: Sequence[str]) -> int:
    """Measure, show and write; returns the exit status. Raises ConfigError before a model is loaded, if it can."""
    own, rest = own_parser().parse_known_args(list(arguments))
    if own.help:
        print(_HELP)
        return 0
    drafters = wanted_drafters(
        PROG,
        rest,
        max(own.concurrency),
        named=own.drafters,
        configs=own.speculative_config,
        acceptance=given_acceptance(own),
    )
    policies = policies_of(own.policies, drafters)
    if own.prompts is not None:
        read_questions(Path(own.prompts))  # a file that cannot be read is refused before a model is loaded
    picture = _picture_path(own)
    arms, directory = built_arms(drafters, policies)
    tokenizer = load_tokenizer(Path(drafters[0].config.tokenizer or directory))
    prompts = fitting_prompts(read_prompts(own.prompts, tokenizer), own.max_prompt_tokens)
    comparison = Comparison(
        arms=arms,
        prompts=prompts,
        output_tokens=own.output_tokens,
        rounds=own.rounds,
        ignore_eos=own.ignore_eos,
    )
    measured = _measured(
        comparison, [Load(temperature=t, concurrency=n) for t in own.temperature for n in own.concurrency]
    )
    shown = tables(measured, prompts)
    console().print(shown)
    _write(own, picture, arguments, measured, prompts, shown)
    return _verdict(measured)


def _measured(comparison: Comparison, loads: Sequence[Load]) -> list[Measured]:
    measured: list[Measured] = []
    with runs_bar() as bar:
        task = bar.add_task("", total=comparison.runs_per_load * len(loads))

        def on_run(run: str) -> None:
            bar.update(task, description=run)
            if not first:
                bar.advance(task)
            first.clear()

        first = ["of all runs"]
        for done, load in enumerate(loads, start=1):
            measured += comparison.under(load, on_run)
            if bar.disable:
                print(f"{load}: measured, {done} of {len(loads)} loads", file=sys.stderr, flush=True)
        bar.advance(task)
    return measured


def _verdict(measured: Sequence[Measured]) -> int:
    wrong, answers = sum(each.differing for each in measured), sum(each.num_answers for each in measured)
    if wrong:
        print(f"\n{wrong} OF {answers} ANSWERS DIFFER FROM THOSE WITHOUT DRAFTS.")
        return 1
    print(f"\nAll {answers} answers are token for token those without drafts.")
    return 0


def _write(
    own: argparse.Namespace,
    picture: Path | None,
    arguments: Sequence[str],
    measured: Sequence[Measured],
    prompts: Sequence[BenchPrompt],
    shown: RenderableType,
) -> None:
    if own.output is not None:
        about = {"command": shlex.join(["faser", "bench", "spec", *arguments]), **about_machine()}
        write_json(own.output, about, measured, prompts)
    if picture is not None:
        write_picture(picture, shown, PROG)


def _picture_path(own: argparse.Namespace) -> Path | None:
    """Choose the file of the picture. Raises ConfigError for files that cannot be written there."""
    for flag, path, ending in (("--output", own.output, ".json"), ("--plot", own.plot, ".svg")):
        if path is not None and path.suffix != ending:
            raise ConfigError(f"{flag} is {path}; it must be a file that ends in {ending}")
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{flag} is {path}; there is no folder {path.parent}")
    if own.plot is None and own.output is not None:
        return Path(own.output).with_suffix(".svg")
    return None if own.plot is None else Path(own.plot)


def given_acceptance(own: argparse.Namespace) -> GivenAcceptance | None:
    if own.acceptance is None:
        if own.draft_ms:
            raise UsageError(
                [f"--draft-ms is {own.draft_ms:g}; it is of a drafter of --acceptance, and there is none"]
            )
        return None
    return GivenAcceptance(rates=own.acceptance, draft_s=own.draft_ms / 1000)


def own_parser() -> CommandParser:
    parser = CommandParser(PROG)
    add: Any = parser.add_argument
    add("--prompts")
    add("--max-prompt-tokens", type=whole_number)
    add("--concurrency", type=_counts, default=[1, 4, 16])
    add("--temperature", type=_temperatures, default=[0.0])
    add("--output-tokens", type=whole_number, default=128)
    add("--ignore-eos", action="store_true")
    add("--rounds", type=whole_number, default=3)
    add("--drafters", type=_texts)
    add("--speculative-config", action="append", default=[])
    add("--policies", type=_texts)
    add("--acceptance", type=_rates)
    add("--draft-ms", type=_draft_ms, default=0.0)
    add("--output", type=Path)
    add("--plot", type=Path)
    add("--help", "-h", action="store_true")
    return parser


def _texts(text: str) -> list[str]:
    return [each for each in text.split(",") if each]


def _counts(text: str) -> list[int]:
    values = [_concurrency(each) for each in _texts(text)]
    if not values:
        raise argparse.ArgumentTypeError(f"it is {text!r}; it must be numbers of at least 1, like 1,2,4")
    return values


def _temperatures(text: str) -> list[float]:
    values = [_temperature(each) for each in _texts(text)]
    if not values:
        raise argparse.ArgumentTypeError(f"it is {text!r}; it must be numbers from 0 to 2, like 0,0.8")
    return values


def _rates(text: str) -> tuple[float, ...]:
    problems: list[str] = []
    try:
        values: Any = [float(each) for each in _texts(text)]
    except ValueError:
        values = text
    rates = read_rates(values, None, problems)
    if problems:
        raise argparse.ArgumentTypeError(f"it is {text}; it must be 1 to 32 numbers from 0 to 1 that never rise")
    return rates
