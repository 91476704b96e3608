"""The report of a campaign: medians over rounds, tables, and the result file from which a campaign resumes."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from faser.bench.campaign import Run
from faser.bench.rivals import Comparison, against_rivals
from faser.bench.runner import StepPoint
from faser.errors import ConfigError

RESULT = "result.json"
OFF, FASER = "off", "faser"
_FORMAT = 1
BAND = 0.1  # the largest median error of predicted step times that the report accepts


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One policy in one cell, medians over rounds. speed_up: over policy off in the same round; None: no such run.

    median_step_error: median of |predicted - measured| / measured over the kept steps; None: no predictions.
    """

    policy: str
    concurrency: int
    temperature: float
    rounds: int
    tokens_per_s: float
    slowest: float
    fastest: float
    speed_up: float | None
    gamma_mean: float
    acceptance: float | None
    drafted: int
    verified: int
    accepted: int
    survivals: tuple[float | None, ...]
    median_step_error: float | None
    decide_share: float
    mismatches: int
    num_answers: int


def summaries(runs: Sequence[Run]) -> list[Summary]:
    """One summary per temperature, concurrency and policy, in the order of measurement."""
    groups: dict[tuple[float, int, str], list[Run]] = {}
    for each in runs:
        groups.setdefault((each.temperature, each.concurrency, each.policy), []).append(each)
    off_speeds = {each.key: each.tokens_per_s for each in runs if each.policy == OFF}
    return [_summary(group, off_speeds) for group in groups.values()]


def _summary(group: list[Run], off_speeds: dict[tuple[float, int, str, int], float]) -> Summary:
    """off_speeds: tokens per second of policy off, by the key of the run."""
    keys = [(each.temperature, each.concurrency, OFF, each.round) for each in group]
    ratios = [
        each.tokens_per_s / off_speeds[key] for each, key in zip(group, keys, strict=True) if key in off_speeds
    ]
    rates = [each.tokens_per_s for each in group]
    verified, accepted = sum(each.verified for each in group), sum(each.accepted for each in group)
    points = [point for each in group for point in each.points if point.predicted_s > 0 and point.measured_s > 0]
    errors = [abs(point.predicted_s - point.measured_s) / point.measured_s for point in points]
    first = group[0]
    return Summary(
        policy=first.policy,
        concurrency=first.concurrency,
        temperature=first.temperature,
        rounds=len(group),
        tokens_per_s=median(rates),
        slowest=min(rates),
        fastest=max(rates),
        speed_up=median(ratios) if ratios else None,
        gamma_mean=median(each.gamma_mean for each in group),
        acceptance=accepted / verified if verified else None,
        drafted=sum(each.drafted for each in group),
        verified=verified,
        accepted=accepted,
        survivals=max(group, key=lambda each: each.verified).survivals,
        median_step_error=median(errors) if errors else None,
        decide_share=sum(each.decide_s for each in group) / sum(each.wall_s for each in group),
        mismatches=sum(each.mismatches for each in group),
        num_answers=sum(each.num_jobs for each in group),
    )


def save(path: Path, about: dict[str, Any], runs: Sequence[Run]) -> None:
    """Write all finished runs. Atomic: a reader sees the old file or the new one."""
    content = {
        "format": _FORMAT,
        "about": about,
        "summaries": [asdict(each) for each in summaries(runs)],
        "rivals": [asdict(each) for each in against_rivals(runs, FASER)],
        "runs": [asdict(each) for each in runs],
    }
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")
    temporary.replace(path)


