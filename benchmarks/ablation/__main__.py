"""Gains of each part of speculation, under the arrivals of a real trace.

    python -m benchmarks ablation OUT --model BIG --drafter SMALL --trace AZURE.csv --prompts QUESTIONS.jsonl
        [--seconds 60] [--repeats 5] [--load 0.7,1.5] [--max-tokens 64] [--at-a-time 16]
    python -m benchmarks ablation OUT --trace AZURE.csv --prompts QUESTIONS.jsonl --load 0.5,0.8 --at-a-time 64

Arms, each the one before with one thing more: off; fixed:3; +lengths (policy faser); +overlap (drafting ahead
where it pays). Without --drafter drafts come from text, as with default flags, and the arms are off and default.
One engine in this process serves all arms; they take turns in an order of their own in every repeat, on the same
arrivals. So arm off also indexes its text for the drafters, some microseconds a sequence and step. Every request
has a cache_salt of its own: neither blocks nor past answers of any other help it.

Capacity is what arm off reaches in a closed loop with all places taken; a load is a share of that. Stretches of
the trace (Azure LLM inference trace, arXiv 2311.18677), spread over it, are slowed down or sped up so that their
requests yield that many tokens; answers have the trace's lengths, at most --max-tokens; prompts are questions that
people wrote. tokens/s counts what came while requests did, so below capacity it follows the arrivals, and what an
arm gains shows in its times; above capacity it is what the arm can bear. The target of time per token is twice
that of a request that is alone under arm off. --seconds and --repeats of all arms and loads, and what is left to
answer after the last arrival, make up the time it takes. OUT is written after every run.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.ablation.campaign import Bearing, Campaign, Wanted
from benchmarks.ablation.drive import ARMS, BASE, DEFAULT, FLOOR, arms_named
from benchmarks.ablation.report import Run, write
from benchmarks.runner import command_line
from benchmarks.simulator.workload import read_azure
from benchmarks.spec_bench.prompts import select_prompts
from faser.cli.bench.prompts import read_prompts
from faser.cli.console import ProgressReporter, runs_bar
from faser.cli.tools import facts
from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir
from faser.engine.build import build
from faser.engine.checkpoints.source import resolve
from faser.engine.text.tokenizer import load_tokenizer
from faser.errors import ConfigError, RequestError

PROMPTS_VARIABLE = "SPEC_BENCH_QUESTIONS"
_FACTS = ("faser", "cpu", "cores", "memory", "backend", "torch")
_METHOD = "draft_model"
_TEXT_ARMS = (FLOOR, DEFAULT.name)


def main(arguments: Sequence[str] | None = None) -> int:
    """1 if an answer was not that of the other arms."""
    asked = parser().parse_args(arguments)
    if not asked.prompts:
        sys.exit(f"--prompts or {PROMPTS_VARIABLE} has to name a file of questions, as of Spec-Bench")
    try:
        return _measure(asked, sys.argv[1:] if arguments is None else arguments)
    except (ConfigError, RequestError) as error:
        sys.exit(str(error))


def _measure(asked: argparse.Namespace, arguments: Sequence[str]) -> int:
    wanted = wanted_of(asked)
    campaign = _campaign(asked, wanted)
    asked.out.mkdir(parents=True, exist_ok=True)
    runs: list[Run] = []
    about: dict[str, Any] = {}
    with runs_bar() as bar:
        task = bar.add_task("", total=wanted.num_runs)

        def announce(stage: str) -> None:
            bar.update(task, description=stage)
            if bar.disable:
                print(stage, file=sys.stderr, flush=True)

        announce("measuring what the machine can bear")
        bearing = campaign.bearing()
        campaign.warm(announce)
        about = about_of(asked, arguments, bearing, campaign)
        for run in campaign.runs(bearing, announce):
            runs.append(run)
            write(asked.out, about, runs, base=base_of(wanted))
            bar.update(task, completed=len(runs))
    print((asked.out / "ablation.md").read_text(encoding="utf-8"))
    return 1 if any(run.different for run in runs) else 0


def _campaign(asked: argparse.Namespace, wanted: Wanted) -> Campaign:
    config = config_of(asked)
    trace = read_azure(asked.trace)
    with ProgressReporter() as report:
        directory = resolve(config.model, cache_dir(), progress=report)
        built = build(config, directory, report)
    prompts = select_prompts(
        read_prompts(asked.prompts, load_tokenizer(directory)),
        categories=[],
        max_prompt_tokens=asked.max_prompt_tokens,
    )
    return Campaign(
        engine=built.engine,
        wanted=wanted,
        trace=trace,
        prompts=[each.token_ids for each in prompts],
    )


def config_of(asked: argparse.Namespace) -> EngineConfig:
    """One engine for all arms: it can do whatever one of them does."""
    config = EngineConfig(
        model=asked.model,
        dtype=asked.dtype,
        max_num_seqs=asked.at_a_time,
        max_model_len=asked.max_prompt_tokens + asked.max_tokens,
    )
    if asked.drafter is None:
        return config
    speculation = {"method": _METHOD, "model": asked.drafter}
    return replace(config, speculative_config=speculation, spec_overlap="auto")


def wanted_of(asked: argparse.Namespace) -> Wanted:
    """Raises ConfigError for an arm that there is not."""
    names = _TEXT_ARMS if asked.drafter is None else [arm.name for arm in ARMS]
    return Wanted(
        arms=arms_named(asked.arms.split(",") if asked.arms else names),
        seconds=asked.seconds,
        repeats=asked.repeats,
        loads=tuple(asked.load),
        max_tokens=asked.max_tokens,
        clients=asked.at_a_time,
        warm_s=asked.warm_seconds,
        temperature=asked.temperature,
        capacity=asked.capacity,
    )


def base_of(wanted: Wanted) -> str:
    """The arm that others are compared with: fixed lengths, or no drafts where those have no turn."""
    return BASE if any(arm.name == BASE for arm in wanted.arms) else FLOOR


def about_of(
    asked: argparse.Namespace, arguments: Sequence[str], bearing: Bearing, campaign: Campaign
) -> dict[str, Any]:
    """Under which conditions the figures hold; folders of this machine are not named."""
    lengths = [len(prompt) for prompt in campaign.prompts]
    shown = [str(Path(each).name) if "/" in each else each for each in arguments]
    return {
        "command": shlex.join(["python", "-m", "benchmarks", "ablation", *shown]),
        "conditions": {name: value for name, value in facts().items() if name in _FACTS}
        | {
            "target": Path(asked.model).name if asked.model else "the default model",
            "drafter": Path(asked.drafter).name if asked.drafter else "text",
            "dtype": asked.dtype,
            "prompts": f"{len(lengths)} of {min(lengths)} to {max(lengths)} tokens",
            "output tokens": f"of the trace, at most {asked.max_tokens}",
            "requests at a time": asked.at_a_time,
            "temperature": asked.temperature,
            "capacity": f"{bearing.tokens_per_s:.1f} output tokens a second, "
            + ("measured with arm off" if asked.capacity is None else "as given"),
            "target of time per token": f"{bearing.slo.tpot_ms:.0f} ms",
            "arrivals": f"within {asked.seconds:g} s, {asked.repeats} repeats",
        },
    }


def _above_zero(text: str) -> float:
    if not 0 < (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"it is {text}; it must be a number above 0")
    return value


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"it is {text}; it must be at least 1")
    return value


def _loads(text: str) -> list[float]:
    return [_above_zero(each) for each in text.split(",")]


def parser() -> argparse.ArgumentParser:
    made = command_line(__doc__)
    add = made.add_argument
    add("out", type=Path, metavar="OUT", help="folder for ablation.json, ablation.md and pictures")
    add("--model", metavar="DIR", help="target, such as benchmarks.models.grow_model makes [the default model]")
    add("--drafter", metavar="DIR", help="draft model of the same vocabulary [drafts come from text]")
    add("--trace", required=True, type=Path, metavar="CSV", help="an Azure LLM inference trace")
    add("--prompts", default=os.environ.get(PROMPTS_VARIABLE), metavar="FILE", help=f"[${PROMPTS_VARIABLE}]")
    add("--seconds", type=_above_zero, default=60.0, help="in which the requests of a run come [60]")
    add("--repeats", type=_count, default=5, help="of which the median counts [5]")
    add("--load", type=_loads, default=[0.7, 1.5], help="shares of the capacity [0.7,1.5]")
    add("--capacity", type=_above_zero, help="output tokens a second that arm off can bear [measured]")
    add("--arms", help=f"[{','.join(arm.name for arm in ARMS)}; without --drafter {','.join(_TEXT_ARMS)}]")
    add("--max-tokens", type=_count, default=64, help="of an answer [64]")
    add("--max-prompt-tokens", type=_count, default=256, help="longer prompts are left out [256]")
    add("--at-a-time", type=_count, default=16, help="requests that the engine serves at a time [16]")
    add("--warm-seconds", type=_above_zero, default=15.0, help="of every arm before anything counts [15]")
    add("--temperature", type=float, default=0.0, help="[0]")
    add("--dtype", default="auto")
    return made
