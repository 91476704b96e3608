"""Tries the monitoring of deploy/ on a running server, and writes a page of what it showed.

Starts the default model on 127.0.0.1, asks it for mixed answers, and lets a Prometheus scrape it with the
configuration and the rules of deploy/: once a second, and with windows `--scale` times shorter, so that an alert
that takes an hour takes three minutes. First all is well: every expression of every dashboard and of every rule,
as shipped, is evaluated, and no alert may fire. Then faults are injected one after the other; each must fire its
alerts and no wrong ones. Ends with status 1 where that is not so.
"""

import argparse
import asyncio
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.observability.faults import FAULTS, Fault, Load, speculation
from benchmarks.observability.prometheus import DEPLOY, Prometheus, panels, reason_to_be_empty
from benchmarks.prompts import load_prompts
from benchmarks.runner import about, command_line, write_json
from benchmarks.servers import WatchedServer


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


_FLAGS = (
    *("--max-num-seqs", "8", "--max-num-queued-reqs", "8", "--engine-timeout", "3600"),
    *("--audit-speculation", "0.5", "--speculative-config"),
)
_POLL_S = 0.5
_BETWEEN_S = 15.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path, help="a JSON file; the table goes next to it, as .md")
    parser.add_argument("--prompts", type=Path, help="questions in Spec-Bench's format; else a few of its own")
    parser.add_argument("--sheets", type=Path, help="a folder for pictures of the dashboards; needs matplotlib")
    parser.add_argument("--scale", type=float, default=20.0, help="windows of rules are this many times shorter")
    parser.add_argument(
        "--patient",
        action="store_true",
        help="a busy machine: targets are 10 s and .5 s a token, not 1 s and .1 s",
    )
    parser.add_argument("--calm", type=float, default=120.0, help="seconds of load before the first fault")
    parser.add_argument("--faults", default=",".join(each.name for each in FAULTS), help="names, by commas")
    asked = parser.parse_args(arguments)
    prompts = tuple(each.text for each in load_prompts(asked.prompts)) if asked.prompts else ()
    with (
        tempfile.TemporaryDirectory(prefix="faser-observability-") as folder,
        WatchedServer(Path(folder), (*_FLAGS, speculation(patient=asked.patient))) as server,
        Prometheus(
            Path(folder), server.url.removeprefix("http://"), asked.scale, patient=asked.patient
        ) as prometheus,
    ):
        server.wait_until_healthy(route="/ready")
        found = asyncio.run(_try(server, prometheus, prompts, asked))
    head = about("observability", arguments)
    found = {**head, "scale": asked.scale, "patient": asked.patient, **found}
    write_json(asked.out, found)
    text = render(found)
    asked.out.with_suffix(".md").write_text(text)
    print(text)
    return 0 if found["all_well"] else 1


async def _try(
    server: WatchedServer, prometheus: Prometheus, prompts: Sequence[str], asked: argparse.Namespace
) -> dict[str, Any]:
    load, stopped = Load(server.url, prompts), asyncio.Event()
    begin_s = time.time()
    clients = asyncio.create_task(load.run(stopped))
    await asyncio.sleep(asked.calm)
    shown = await asyncio.to_thread(_panel_results, prometheus)
    ruled = await asyncio.to_thread(_rule_results, prometheus)
    calm = sorted(prometheus.firing())
    if asked.sheets is not None:
        await asyncio.to_thread(_draw, prometheus, asked.sheets, begin_s)
    faults = []
    for fault in FAULTS:
        if fault.name in asked.faults.split(","):
            faults.append(await _injected(fault, server, prometheus, load))
            await asyncio.sleep(_BETWEEN_S)
    stopped.set()
    clients.cancel()
    await asyncio.gather(clients, return_exceptions=True)
    all_well = (
        not calm
        and all(each["samples"] or each["why_empty"] for each in shown)
        and all(each["health"] == "ok" and (each["samples"] or not each["needs_samples"]) for each in ruled)
        and all(not each["missing"] and not each["wrong"] for each in faults)
    )
    return {
        "all_well": all_well,
        "endings": dict(sorted(load.endings.items())),
        "firing_when_calm": calm,
        "panels": shown,
        "rules": ruled,
        "faults": faults,
    }


def _panel_results(prometheus: Prometheus) -> list[dict[str, Any]]:
    return [
        {
            "dashboard": panel.dashboard,
            "panel": panel.title,
            "expression": expression,
            "samples": len(samples := _numbers(prometheus.query(expression))),
            "first": samples[0] if samples else None,
            "why_empty": None if samples else reason_to_be_empty(expression),
        }
        for panel in panels()
        for expression, _ in panel.targets
    ]


def _rule_results(prometheus: Prometheus) -> list[dict[str, Any]]:
    """The rules as shipped. An alert's expression has samples when it fires; each series in it always has."""
    healths = {(each["name"], each["type"]): each["health"] for each in prometheus.rules()}
    found = []
    for group in yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            records = "record" in rule
            name = rule.get("record") or rule["alert"]
            expressions = [rule["expr"]] if records else [f"count({each})" for each in _series(rule["expr"])]
            results = [_numbers(prometheus.query(each)) for each in expressions]
            found.append(
                {
                    "rule": name,
                    "slo": rule["labels"].get("sloth_slo", ""),
                    "samples": min(map(len, results)),
                    "needs_samples": True,
                    "health": healths[name, "recording" if records else "alerting"],
                }
            )
            if not records:
                prometheus.query(rule["expr"])
    return found


def _series(expression: str) -> list[str]:
    return sorted(set(re.findall(r"\b(?:vllm:|faser_|slo:)[\w:]+|\bup\b", expression)))


def _numbers(samples: list[dict[str, Any]]) -> list[float]:
    """The values that are numbers: 0 / 0 draws nothing."""
    return [value for each in samples if (value := float(each["value"][1])) == value]


async def _injected(fault: Fault, server: WatchedServer, prometheus: Prometheus, load: Load) -> dict[str, Any]:
    before = set(prometheus.firing())
    over, began_s = asyncio.Event(), time.time()
    injecting: asyncio.Task[None] = asyncio.create_task(fault.inject(server, load, over))
    fired: dict[str, float] = {}
    while time.time() - began_s < fault.lasts_s and not fault.must <= fired.keys():
        await asyncio.sleep(_POLL_S)
        for name in prometheus.firing().keys() - before:
            fired.setdefault(name, round(time.time() - began_s, 1))
    over.set()
    await injecting
    return {
        "fault": fault.name,
        "what": fault.what,
        "seconds": round(time.time() - began_s, 1),
        "already_firing": sorted(before),
        "fired_after_s": dict(sorted(fired.items())),
        "missing": sorted(fault.must - fired.keys() - before),
        "wrong": sorted(fired.keys() - fault.must - fault.may),
    }


def _draw(prometheus: Prometheus, folder: Path, begin_s: float) -> None:
    from benchmarks.observability.sheets import draw  # matplotlib is not among the project's packages

    folder.mkdir(parents=True, exist_ok=True)
    every = panels()
    for name in sorted({each.dashboard for each in every}):
        chosen = [each for each in every if each.dashboard == name]
        draw(prometheus, chosen, folder / f"{name}.png", begin_s, time.time())