def load(path: Path, conditions: dict[str, Any]) -> list[Run]:
    """The runs of an earlier campaign. conditions: those of the current one.

    Raises ConfigError for a file of another format, and for runs under other conditions.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        before = content["about"]["conditions"]
        runs = [
            Run(
                **{
                    **each,
                    "survivals": tuple(each["survivals"]),
                    "points": tuple(StepPoint(**point) for point in each["points"]),
                }
            )
            for each in content["runs"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no result of faser bench spec: {type(error).__name__}: {error}") from error
    for name, value in json.loads(json.dumps(conditions)).items():
        if before.get(name) != value:
            raise ConfigError(f"{path} was measured with {name} {before.get(name)}; now it is {value}")
    return runs


def markdown(
    about: dict[str, Any], found: Sequence[Summary], rivals: Sequence[Comparison], plots: Sequence[str]
) -> str:
    """The report as Markdown. rivals: comparisons of faser. plots: file names of the plots."""
    lines = ["# Speculation, measured", "", f"`{about['command']}`", ""]
    lines += [f"- {name}: {value}" for name, value in {**about["machine"], **about["conditions"]}.items()]
    lines += ["", *_losslessness(found), ""]
    for temperature in dict.fromkeys(each.temperature for each in found):
        of_temperature = [each for each in found if each.temperature == temperature]
        lines += [f"## Temperature {temperature:g}", "", *_speed_table(of_temperature), ""]
        compared = [each for each in rivals if each.temperature == temperature]
        lines += [*_conclusions(of_temperature), *_held_out(compared), "", *_detail_table(of_temperature), ""]
    lines += [f"![{name}]({name})" for name in plots]
    return "\n".join(lines) + "\n"


def _losslessness(found: Sequence[Summary]) -> list[str]:
    wrong = [each for each in found if each.mismatches]
    total = sum(each.num_answers for each in found)
    if not wrong:
        return [f"All {total} answers are token for token those without speculation."]
    return ["**ANSWERS DIFFER FROM THOSE WITHOUT SPECULATION:**", ""] + [
        f"- T={each.temperature:g}, {each.concurrency} at a time, {each.policy}: "
        f"{each.mismatches} of {each.num_answers}"
        for each in wrong
    ]


def _speed_table(found: Sequence[Summary]) -> list[str]:
    """Output tokens per second and the speed-up over policy off, one column per policy."""
    policies = list(dict.fromkeys(each.policy for each in found))
    lines = [
        "Output tokens per second at full concurrency, median over rounds (slowest … fastest), and speed-up over"
        " `off`. Policies that --drop-below left out have fewer rounds.",
        "",
        "| at a time | " + " | ".join(policies) + " | best fixed | faser over it | best other | faser over it |",
        "| --- " * (len(policies) + 5) + "|",
    ]
    for concurrency, row in _rows(found).items():
        cells = [_cell(row[policy]) if policy in row else "" for policy in policies]
        for best in (_best_static(row), _best_other(row)):
            gain = _gain(row, best)
            cells += [best.policy if best else "", f"{gain:+.1%}" if gain is not None else ""]
        lines.append(f"| {concurrency} | " + " | ".join(cells) + " |")
    return lines


def _detail_table(found: Sequence[Summary]) -> list[str]:
    lines = [
        "| at a time | policy | mean γ | accepted of verified | drafted | verified | accepted "
        "| step time error, median | deciding |",
        "| --- " * 9 + "|",
    ]
    for each in found:
        cells = (
            str(each.concurrency),
            each.policy,
            f"{each.gamma_mean:.2f}",
            "" if each.acceptance is None else f"{each.acceptance:.1%}",
            str(each.drafted),
            str(each.verified),
            str(each.accepted),
            "" if each.median_step_error is None else f"{each.median_step_error:.1%}",
            f"{each.decide_share:.2%}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _conclusions(found: Sequence[Summary]) -> list[str]:
    """At which concurrencies each policy is slower than off, and how faser compares with the others."""
    lines = []
    for policy in dict.fromkeys(each.policy for each in found if each.policy != OFF):
        slower = [
            str(each.concurrency)
            for each in found
            if each.policy == policy and each.speed_up is not None and each.speed_up < 1
        ]
        where = f"slower than `off` at {', '.join(slower)} at a time" if slower else "never slower than `off`"
        lines.append(f"- {policy}: {where}")
    lines += _against_the_best(list(_rows(found).values()))
    errors = [each.median_step_error for each in found if each.median_step_error is not None]
    if errors:
        within = sum(error <= BAND for error in errors)
        lines.append(f"- predicted step time: median error within {BAND:.0%} in {within} of {len(errors)} cells")
    return lines


def _against_the_best(rows: Sequence[dict[str, Summary]]) -> list[str]:
    """faser's speed divided by that of the fastest other policy of each cell, and by that of each policy."""
    gains = [gain for row in rows if (gain := _gain(row, _best_other(row))) is not None]
    if not gains:
        return []
    over = {
        policy: geometric_mean(
            [row[FASER].tokens_per_s / row[policy].tokens_per_s for row in rows if policy in row and FASER in row]
        )
        for policy in dict.fromkeys(name for row in rows for name in row if name != FASER)
    }
    each = ", ".join(f"{policy} {ratio:.2f}" for policy, ratio in over.items())
    return [
        f"- faser over the best other policy of each cell: {geometric_mean([1 + gain for gain in gains]):.3f} "
        f"on average, {1 + min(gains):.3f} at least",
        f"- faser over each other policy, on average: {each}",
    ]


def _held_out(compared: Sequence[Comparison]) -> list[str]:
    """faser over the best other policy, chosen on held-out rounds."""
    if not compared:
        return []
    cells = ", ".join(
        f"{each.concurrency}: {each.ratio:.3f} ({each.lowest:.2f} … {each.highest:.2f})" for each in compared
    )
    mean = geometric_mean([each.ratio for each in compared])
    return [
        f"- faser over the policy that was best in the other rounds, by requests at a time: {cells}; "
        f"{mean:.3f} on average"
    ]


def _rows(found: Sequence[Summary]) -> dict[int, dict[str, Summary]]:
    rows: dict[int, dict[str, Summary]] = {}
    for each in found:
        rows.setdefault(each.concurrency, {})[each.policy] = each
    return rows


def _best_static(row: dict[str, Summary]) -> Summary | None:
    """The fastest of off and the fixed policies."""
    static = [each for name, each in row.items() if name == OFF or name.startswith("fixed:")]
    return max(static, key=lambda each: each.tokens_per_s, default=None)


def _best_other(row: dict[str, Summary]) -> Summary | None:
    """The fastest policy other than faser."""
    others = [each for name, each in row.items() if name != FASER]
    return max(others, key=lambda each: each.tokens_per_s, default=None)


def _gain(row: dict[str, Summary], best: Summary | None) -> float | None:
    if best is None or FASER not in row:
        return None
    return row[FASER].tokens_per_s / best.tokens_per_s - 1


def _cell(each: Summary) -> str:
    rate = f"{each.tokens_per_s:.1f} ({each.slowest:.1f} … {each.fastest:.1f})"
    return rate if each.speed_up is None else f"{rate} {each.speed_up:.2f}x"
