"""The guard in made-up traffic: time of the better side over the time taken, and how often its bound holds.

    python -m benchmarks speculation.guard_regret OUT.json [--seeds 20] [--first-seed 0] [--runs 1000]
                                                  [--only TEXT] [--beside OLDER_GUARD.py]

The guard alone, asked and told as the engine does, in steps whose tokens are drawn, whose times vary by 6 % from
step to step, stall in one of a hundred, and drift by a fifth within ten seconds. A step without drafts takes
2.6 ms and .4 ms a sequence, one with drafts 1.15 times as long; drafts bring `gain` times the tokens per second.

    steady      1, 4, 16 or 32 sequences
    sparse      answers of 60 tokens at 1 sequence, one in two minutes
    ramp        1, 2, 4 … 32 sequences, 10 seconds each
    flutter     15 and 16 sequences in turns of 7 steps
    copying     one request among 15, whose drafts alone are accepted; or every other ten seconds, else 7 % lost
    lying       8 and 15 sequences in turns of 50 steps, whose time the table has 20 % too long and too short
    prompts     every third step computes a prompt as well, and drafts lose a tenth in it
    change      30 seconds each of one gain and of another one
    bursts      1 sequence: 150 tokens at 3 a step, then 300 at 1.05, on average; compared with drafts at all times

`start` counts a case from a start without any knowledge (of a steady one, its first 60 seconds), `late` what comes
after 60 seconds of it, for another 60 at least. --beside: a module with an older Guard, which is told the time:
git show 8eaf41da^:faser/engine/control/speculation/guard.py. coverage: runs of 30 seconds in which what drafts
have saved was within the bound at every one of 50 moments.
"""

import math
import runpy
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.runner import about, command_line, write_json
from faser.engine.control.speculation.guard import Guard, GuardedStep

GAINS = (0.93, 0.97, 1.03, 1.07, 1.15, 1.25, 2.0)
PRICE, STALLS, NOISE, DRIFT = 1.15, 0.01, 0.06, 0.01
Scenario = Callable[["Traffic"], None]


class Traffic:
    """Steps, one by one. Sums of seconds: taken, those of the better side, and those that drafts have saved."""

    def __init__(self, seed: int, older: Any = None) -> None:
        """older: class of a guard that reads the time from here."""
        self.seed = seed
        self.guard = Guard(seed=seed) if older is None else older(self, seed=seed)
        self._knows_prompts = older is None
        self.time_s = self.best_s = self.lost_s = self.saved_s = self.slow = 0.0
        self.last_allowed = True
        self._random = np.random.default_rng(seed)
        self._unseen: list[tuple[GuardedStep, int, float]] = []

    def now(self) -> float:
        return self.time_s

    @property
    def efficiency(self) -> float:
        return self.best_s / (self.best_s + self.lost_s)

    def forget(self) -> None:
        self.best_s = self.lost_s = 0.0

    def step(
        self,
        count: int,
        gain: float,
        *,
        lie: float = 1.0,
        prompts: bool = False,
        copies: bool = False,
        best: float | None = None,
    ) -> int:
        """Run a step. Returns its tokens.

        lie: times as long as the step takes, by the table. copies: one sequence gets all that is accepted. best:
        what to compare with, as a gain; None: the better side.
        """
        random = self._random
        plain_s = 0.0026 + 0.0004 * count + 0.03 * prompts
        if prompts and not self._knows_prompts:
            drafts = self.last_allowed  # it was not asked, and the step drafted as those around it
            step = None
        else:
            drafts = self.guard.allows(count, prompts=True) if prompts else self.guard.allows(count)
            step = GuardedStep(num_sequences=count, drafts=drafts, plain_s=lie * plain_s, prompts=prompts)
            self.guard.launched(step)
        self.last_allowed = drafts
        self.slow = 0.999 * self.slow + DRIFT * random.normal()
        now_s = plain_s * math.exp(self.slow)
        price = max(PRICE, 1.02 / gain) if drafts else 1.0
        each = gain * price if drafts else 1.0
        most = 2 * count * (each - 1)
        accepted = random.poisson(most / 2) if not copies else round(random.uniform(0, most))
        tokens = count + (int(accepted) if drafts else 0)
        taken_s = price * now_s
        best_s = each * now_s / (best or max(gain, 1.0))
        self.best_s, self.lost_s = self.best_s + best_s, self.lost_s + taken_s - best_s
        measured_s = taken_s * math.exp(NOISE * random.normal()) + 3 * plain_s * (random.random() < STALLS)
        self.time_s += measured_s
        if drafts:
            self.saved_s += tokens / count * now_s - taken_s
        if step is not None:
            self._unseen.append((step, tokens, measured_s))
            if len(self._unseen) > 1:
                self.guard.observe(*self._unseen.pop(0))
        return tokens


def lasting(seconds: float, count: int, gain: float) -> Scenario:
    def run(traffic: Traffic) -> None:
        until_s = traffic.time_s + seconds
        while traffic.time_s < until_s:
            traffic.step(count, gain)

    return run


def one_after_another(*parts: Scenario) -> Scenario:
    def run(traffic: Traffic) -> None:
        for part in parts:
            part(traffic)

    return run


def sparse(gain: float) -> Scenario:
    def run(traffic: Traffic) -> None:
        for _ in range(60):
            for _ in range(round(60 / (gain * PRICE))):
                traffic.step(1, gain)
            traffic.time_s += 120

    return run


