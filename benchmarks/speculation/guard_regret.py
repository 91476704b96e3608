"""The guard in made-up traffic: time of the better side over the time taken, and how often its bound holds.

    python -m benchmarks.speculation.guard_regret OUT.json [--seeds 20] [--runs 1000]

The guard alone, asked and told as the engine does, in steps whose tokens are drawn, whose times vary by 6 % from
step to step, stall in one of a hundred, and drift by a fifth within ten seconds. A step without drafts takes
2.6 ms and .4 ms a sequence, one with drafts 1.15 times as long; drafts bring `gain` times the tokens per second.

    steady      60 seconds of 1, 4, 16 or 32 sequences; `late` counts what follows them, for another 60
    sparse      20 answers of 60 tokens at 1 sequence, from a start without any knowledge
    ramp        1, 2, 4 … 32 sequences, 10 seconds each
    flutter     15 and 16 sequences in turns of 7 steps
    change      30 seconds each of one gain and of another one

coverage: runs of 30 seconds in which what drafts have saved was within the bound at every one of 50 moments.
"""

import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import numpy as np

from benchmarks.runner import about, command_line, write_json
from faser.engine.control.speculation.guard import Guard, GuardedStep

GAINS = (0.93, 0.97, 1.03, 1.07, 1.15, 1.25, 2.0)
PRICE, STALLS, NOISE, DRIFT = 1.15, 0.01, 0.06, 0.01
Scenario = Callable[["Traffic"], None]


class Traffic:
    """Steps, one by one. Sums of seconds: taken, those of the better side, and those that drafts have saved."""

    def __init__(self, seed: int) -> None:
        self.guard = Guard(seed=seed)
        self.time_s = self.best_s = self.lost_s = self.saved_s = self.slow = 0.0
        self.since_s = 0.0  # saved in the group that is not over
        self._random = np.random.default_rng(seed)
        self._unseen: list[tuple[GuardedStep, int, float]] = []

    @property
    def efficiency(self) -> float:
        return self.best_s / (self.best_s + self.lost_s)

    def forget(self) -> None:
        self.best_s = self.lost_s = 0.0

    def step(self, count: int, gain: float) -> None:
        random = self._random
        plain_s, drafts = 0.0026 + 0.0004 * count, self.guard.allows(count)
        step = GuardedStep(num_sequences=count, drafts=drafts, plain_s=plain_s)
        self.guard.launched(step)
        self.slow = 0.999 * self.slow + DRIFT * random.normal()
        now_s = plain_s * math.exp(self.slow)
        price = max(PRICE, 1.02 / gain) if drafts else 1.0
        each = gain * price if drafts else 1.0
        tokens = count + (int(random.poisson(count * (each - 1))) if drafts else 0)
        taken_s = price * now_s
        best_s = each * now_s / max(gain, 1.0)
        self.best_s, self.lost_s = self.best_s + best_s, self.lost_s + taken_s - best_s
        measured_s = taken_s * math.exp(NOISE * random.normal()) + 3 * plain_s * (random.random() < STALLS)
        self.time_s += measured_s
        if drafts:
            self.saved_s += tokens / count * now_s - taken_s
        self._unseen.append((step, tokens, measured_s))
        if len(self._unseen) > 1:
            self.guard.observe(*self._unseen.pop(0))


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
        for _ in range(round(20 * 60 / (gain * PRICE))):
            traffic.step(1, gain)

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
    found = {f"sparse, {gain}": sparse(gain) for gain in (0.93, 1.05, 1.23)}
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
    parser.add_argument("--runs", type=int, default=1000, help="runs for the coverage (default 1000)")
    options = parser.parse_args()
    steady, others = [], {}
    for count in (1, 4, 16, 32):
        for gain in GAINS:
            start, late = [], []
            for seed in range(options.seeds):
                traffic = Traffic(seed)
                lasting(60, count, gain)(traffic)
                start.append(traffic.efficiency)
                traffic.forget()
                lasting(60, count, gain)(traffic)
                late.append(traffic.efficiency)
            cell = {"sequences": count, "gain": gain, **_summary("start", start), **_summary("late", late)}
            steady.append(cell)
            print(*cell.values(), sep="\t", flush=True)
    for name, scenario in scenarios().items():
        found = []
        for seed in range(options.seeds):
            traffic = Traffic(seed)
            scenario(traffic)
            found.append(traffic.efficiency)
        others[name] = _summary("all", found)
        print(name, *others[name].values(), sep="\t", flush=True)
    covered = [_is_covered(seed, (1, 4, 16)[seed % 3], GAINS[seed % len(GAINS)]) for seed in range(options.runs)]
    write_json(
        options.out,
        {
            **about("benchmarks.speculation.guard_regret"),
            "unit": "time of the better side over the time taken",
            "steady": steady,
            "others": others,
            "coverage": {"runs": options.runs, "bound held throughout": round(fmean(covered), 4)},
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


if __name__ == "__main__":
    main()
