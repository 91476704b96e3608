"""The command line of the grid."""

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.default_flags.cells import AGAIN, FLOOR, FULL, KINDS, REQUESTS, Cell, grid

_ARMS = {"default": (), FLOOR: ("--speculative-policy", "off")}
_CATEGORIES = {"all": (), "copying": ("summarization", "rag")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to measure. arms: flags by name; FLOOR is among them. categories: of questions; none given, all.

    beside_load: busy processes beside everything that is measured.
    """

    questions: Path
    out: Path
    cells: tuple[Cell, ...]
    arms: Mapping[str, tuple[str, ...]]
    server_flags: tuple[str, ...]
    model: str | None
    categories: tuple[str, ...]
    rounds: int
    max_tokens: int
    beside_load: int

    @property
    def num_runs(self) -> int:
        return self.rounds * len(self.cells) * len(self.arms)

    def flags(self, arm: str) -> tuple[str, ...]:
        """All that `faser serve` is told in this arm, but its port."""
        return (*([self.model] if self.model else []), *self.server_flags, *self.arms[arm])


def wanted_of(arguments: Sequence[str], *, description: str | None = None) -> Wanted:
    """Exits with a message where the arguments make no sense."""
    parser = _parser(description)
    given = parser.parse_args(arguments)
    if AGAIN in given.kinds and FULL not in given.kinds:
        parser.error(f"--kinds: {AGAIN} repeats {FULL}; name both")
    arms = dict(given.arm) or {"default": _ARMS["default"]}
    return Wanted(
        questions=given.questions,
        out=given.out,
        cells=tuple(grid(given.concurrency, given.temperatures, given.kinds)),
        arms={**arms, FLOOR: arms.get(FLOOR, _ARMS[FLOOR])},
        server_flags=tuple(shlex.split(given.server_args)),
        model=given.model,
        categories=_CATEGORIES[given.prompts],
        rounds=given.rounds,
        max_tokens=given.max_tokens,
        beside_load=given.beside_load,
    )


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.default_flags",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("questions", type=Path, metavar="QUESTIONS", help="JSON lines with question_id, category and turns")
    add("out", type=Path, metavar="OUT.json", help="a table comes next to it as OUT.md")
    add("--rounds", type=_positive, default=5, help="[5]")
    add("--concurrency", type=_counts, default=(1, 4, 16), help="requests at once, comma-separated [1,4,16]")
    add("--temperatures", type=_temperatures, default=(0.0,), help="comma-separated [0]")
    add("--kinds", type=_kinds, default=tuple(KINDS), help=f"comma-separated [{','.join(KINDS)}]")
    add("--max-tokens", type=_positive, default=128, help="of an answer [128]")
    add("--prompts", choices=_CATEGORIES, default="all", help="copying: summarization and rag only [all]")
    add("--beside-load", type=_not_negative, default=0, metavar="N", help="busy processes beside all runs [0]")
    add("--model", help="of every arm [the default model]")
    add("--server-args", default="", metavar="FLAGS", help="more flags of `faser serve` for every arm")
    add(
        "--arm",
        type=_arm,
        action="append",
        default=[],
        metavar="NAME=FLAGS",
        help=f"an arm instead of `default`; may be repeated. {FLOOR} is always there",
    )
    return parser


def _arm(text: str) -> tuple[str, tuple[str, ...]]:
    name, equals, flags = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"it is {text!r}; it must be NAME=FLAGS, where FLAGS may be empty")
    return name, tuple(shlex.split(flags))


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(each) for each in text.split(","))
    if unknown := sorted(set(counts) - set(REQUESTS)):
        raise argparse.ArgumentTypeError(f"{unknown} not among {', '.join(map(str, REQUESTS))}")
    return counts


def _temperatures(text: str) -> tuple[float, ...]:
    return tuple(float(each) for each in text.split(","))


def _kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(text.split(","))
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} not among {', '.join(KINDS)}")
    return kinds


def _positive(text: str) -> int:
    return _at_least(text, 1)


def _not_negative(text: str) -> int:
    return _at_least(text, 0)


def _at_least(text: str, least: int) -> int:
    if int(text) < least:
        raise argparse.ArgumentTypeError(f"it is {text}; it must be at least {least}")
    return int(text)
