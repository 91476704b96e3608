"""Reports of `faser bench spec`: a table with bars on a terminal, its SVG picture, and JSON."""

import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from faser import __version__
from faser.cli.bench.comparison import OFF, Measured, Run
from faser.cli.bench.estimates import Estimate
from faser.cli.bench.prompts import BenchPrompt
from faser.optional import maybe, or_else

WIDTH = 140  # of the picture, and of a table that is not shown on a terminal
_BAR = 30
_AT_LEAST_X = 1.5  # the end of the bars' scale, unless a drafter is faster


def console() -> Console:
    """Writes to stdout; as wide as the terminal, or WIDTH."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=WIDTH)


def tables(measured: Sequence[Measured], prompts: Sequence[BenchPrompt]) -> RenderableType:
    """A table for each load, and one of the kinds of prompts for the first."""
    loads = dict.fromkeys(each.load for each in measured)
    top = max([_AT_LEAST_X, *((each.decoding or each.whole).mean for each in measured)])
    parts: list[RenderableType] = []
    for load in loads:
        own = [each for each in measured if each.load == load]
        parts += [Rule(f"[bold]{load}[/], {len(own[0].runs[0].answers)} requests, {len(own[0].runs)} rounds")]
        parts.append(_table(own, top))
    first = [each for each in measured if each.load == next(iter(loads))]
    categories = by_category(first, prompts)
    if any(categories):
        parts += [Rule(f"[bold]decoding over off by kind of prompt[/], {next(iter(loads))}"), _by_kind(categories)]
    return Group(*parts)


def _table(measured: Sequence[Measured], top: float) -> Table:
    found = Table(box=None, pad_edge=False)
    found.add_column("drafter", no_wrap=True)
    for name in ("tokens/s", "over off", "decoding over off"):
        found.add_column(name, justify="right", no_wrap=True)
    found.add_column(f"0x {'─' * (_BAR - 9)} {top:.2f}x", no_wrap=True)
    for name in ("mean γ", "accepted", "tokens/step", "differing"):
        found.add_column(name, justify="right", no_wrap=True)
    for each in measured:
        is_off = each.arm == OFF
        found.add_row(
            each.arm,
            f"{median(run.tokens_per_s for run in each.runs):.1f}",
            "" if is_off else each.whole.text(unit="x"),
            "" if is_off or each.decoding is None else each.decoding.text(unit="x"),
            bar(each.decoding or each.whole, top),
            *_drafts(each.runs),
            f"{each.differing} of {each.num_answers}",
        )
    return found


def _drafts(runs: Sequence[Run]) -> tuple[str, str, str]:
    """Mean γ, accepted share, and tokens a step of a sequence."""
    figures = _draft_figures(runs)
    share = figures["accepted_share"]
    return (
        f"{figures['gamma_mean']:.2f}",
        "" if share is None else f"{share:.0%}",
        f"{figures['tokens_per_step']:.2f}",
    )


def _draft_figures(runs: Sequence[Run]) -> dict[str, Any]:
    verified, accepted = sum(run.verified for run in runs), sum(run.accepted for run in runs)
    tokens = sum(run.tokens for run in runs)
    return {
        "gamma_mean": round(median(run.gamma_mean for run in runs), 3),
        "accepted_share": round(accepted / verified, 4) if verified else None,
        "tokens_per_step": round(tokens / max(tokens - accepted, 1), 3),
    }


def bar(estimate: Estimate, top: float) -> Text:
    """From 0 to the mean on a scale up to top; its interval is lighter, and 1 is marked."""
    low = or_else(estimate.low, estimate.mean)
    high = or_else(estimate.high, estimate.mean)
    found = Text()
    for cell in range(_BAR):
        at = (cell + 0.5) * top / _BAR
        is_one = cell == int(_BAR / top)
        if at <= low:
            found.append("█", "green" if estimate.mean >= 1 else "red")
        elif at <= high:
            found.append("▒", "yellow")
        else:
            found.append("│" if is_one else " ", "dim")
    return found


def by_category(measured: Sequence[Measured], prompts: Sequence[BenchPrompt]) -> dict[str, dict[str, float]]:
    """Return each arm's speedup over off by kind of prompt: ratio of the rounds' summed decoding times."""
    found: dict[str, dict[str, float]] = {}
    for each in measured:
        if each.arm != OFF:
            mine, theirs = _seconds_by_category(each.runs, prompts), _seconds_by_category(each.off, prompts)
            for category, seconds in mine.items():
                if seconds and theirs[category]:
                    found.setdefault(category, {})[each.arm] = round(theirs[category] / seconds, 4)
    return found


def _seconds_by_category(runs: Sequence[Run], prompts: Sequence[BenchPrompt]) -> dict[str, float]:
    found: dict[str, float] = {}
    for run in runs:
        for seed, answer in enumerate(run.answers):
            category = prompts[seed % len(prompts)].category
            found[category] = found.get(category, 0.0) + answer.decode_s
    return found


def _by_kind(categories: Mapping[str, Mapping[str, float]]) -> Table:
    arms = list(dict.fromkeys(arm for each in categories.values() for arm in each))
    found = Table(box=None, pad_edge=False)
    found.add_column("prompts")
    for arm in arms:
        found.add_column(arm, justify="right")
    for category, ratios in categories.items():
        found.add_row(category or "other", *(f"{ratios[arm]:.2f}x" if arm in ratios else "" for arm in arms))
    return found


def write_picture(path: Path, shown: RenderableType, title: str) -> None:
    """Draw what the terminal shows as SVG."""
    recording = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True, highlight=False)
    recording.print(shown)
    path.write_text(recording.export_svg(title=title), encoding="utf-8")


def write_json(
    path: Path, about: Mapping[str, Any], measured: Sequence[Measured], prompts: Sequence[BenchPrompt]
) -> None:
    document = {**about, "loads": list(_loads(measured, prompts))}
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def about_machine() -> dict[str, Any]:
    """The version and the machine, for a file of results."""
    return {
        "faser": __version__,
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _loads(measured: Sequence[Measured], prompts: Sequence[BenchPrompt]) -> Iterator[dict[str, Any]]:
    for load in dict.fromkeys(each.load for each in measured):
        own = [each for each in measured if each.load == load]
        yield {
            "temperature": load.temperature,
            "concurrency": load.concurrency,
            "requests": len(own[0].runs[0].answers),
            "decoding_over_off_by_kind": by_category(own, prompts),
            "drafters": [_as_json(each, prompts) for each in own],
        }


def _as_json(each: Measured, prompts: Sequence[BenchPrompt]) -> dict[str, Any]:
    return {
        "drafter": each.arm,
        "tokens_per_s": round(median(run.tokens_per_s for run in each.runs), 2),
        "decode_tokens_per_s": round(median(run.decode_per_s or 0.0 for run in each.runs), 2),
        "over_off": each.whole.rounded(),
        "decoding_over_off": maybe(Estimate.rounded, each.decoding),
        **_draft_figures(each.runs),
        "differing_answers": each.differing,
        "answers_hash": each.runs[0].answers_hash,
        "rounds": [
            {
                "tokens": run.tokens,
                "seconds": round(run.seconds, 3),
                "decode_per_s": round(run.decode_per_s or 0.0, 2),
            }
            for run in each.runs
        ],
        "by_request": list(_requests(each, prompts)),
    }


def _requests(each: Measured, prompts: Sequence[BenchPrompt]) -> Iterator[dict[str, Any]]:
    for seed, answers in enumerate(zip(*(run.answers for run in each.runs), strict=True)):
        prompt = prompts[seed % len(prompts)]
        yield {
            "kind": prompt.category,
            "prompt_tokens": len(prompt.token_ids),
            "answer_tokens": len(answers[0].token_ids),
            "decode_s": round(median(answer.decode_s for answer in answers), 4),
            "verified": round(median(answer.verified for answer in answers)),
            "accepted": round(median(answer.accepted for answer in answers)),
        }
