"""Compares a policy with the best other policy, chosen on held-out rounds.

The largest of several noisy medians overestimates the best policy: among identical policies one always wins. So
the rival in each round is the policy that was fastest in all other rounds, and only its run in this round is
compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from faser.bench.campaign import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One cell. rivals: one per round.

    ratio: the policy's speed divided by its rival's, median over rounds. lowest, highest: over rounds.
    """

    concurrency: int
    temperature: float
    ratio: float
    lowest: float
    highest: float
    rivals: tuple[str, ...]


def against_rivals(runs: Sequence[Run], policy: str) -> list[Comparison]:
    """One comparison per cell with at least two rounds, in the order of measurement."""
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
    """The fastest policy in the other rounds, of those measured in this round; None: there is none."""
    others = [rates for at, rates in rounds.items() if at != number]
    medians = {
        name: median(rates[name] for rates in others if name in rates)
        for name in rounds[number]
        if name != policy and any(name in rates for rates in others)
    }
    return max(medians, key=medians.__getitem__, default=None)
