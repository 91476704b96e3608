"""`faser plan [MODEL]`: how many requests a second this machine holds within their targets, before it serves any.

The engine runs in this process for some seconds, on prompts like those of `faser bench`: without drafts, with
them, and with drafts of fixed lengths. The pace of these steps goes into the latency model, which knows the rest
(engine/contract/latency_model.py).
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faser.cli.bench.prompts import BenchPrompt, read_prompts
from faser.cli.console import ProgressReporter
from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir
from faser.config.sources import CommandParser, UsageError, engine_config, engine_settings, number, whole_number
from faser.engine.checkpoints.source import resolve
from faser.engine.contract.latency_model import (
    KNOWN_UTILISATION,
    Forecast,
    Lengths,
    Pace,
    capacity,
    crossovers,
    crossovers_by_sequences,
    highest_rate,
)
from faser.engine.text.tokenizer import load_tokenizer
from faser.errors import ConfigError
from faser.machine import BusyMeter
from faser.types.request import NO_TARGETS, Request, Slo
from faser.types.sampling import SamplingParams

if TYPE_CHECKING:
    from faser.engine.build import Built

PROG = "faser plan"

_HELP = f"""usage: faser plan [MODEL] --prompt N --answer N [--rate R] [flags]

Estimate the request rate that this machine sustains within --slo-ttft-ms and --slo-tpot-ms, and up to which load
drafts of each length pay.

  MODEL                a directory, .gguf file or hub id [the embedded SmolLM2-135M-Instruct]
  --prompt N           tokens of a prompt
  --answer N           tokens of an answer
  --rate R             requests a second: also estimate their latencies
  --seconds S          seconds of steps to measure, for each number of sequences and each way to draft [1]
  --prompts FILE       JSON lines as in Spec-Bench, or one text per line: prompts to draft for [built-in prompts]
  --json               as a JSON object

Flags of faser serve about the model, the engine and speculation may follow: faser serve --help=all.
Arrivals are assumed to be independent (a Poisson process). Beyond {KNOWN_UTILISATION:.0%} of the capacity there is
no estimate."""

SHARES = (0.9, 0.99)
GAMMAS = (1, 2, 4, 8, 16)  # fixed lengths that are compared, up to the engine's cap
BUSY_SHARE = 0.1  # of the cores, taken by other processes, from which on figures are disturbed
_OFF, _FIXED = "off", "fixed"
_WITHOUT, _WITH = "without drafts", "with drafts"
_LONGEST_RUN = 4096  # tokens of an answer: no sequence ends while it is measured
_seconds = number(float, "a number of seconds above 0", lambda found: found > 0)
_rate = number(float, "a number of requests a second above 0", lambda found: found > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Request rates that one way to serve sustains, in requests a second. capacity: without targets.

    within: by share, the highest rate at which that share of the requests meets the targets; empty without
    targets. at_rate: what requests see at the rate that was asked about; None: no rate, or it is not known there.
    """

    name: str
    capacity: float
    within: dict[float, float]
    at_rate: dict[str, float] | None
    utilisation: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossovers:
    """(from, γ): the fixed length of drafts that is best from a load on, the first from 0 on; 0: no drafts.

    by_sequences: at the same time, by requests a second. by_rate: requests a second, by mean latency.
    """

    by_sequences: tuple[tuple[int, int], ...]
    by_rate: tuple[tuple[float, int], ...]


def plan(arguments: Sequence[str]) -> int:
    """Measure, and print what follows; returns 0. Raises ConfigError."""
    own, rest = _own_parser().parse_known_args(list(arguments))
    if own.help:
        print(_HELP)
        return 0
    missing = [
        f"--{name} is missing; it is a number of tokens" for name in ("prompt", "answer") if not getattr(own, name)
    ]
    if missing:
        raise UsageError(missing)
    findings = engine_settings(PROG, rest)
    config = engine_config(findings)
    if config.speculation.policy == _OFF:
        raise UsageError(
            [f"{findings.label('speculative_policy')} is off; both ways are planned, so leave it out"]
        )
    meter = BusyMeter()
    held, crossed = _planned(own, config, meter)
    if own.json:
        print(_as_json(own, config, held, crossed, meter.share))
    else:
        lines = [table(own, config.speculation.slo, held), *sentences(crossed), *busy_line(meter.share)]
        print(*lines, sep="\n")
    return 0


