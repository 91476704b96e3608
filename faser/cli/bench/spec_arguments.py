"""The flags of `faser bench spec`."""

import argparse
import contextlib
import math
from collections.abc import Callable
from typing import TypeVar

from faser.cli.flags.parser import CommandParser

PROG = "faser bench spec"
_DESCRIPTION = (
    "Measure a model and its drafter at several concurrencies, with several policies, and write a report."
)
Number = TypeVar("Number", int, float)
_POLICIES = "off,fixed:1,fixed:3,fixed:5,fixed:7,goodput,survival,faser"


def spec_parser() -> CommandParser:
    parser = CommandParser(PROG, description=_DESCRIPTION)
    add = parser.add_argument
    add("MODEL", nargs="?", help="directory, GGUF file or hub id [the embedded model]")
    add("--help", "-h", action="store_true")
    add("--speculative-config", default="{}", metavar="JSON", help="which drafter, as for faser serve")
    add("--spec-overlap", choices=("auto", "on", "off"), default="auto", help="as for faser serve [auto]")
    add("--early-prune", choices=("auto", "on", "off"), default="off", help="as for faser serve [off]")
    add("--prompts", metavar="FILE", help="JSON lines as in Spec-Bench, or one text per line [built-in prompts]")
    add("--categories", type=_texts, default=[], help="use only prompts of these categories [all]")
    add("--max-prompt-tokens", type=_count, help="leave out longer prompts")
    add("--concurrency", type=_numbers, default=[1, 2, 4, 8, 16, 32], help="requests at a time [1,2,4,8,16,32]")
    add("--policies", type=_texts, default=_texts(_POLICIES), help=f"[{_POLICIES}]")
    add("--temperature", type=_temperature, nargs="+", default=[0.0, 1.0], help="[0 1]")
    add("--output-tokens", type=_count, default=64, help="length of every answer [64]")
    add("--rounds", type=_count, default=3, help="rounds; the report has their medians [3]")
    add(
        "--drop-below",
        type=_share,
        default=0.0,
        metavar="SHARE",
        help="skip further rounds of a policy slower than this share of the best in a cell's first round [0]",
    )
    add("--min-seconds", type=_seconds, default=3.0, help="minimum duration of a run without speculation [3]")
    add("--include-prefill", action="store_true", help="compute the prompts in every run, and measure that too")
    add("--dtype", default="auto")
    add("--num-threads", type=_count)
    add("--out", metavar="DIR", help="folder for result.json, report.md and plots")
    add("--resume", action="store_true", help="continue the campaign in --out")
    return parser


def _numbers(text: str) -> list[int]:
    values = [_read(each, int, "numbers of at least 1, like 1,2,4", lambda n: n >= 1) for each in _texts(text)]
    if not values:
        raise argparse.ArgumentTypeError(f"it is {text!r}; it must be numbers of at least 1, like 1,2,4")
    return values


def _count(text: str) -> int:
    return _read(text, int, "a whole number of at least 1", lambda n: n >= 1)


def _temperature(text: str) -> float:
    return _read(text, float, "a number of at least 0 and at most 2", lambda number: 0 <= number <= 2)


def _share(text: str) -> float:
    return _read(text, float, "a number of at least 0 and below 1", lambda number: 0 <= number < 1)


def _seconds(text: str) -> float:
    return _read(text, float, "a number of at least 0", lambda number: 0 <= number < math.inf)


def _read(text: str, kind: Callable[[str], Number], limits: str, within: Callable[[Number], bool]) -> Number:
    """The number in a text. Raises ArgumentTypeError, which names the limits, for any other text or number."""
    with contextlib.suppress(ValueError):
        if within(number := kind(text)):
            return number
    raise argparse.ArgumentTypeError(f"it is {text}; it must be {limits}")


def _texts(text: str) -> list[str]:
    return [each for each in text.split(",") if each]
