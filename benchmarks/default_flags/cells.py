"""The cells of the grid, the questions and salts of their runs, and how the runs of a cell become figures.

Pure functions of plain values.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.default_flags.clients import Answered, Asking
from benchmarks.paired import Estimate, ratio
from benchmarks.prompts import Prompt, take

FLOOR = "off"
STOP, FULL, AGAIN = "stop", "full", "again"
KINDS = {STOP: "ignore_eos off", FULL: "ignore_eos on", AGAIN: "asked again"}
REQUESTS = {1: 8, 2: 12, 4: 16, 8: 24, 16: 32, 32: 64}  # of a run, by requests at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """kind: of KINDS. `again` repeats a run of `full` with the salt it had, so both caches know its prompts."""

    concurrency: int
    temperature: float
    kind: str

    def asking(self, arm: str, round: int, max_tokens: int) -> Asking:
        """Runs that share a salt are those of `again` and the ones that they repeat."""
        asked_as = FULL if self.kind == AGAIN else self.kind
        return Asking(
            concurrency=self.concurrency,
            temperature=self.temperature,
            ignore_eos=self.kind != STOP,
            max_tokens=max_tokens,
            salt=f"{round}/{self.concurrency}/{self.temperature:g}/{asked_as}/{arm}",
        )

    def questions(self, prompts: tuple[Prompt, ...], round: int) -> tuple[Prompt, ...]:
        """Every round has others, until all have been asked; kinds and temperatures share them."""
        count = REQUESTS[self.concurrency]
        return take(prompts, round * count, count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One arm in one cell. Rates are output tokens a second, medians over rounds.

    ratio: over arm off. different: answers unlike those of arm off to the same request, of num_answers.
    """

    cell: Cell
    arm: str
    off_tokens_per_s: float
    tokens_per_s: float
    ratio: Estimate
    drafted: int
    accepted: int
    tokens: int
    different: int
    num_answers: int


def grid(concurrency: Sequence[int], temperatures: Sequence[float], kinds: Sequence[str]) -> Iterator[Cell]:
    """All cells in the order of a round: `again` follows the run that it repeats."""
    for count in concurrency:
        for temperature in temperatures:
            for kind in sorted(kinds, key=list(KINDS).index):
                yield Cell(concurrency=count, temperature=temperature, kind=kind)


def figures(cell: Cell, arm: str, runs: Sequence[Answered], off_runs: Sequence[Answered]) -> Figures:
    """runs, off_runs: of this arm and of arm off, by round."""
    rates, off_rates = ([run.tokens / run.seconds for run in each] for each in (runs, off_runs))
    pairs = [
        pair
        for mine, theirs in zip(runs, off_runs, strict=True)
        for pair in zip(mine.texts, theirs.texts, strict=True)
    ]
    return Figures(
        cell=cell,
        arm=arm,
        off_tokens_per_s=statistics.median(off_rates),
        tokens_per_s=statistics.median(rates),
        ratio=ratio(rates, off_rates),
        drafted=sum(run.drafted for run in runs),
        accepted=sum(run.accepted for run in runs),
        tokens=sum(run.tokens for run in runs),
        different=sum(mine != theirs for mine, theirs in pairs),
        num_answers=len(pairs),
    )
