"""Figures for people and programs: tables in Markdown, and one JSON document."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.default_flags.cells import KINDS, Cell, Figures
from benchmarks.default_flags.clients import Answered


def document(
    about: Mapping[str, Any], found: Sequence[Figures], runs: Mapping[Cell, Mapping[str, Sequence[Answered]]]
) -> dict[str, Any]:
    """Everything but the answers themselves. about: the command, the machine, the arms."""
    return {
        **about,
        "cells": [
            {
                **asdict(each.cell),
                "arm": each.arm,
                "off_tokens_per_s": round(each.off_tokens_per_s, 1),
                "tokens_per_s": round(each.tokens_per_s, 1),
                "ratio": each.ratio.rounded(),
                "accepted_a_token": round(each.accepted / each.tokens, 3),
                "accepted_share": round(each.accepted / each.drafted, 3) if each.drafted else None,
                "different_answers": each.different,
                "answers": each.num_answers,
            }
            for each in found
        ],
        "runs": [
            {**asdict(cell), "arm": arm, "round": number, **_counts(run)}
            for cell, arms in runs.items()
            for arm, of_arm in arms.items()
            for number, run in enumerate(of_arm)
        ],
    }


def page(about: Mapping[str, Any], found: Sequence[Figures]) -> str:
    """A table for every arm and temperature: requests at once downwards, kinds across."""
    lines = [f"`{about['command']}`", "", _exactness(found)]
    for arm in dict.fromkeys(each.arm for each in found):
        for temperature in dict.fromkeys(each.cell.temperature for each in found):
            of_table = [each for each in found if (each.arm, each.cell.temperature) == (arm, temperature)]
            lines += [
                "",
                f"Output tokens a second, off → {arm}, temperature {temperature:g}:",
                "",
                *_table(of_table),
            ]
    return "\n".join(lines) + "\n"


def _table(found: Sequence[Figures]) -> list[str]:
    kinds = list(dict.fromkeys(each.cell.kind for each in found))
    by_place = {(each.cell.concurrency, each.cell.kind): each for each in found}
    lines = [
        "| requests at once | " + " | ".join(KINDS[kind] for kind in kinds) + " |",
        "| --- |" + " --- |" * len(kinds),
    ]
    for count in dict.fromkeys(each.cell.concurrency for each in found):
        row = [by_place[count, kind] for kind in kinds]
        cells = [
            f"{each.off_tokens_per_s:.0f} → {each.tokens_per_s:.0f}, {each.ratio.text(unit='x')}" for each in row
        ]
        lines.append(f"| {count} | " + " | ".join(cells) + " |")
    return lines


def _exactness(found: Sequence[Figures]) -> str:
    different, total = sum(each.different for each in found), sum(each.num_answers for each in found)
    return f"{total - different} of {total} answers equal those of arm off."


def _counts(run: Answered) -> dict[str, float]:
    return {
        "tokens": run.tokens,
        "seconds": round(run.seconds, 3),
        "drafted": run.drafted,
        "accepted": run.accepted,
    }
