"""The flags of `faser bench spec`."""

import argparse
import math

from faser.cli.flags.parser import CommandParser

PROG = "faser bench spec"
_DESCRIPTION = (
    "Measure a model and its drafter at several concurrencies, with several policies, and write a report."
)
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
    values = [int(each) for each in text.split(",") if each]
    if not values or min(values) < 1:
        raise argparse.ArgumentTypeError(f"it is {text}; it must be numbers of at least 1, like 1,2,4")
    return values


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"it is {text}; it must be at least 1")
    return value


def _temperature(text: str) -> float:
    if not 0 <= (value := float(text)) <= 2:
        raise argparse.ArgumentTypeError(f"it is {text}; it must be at least 0 and at most 2")
    return value


def _share(text: str) -> float:
    if not 0 <= (value := float(text)) < 1:
        raise argparse.ArgumentTypeError(f"it is {text}; it must be at least 0 and below 1")
    return value


def _seconds(text: str) -> float:
    if not 0 <= (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"it is {text}; it must be a number of at least 0")
    return value


def _texts(text: str) -> list[str]:
    return [each for each in text.split(",") if each]