def copying(traffic: Traffic) -> None:
    for _ in range(7000):
        traffic.step(15, 1.1, copies=True)


def copying_at_times(traffic: Traffic) -> None:
    for _ in range(3):
        lasting(10, 15, 0.93)(traffic)
        lasting(10, 15, 1.1)(traffic)


def bursts(traffic: Traffic) -> None:
    """Tokens of successive steps are alike here, so a step's tokens foretell those of the next ones."""
    copies, random = False, np.random.default_rng(traffic.seed)
    for _ in range(20_000):
        gain = (3 if copies else 1.05) / PRICE
        tokens = traffic.step(1, gain, best=gain)
        if random.random() < tokens / (150 if copies else 300):
            copies = not copies


def lying(gain: float) -> Scenario:
    def run(traffic: Traffic) -> None:
        for number in range(8000):
            count, lie = ((8, 1.2), (15, 0.8))[number // 50 % 2]
            traffic.step(count, gain, lie=lie)

    return run


def with_prompts(gain: float) -> Scenario:
    def run(traffic: Traffic) -> None:
        for number in range(6000):
            prompts = number % 3 == 0
            traffic.step(16, 0.9 if prompts else gain, prompts=prompts)

    return run


def flutter(gains: tuple[float, float]) -> Scenario:
    def run(traffic: Traffic) -> None:
        for number in range(6000):
            at = number // 7 % 2
            traffic.step((15, 16)[at], gains[at])

    return run


def ramp(*gains: float) -> Scenario:
    return one_after_another(*(lasting(10, 1 << at, gain) for at, gain in enumerate(gains)))


def scenarios() -> dict[str, Scenario]:
    found = {f"steady at {count}, {gain}": lasting(60, count, gain) for count in (1, 4, 16, 32) for gain in GAINS}
    found |= {f"sparse, {gain}": sparse(gain) for gain in (0.93, 1.05, 1.23)}
    found["bursts"] = bursts
    found |= {"one copies among 15": copying, "one among 15 copies at times": copying_at_times}
    found |= {f"lying table, {gain}": lying(gain) for gain in (0.93, 0.97, 1.03, 1.15)}
    found |= {f"beside prompts, {gain}": with_prompts(gain) for gain in (1.03, 1.15)}
    found |= {"flutter, 1.02 and 0.97": flutter((1.02, 0.97)), "flutter, 0.94 and 0.93": flutter((0.94, 0.93))}
    found["ramp, 1.23 … 0.92"] = ramp(1.23, 1.15, 1.08, 1.0, 0.95, 0.92)
    found["ramp, all 0.93"] = ramp(*[0.93] * 6)
    for count in (1, 16):
        for one, other in ((2.2, 0.93), (0.93, 2.2), (1.2, 0.93), (0.93, 1.2)):
            found[f"change at {count}, {one} to {other}"] = one_after_another(
                lasting(30, count, one), lasting(30, count, other)
            )
    return found


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=20, help="runs of each case (default 20)")
    parser.add_argument("--first-seed", type=int, default=0, help="the other seeds follow it (default 0)")
    parser.add_argument("--only", default="", help="cases whose names contain this text (default: all)")
    parser.add_argument("--runs", type=int, default=1000, help="runs for the coverage (default 1000)")
    parser.add_argument("--beside", type=Path, help="a module with an older Guard")
    options = parser.parse_args()
    older = None if options.beside is None else runpy.run_path(str(options.beside))["Guard"]
    cases: dict[str, dict[str, float]] = {}
    first = options.first_seed
    for name, scenario in scenarios().items():
        if options.only not in name:
            continue
        start, late, before = [], [], []
        for seed in range(first, first + options.seeds):
            traffic = Traffic(seed)
            scenario(traffic)
            start.append(traffic.efficiency)
            while traffic.time_s < 60:
                scenario(traffic)
            traffic.forget()
            scenario(traffic)
            late.append(traffic.efficiency)
            if older is not None and seed < first + 5:
                traffic = Traffic(seed, older)
                scenario(traffic)
                before.append(traffic.efficiency)
        cases[name] = {**_summary("start", start), **_summary("late", late)}
        if before:
            cases[name] |= {"older guard, start": round(fmean(before), 4)}
        print(name, *cases[name].values(), sep="\t", flush=True)
    covered = [
        _is_covered(seed, (1, 4, 16)[seed % 3], GAINS[seed % len(GAINS)])
        for seed in range(first, first + options.runs)
    ]
    write_json(
        options.out,
        {
            **about("speculation.guard_regret"),
            "unit": "time of the better side over the time taken",
            "cases": cases,
            "coverage": {"runs": options.runs, "bound held throughout": round(fmean(covered), 4)}
            if covered
            else None,
        },
    )


def _summary(name: str, found: list[float]) -> dict[str, float]:
    return {name: round(fmean(found), 4), f"{name}, worst run": round(min(found), 4)}


def _is_covered(seed: int, count: int, gain: float) -> bool:
    """Oracle: what the world's own rule says of the steps in the groups that are over."""
    traffic, true_s, before = Traffic(seed), 0.0, 0.0
    holds = True
    for _ in range(50):
        lasting(0.6, count, gain)(traffic)
        balance = traffic.guard.balance()
        if balance.saved_s != before:
            before, true_s = balance.saved_s, traffic.saved_s
        holds &= abs(true_s - balance.saved_s) <= balance.error_s
    return holds