def _own_parser() -> CommandParser:
    parser = CommandParser(PROG)
    add: Any = parser.add_argument
    add("--prompt", type=whole_number)
    add("--answer", type=whole_number)
    add("--rate", type=_rate)
    add("--seconds", type=_seconds, default=1.0)
    add("--prompts")
    add("--json", action="store_true")
    add("--help", "-h", action="store_true")
    return parser


def _planned(own: argparse.Namespace, config: EngineConfig, meter: BusyMeter) -> tuple[list[Held], Crossovers]:
    from faser.engine.build import build  # imports torch

    lengths = Lengths.of([(own.prompt, own.answer)])
    with ProgressReporter() as report:
        directory = resolve(config.model, cache_dir(), revision=config.revision, progress=report)
        built = build(config, directory, report)
        info = built.info
        if own.prompt + own.answer > info.max_model_len:
            raise ConfigError(
                f"--prompt and --answer are {own.prompt} and {own.answer}; the context is "
                f"{info.max_model_len} tokens"
            )
        room = info.num_blocks * info.block_size // (own.prompt + own.answer)
        slots = max(min(config.max_num_seqs, room), 1)
        prompts = read_prompts(own.prompts, load_tokenizer(Path(config.tokenizer or directory)))

        def measured(policy: str, gamma: int | None = None) -> Pace:
            with meter.watch():
                return measured_pace(built, prompts, slots, own.seconds, policy, report, gamma=gamma)

        paces = {_WITHOUT: measured(_OFF), _WITH: measured(config.speculation.policy)}
        by_gamma = {0: paces[_WITHOUT]}
        by_gamma |= {gamma: measured(_FIXED, gamma) for gamma in GAMMAS if gamma <= config.speculation.cap}
    found = [held(name, pace, lengths, config.speculation.slo, own.rate) for name, pace in paces.items()]
    crossed = Crossovers(
        by_sequences=crossovers_by_sequences(by_gamma, paces[_WITH], lengths),
        by_rate=crossovers(by_gamma, paces[_WITH], lengths),
    )
    return found, crossed


