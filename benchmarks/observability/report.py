"""The results as a page: what each panel and rule gave, and which alerts each fault fired."""

from typing import Any


def render(found: dict[str, Any]) -> str:
    shown, ruled = found["panels"], found["rules"]
    full = [each for each in shown if each["samples"]]
    lines = [
        "# Monitoring, tried",
        "",
        f"Commit {found['commit']}. Windows of rules are {found['scale']:g} times shorter than shipped, scrapes a "
        "second apart."
        + (" The machine was busy: targets were 10 s and .5 s a token." if found["patient"] else ""),
        "",
        f"{len(full)} of {len(shown)} expressions on panels gave samples; "
        f"{sum(each['samples'] > 0 for each in ruled)} of {len(ruled)} rules did, or all series in them. "
        f"Firing while all was well: {', '.join(found['firing_when_calm']) or 'none'}.",
        "",
        "## Faults",
        "",
        "| fault | seconds | alerts that fired, after seconds | firing before | missing | wrong |",
        "| --- | --- | --- | --- | --- | --- |",
        *(
            f"| {each['fault']}: {each['what']} | {each['seconds']:g} | "
            + (", ".join(f"{name} {at:g}" for name, at in each["fired_after_s"].items()) or "none")
            + f" | {_listed(each['already_firing'])} | {_listed(each['missing'])} | {_listed(each['wrong'])} |"
            for each in found["faults"]
        ),
        "",
        "## Panels",
        "",
        "| dashboard | panel | series | first value | why empty |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {each['dashboard']} | {each['panel']} | {each['samples']} | "
            f"{'' if each['first'] is None else format(each['first'], '.4g')} | "
            f"{'' if each['samples'] else each['why_empty'] or '**not explained**'} |"
            for each in shown
        ),
        "",
        "## Rules",
        "",
        "| rule | objective | series | health |",
        "| --- | --- | --- | --- |",
        *(f"| {each['rule']} | {each['slo']} | {each['samples']} | {each['health']} |" for each in ruled),
        "",
    ]
    return "\n".join(lines)


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "none"
