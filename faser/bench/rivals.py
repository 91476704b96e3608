"""A policy against the best of the others, without the luck of the draw.

The fastest of many noisy medians is faster than it really is: of policies that do the very same, one always won.
So the rival of each round is the policy that was best in all the other rounds, and only its run in this one, made
under the same conditions of the machine, is compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from faser.bench.campaign import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One cell. ratio: median over rounds of the policy's speed over its rival's; lowest, highest: of the rounds.

    rivals: one a round.
    """

    concurrency: int
    temperature: float
    ratio: float
    lowest: float
    highest: float
    rivals: tuple[str, ...]


def against_rivals(runs: Sequence[Run], policy: str) -> list[Comparison]:
    """By cell, in the order in which they were first measured; without those that have fewer than two rounds."""
    cells: dict[tuple[float, int], dict[int, dict[str, float]]] = {}
    for each in runs:
        rounds = cells.setdefault((each.temperature, each.concurrency), {})
        rounds.setdefault(each.round, {})[each.policy] = each.tokens_per_s
    found = []
    for (temperature, concurrency), rounds in cells.items():
        chosen = {number: _rival(rounds, number, policy) for number, rates in rounds.items() if policy in rates}
        ratios = [rounds[at][policy] / rounds[at][rival] for at, rival in chosen.items() if rival is not None]
        if ratios:
            found.append(
                Comparison(
                    concurrency=concurrency,
                    temperature=temperature,
                    ratio=median(ratios),
                    lowest=min(ratios),
                    highest=max(ratios),
                    rivals=tuple(rival for rival in chosen.values() if rival is not None),
                )
            )
    return found


def _rival(rounds: Mapping[int, Mapping[str, float]], number: int, policy: str) -> str | None:
    """The fastest in the other rounds of those that ran in this one; None: nobody did both."""
    others = [rates for at, rates in rounds.items() if at != number]
    medians = {
        name: median(rates[name] for rates in others if name in rates)
        for name in rounds[number]
        if name != policy and any(name in rates for rates in others)
    }
    return max(medians, key=medians.__getitem__, default=None)