def measured_pace(
    built: "Built",
    prompts: Sequence[BenchPrompt],
    slots: int,
    seconds: float,
    policy: str,
    report: ProgressReporter,
    *,
    gamma: int | None = None,
) -> Pace:
    """The pace of this engine with a policy: runs 1, 4, 16, … sequences, up to the slots, for `seconds` each.

    Each sequence has a cache of its own: nothing that was answered before, here or with another policy, is drafted
    from. gamma: of policy fixed.
    """
    engine, fit = built.engine, built.pace
    assert fit is not None, "an engine that speculates has a pace"
    engine.use_policy(policy, gamma)
    name = policy if gamma is None else f"{policy}:{gamma}"
    fit.forget()
    counts = sorted({min(4**power, slots) for power in range(slots.bit_length())})
    for place, count in enumerate(counts):
        report(f"{count} sequences, policy {name}", place, len(counts))
        for index in range(count):
            prompt = prompts[index % len(prompts)].token_ids[: built.info.max_model_len // 2]
            room = built.info.max_model_len - len(prompt)
            engine.add(
                Request(
                    request_id=f"{name}/{count}/{index}",
                    prompt_token_ids=prompt,
                    sampling=SamplingParams(temperature=0.0, max_tokens=min(_LONGEST_RUN, room), ignore_eos=True),
                    arrival_s=time.monotonic(),
                    cache_salt=f"{name}/{count}/{index}",
                )
            )
        began_s = None
        while engine.has_work() and (began_s is None or time.monotonic() - began_s < seconds):
            waiting = engine.stats().num_waiting
            engine.step()
            if began_s is None and not waiting:
                began_s = time.monotonic()
        for index in range(count):
            engine.abort(f"{name}/{count}/{index}")
        while engine.has_work():
            engine.step()
    return fit.pace(num_slots=slots)


def held(name: str, pace: Pace, lengths: Lengths, slo: Slo, rate: float | None) -> Held:
    """Return the request rates that this pace sustains for such requests."""
    at_rate = utilisation = None
    if rate is not None:
        forecast = Forecast(pace, lengths, rate)
        utilisation = forecast.utilisation
        if forecast.is_known:
            at_rate = {
                "ttft_ms": 1000 * forecast.ttft_s,
                "ttft_p99_ms": 1000 * forecast.ttft_quantile_s(0.99),
                "tpot_ms": 1000 * forecast.tpot_s,
                "latency_ms": 1000 * forecast.latency_s,
                "latency_p99_ms": 1000 * forecast.latency_quantile_s(0.99),
                "attainment": forecast.attainment(slo),
            }
    within = {} if slo == NO_TARGETS else {share: highest_rate(pace, lengths, slo, share) for share in SHARES}
    return Held(
        name=name, capacity=capacity(pace, lengths), within=within, at_rate=at_rate, utilisation=utilisation
    )


def table(own: argparse.Namespace, slo: Slo, held: Sequence[Held]) -> str:
    """Sentences, a line for each way to serve."""
    targets = [f"{name} {value:g} ms" for name, value in (("TTFT", slo.ttft_ms), ("TPOT", slo.tpot_ms)) if value]
    lines = [f"Prompts of {own.prompt} tokens, answers of {own.answer}, on this machine:"]
    for each in held:
        line = f"  {each.name}: max {each.capacity:.2f} req/s"
        for share, rate in each.within.items():
            line += f"; {rate:.2f} req/s at {share:.0%} attainment ({', '.join(targets)})"
        lines.append(line)
    if own.rate is None:
        return "\n".join(lines)
    lines.append(f"At {own.rate:g} requests a second:")
    for each in held:
        if each.at_rate is None:
            assert each.utilisation is not None
            lines.append(f"  {each.name}: {each.utilisation:.0%} of the capacity, no estimate")
            continue
        at = each.at_rate
        line = (
            f"  {each.name}: TTFT mean {at['ttft_ms']:.0f} ms, p99 {at['ttft_p99_ms']:.0f} ms; "
            f"TPOT mean {at['tpot_ms']:.1f} ms; end-to-end latency mean {at['latency_ms']:.0f} ms, "
            f"p99 {at['latency_p99_ms']:.0f} ms"
        )
        lines.append(line + (f"; {at['attainment']:.0%} within their targets" if targets else ""))
    return "\n".join(lines)


def sentences(crossed: Crossovers) -> list[str]:
    """Return sentences that say which length of drafts is best up to which load."""
    return [
        f"Best length of drafts by {load}: {_best(loads, form)}."
        for load, loads, form in (
            ("sequences at a time", crossed.by_sequences, "d"),
            ("requests a second", crossed.by_rate, ".2f"),
        )
    ]


def busy_line(share: float) -> list[str]:
    """A warning, where other processes have disturbed the measurements. share: of the cores that they took."""
    if share < BUSY_SHARE:
        return []
    return [f"Other processes took {share:.0%} of the cores meanwhile: run this again on a quiet machine."]


def _best(loads: Sequence[tuple[float, int]], form: str) -> str:
    names = [f"{gamma} tokens" if gamma else "none" for _, gamma in loads]
    if len(loads) == 1:
        return f"{names[0]} at every load"
    bounds = [
        f"{name} below {format(bound, form)}" for name, (bound, _) in zip(names[:-1], loads[1:], strict=True)
    ]
    return ", ".join([*bounds, f"{names[-1]} from there on"])


def _as_json(
    own: argparse.Namespace, config: EngineConfig, held: Sequence[Held], crossed: Crossovers, busy_share: float
) -> str:
    slo = config.speculation.slo
    content = {
        "prompt": own.prompt,
        "answer": own.answer,
        "rate": own.rate,
        "slo": {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms},
        "ways": [
            {
                "name": each.name,
                "capacity": each.capacity,
                "within": {f"{share:g}": rate for share, rate in each.within.items()},
                "utilisation": each.utilisation,
                "at_rate": each.at_rate,
            }
            for each in held
        ],
        "busy_share": busy_share,
        "best_draft_length": {
            "by_sequences": [{"from": load, "tokens": gamma} for load, gamma in crossed.by_sequences],
            "by_rate": [{"from": load, "tokens": gamma} for load, gamma in crossed.by_rate],
        },
    }
    return json.dumps(content, indent=2)
