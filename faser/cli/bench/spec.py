"""`faser bench spec`: measures a model and its drafter over concurrency and policies, and writes a report.

Owns the command line and the bar. The engine runs in this process, one for all policies; what is measured and how
it is summed up is in faser.bench.
"""

import argparse
import hashlib
import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from faser.bench.campaign import Campaign, Wanted
from faser.bench.plots import pictures
from faser.bench.policy_spec import PolicySpec, parse_policy
from faser.bench.prompts import read_prompts
from faser.bench.report import FASER, RESULT, load, markdown, save, summaries
from faser.bench.rivals import against_rivals
from faser.bench.workload import Prompts, choose
from faser.cli.console.progress import ProgressReporter, runs_bar
from faser.cli.flags.parser import CommandParser
from faser.cli.flags.sources import UsageError
from faser.cli.tools.env import facts
from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir
from faser.config.speculation import SpeculationConfig
from faser.engine.checkpoints.source import resolve
from faser.engine.text.tokenizer import load_tokenizer
from faser.errors import ConfigError

PROG = "faser bench spec"
_POLICIES = "off,fixed:1,fixed:3,fixed:5,fixed:7,goodput,survival,faser"
_PAST_ANSWERS = "suffix_decoding_max_cached_requests"
_FACTS = ("faser", "python", "system", "cpu", "cores", "cpu features", "memory", "backend", "torch", "numpy")
_MOST_ROWS = 1024


def spec(arguments: Sequence[str]) -> int:
    """Measure and report; 1 if an answer was not the one without speculation. Raises ConfigError."""
    parser = spec_parser()
    asked = parser.parse_args(list(arguments))
    if asked.help:
        print(parser.format_help())
        return 0
    if asked.out is None:
        raise UsageError(["--out is needed: a folder for the result, the report and the pictures"])
    config = engine_config(asked)
    wanted = Wanted(
        policies=policies_of(asked.policies, config.speculation),
        concurrencies=tuple(asked.concurrency),
        temperatures=tuple(asked.temperature),
        rounds=asked.rounds,
        output_tokens=asked.output_tokens,
        min_s=asked.min_seconds,
        include_prefill=asked.include_prefill,
        drop_below=asked.drop_below,
    )
    out = Path(asked.out)
    if (out / RESULT).exists() and not asked.resume:
        raise UsageError([f"--out is {out}; it holds a result already: give --resume to go on, or another folder"])
    out.mkdir(parents=True, exist_ok=True)
    return _measure(asked, config, wanted, out, [PROG, *arguments])


def _measure(
    asked: argparse.Namespace, config: EngineConfig, wanted: Wanted, out: Path, command: list[str]
) -> int:
    from faser.engine.build import build_engine  # loads torch

    with ProgressReporter() as report:
        directory = resolve(config.model, cache_dir(), progress=report)
        engine, _ = build_engine(config, directory, report)
    everything = read_prompts(asked.prompts, load_tokenizer(directory), limit=sys.maxsize)
    prompts = choose(
        [(each.category, each.token_ids) for each in everything],
        categories=asked.categories,
        max_prompt_tokens=asked.max_prompt_tokens,
    )
    same = conditions(asked, config, prompts)
    about = {
        "command": shlex.join(command),
        "machine": {name: value for name, value in facts().items() if name in _FACTS},
        "conditions": same,
    }
    result = out / RESULT
    done = load(result, same) if result.exists() else []
    campaign = Campaign(engine=engine, wanted=wanted, prompts=prompts, done=done)
    _run_all(campaign, result, about)
    return _report(campaign, out, about)


def _run_all(campaign: Campaign, result: Path, about: dict[str, Any]) -> None:
    """Every missing run, saved as soon as it is there, under a bar."""
    with runs_bar() as bar:
        console = bar.console
        task = bar.add_task("", total=campaign.wanted.num_runs, completed=campaign.num_done)
        for each in campaign.runs(lambda stage: bar.update(task, description=stage)):
            save(result, about, campaign.done)
            bar.update(task, completed=campaign.num_done)
            line = (
                f"T={each.temperature:g} x{each.concurrency} {each.policy} round {each.round + 1}: "
                f"{each.tokens_per_s:.1f} tokens/s, mean γ {each.gamma_mean:.2f}"
            )
            if not console.is_terminal:
                print(line, file=sys.stderr, flush=True)
            if each.mismatches:
                console.print(
                    f"{line}: {each.mismatches} OF {each.num_jobs} ANSWERS DIFFER FROM THOSE WITHOUT SPECULATION",
                    style="bold red",
                )


def _report(campaign: Campaign, out: Path, about: dict[str, Any]) -> int:
    found = summaries(campaign.done)
    drawn = pictures(campaign.done, found)
    for name, picture in drawn.items():
        (out / name).write_text(picture, encoding="utf-8")
    text = markdown(about, found, against_rivals(campaign.done, FASER), list(drawn))
    (out / "report.md").write_text(text, encoding="utf-8")
    print(text)
    return 1 if any(each.mismatches for each in found) else 0


def engine_config(asked: argparse.Namespace) -> EngineConfig:
    """One engine for all cells: room for the highest concurrency, and for every sequence's longest draft."""
    try:
        speculative = json.loads(asked.speculative_config)
    except ValueError as error:
        raise UsageError([f"--speculative-config is {asked.speculative_config}; not JSON: {error}"]) from error
    if not isinstance(speculative, dict):
        raise UsageError([f"--speculative-config is {asked.speculative_config}; it must be a JSON object"])
    if speculative.get("method", "auto") in ("auto", "suffix") and not asked.include_prefill:
        speculative.setdefault(_PAST_ANSWERS, 0)
    seqs = max(asked.concurrency)
    config = EngineConfig(
        model=asked.MODEL,
        speculative_config=speculative,
        dtype=asked.dtype,
        num_threads=asked.num_threads,
        spec_overlap=asked.spec_overlap,
        early_prune=asked.early_prune,
        max_num_seqs=seqs,
        max_num_batched_tokens=max(256, seqs),
    )
    rows = min(_MOST_ROWS, seqs * (config.speculation.cap + 1))
    return replace(config, max_num_batched_tokens=max(256, seqs, rows))


def policies_of(texts: Sequence[str], speculation: SpeculationConfig) -> tuple[PolicySpec, ...]:
    """Raises ConfigError for a policy that cannot be had. `table` goes by the one table that the engine has."""
    return tuple(_policy_of(each, speculation) for each in texts)


def _policy_of(text: str, speculation: SpeculationConfig) -> PolicySpec:
    if text == "table" and speculation.table:
        return PolicySpec(text=text, name="table", table=speculation.table)
    if text.partition(":")[0] == "table":
        key = "num_speculative_tokens_per_batch_size"
        found = (
            f"which has {[list(each) for each in speculation.table]}" if speculation.table else "which has none"
        )
        raise ConfigError(
            f"--policies names {text!r}; an engine has one table, that of '{key}' in --speculative-config, "
            f"{found}: the policy that goes by it is called table"
        )
    return parse_policy(text, cap=speculation.cap)


def conditions(asked: argparse.Namespace, config: EngineConfig, prompts: Prompts) -> dict[str, Any]:
    """What has to be the same for runs to stand in one table."""
    digest = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()
    lengths = [len(token_ids) for _, token_ids in prompts]
    return {
        "model": asked.MODEL or "embedded",
        "speculation": config.speculative_config,
        "overlap": config.spec_overlap,
        "early pruning": config.early_prune,
        "dtype": config.dtype,
        "threads": config.threads,
        "rows of a step at most": config.max_num_batched_tokens,
        "prompts": f"{len(prompts)} of {min(lengths)} to {max(lengths)} tokens, SHA-256 {digest[:16]}",
        "output tokens": asked.output_tokens,
        "measured": "prompt and answer" if asked.include_prefill else "answers; prompts are in the prefix cache",
    }


def _numbers(text: str) -> list[int]:
    values = [int(each) for each in text.split(",") if each]
    if not values or min(values) < 1:
        raise argparse.ArgumentTypeError(f"it is {text}; it must be numbers of at least 1, like 1,2,4")
    return values


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"it is {text}; it must be at least 1")
    return value


def _temperature(text: str) -> float:
    if not 0 <= (value := float(text)) <= 2:
        raise argparse.ArgumentTypeError(f"it is {text}; it must be at least 0 and at most 2")
    return value


def _share(text: str) -> float:
    if not 0 <= (value := float(text)) < 1:
        raise argparse.ArgumentTypeError(f"it is {text}; it must be at least 0 and below 1")
    return value


def _seconds(text: str) -> float:
    if not 0 <= (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"it is {text}; it must be a number from 0 on")
    return value


def _texts(text: str) -> list[str]:
    return [each for each in text.split(",") if each]


def spec_parser() -> CommandParser:
    parser = CommandParser(PROG, description=__doc__)
    add = parser.add_argument
    add("MODEL", nargs="?", help="directory, GGUF file or hub id; without it, the embedded one")
    add("--help", "-h", action="store_true")
    add("--speculative-config", default="{}", metavar="JSON", help="who drafts, as of faser serve")
    add("--spec-overlap", choices=("auto", "on", "off"), default="auto", help="as of faser serve [auto]")
    add("--early-prune", choices=("auto", "on", "off"), default="off", help="as of faser serve [off]")
    add("--prompts", metavar="FILE", help="Spec-Bench's JSON lines, or a text a line; without it, built-in ones")
    add("--categories", type=_texts, default=[], help="of the prompts; without it, all")
    add("--max-prompt-tokens", type=_count, help="longer prompts are left out")
    add("--concurrency", type=_numbers, default=[1, 2, 4, 8, 16, 32], help="requests at a time [1,2,4,8,16,32]")
    add("--policies", type=_texts, default=_texts(_POLICIES), help=f"[{_POLICIES}]")
    add("--temperature", type=_temperature, nargs="+", default=[0.0, 1.0], help="[0 1]")
    add("--output-tokens", type=_count, default=64, help="of every answer [64]")
    add("--rounds", type=_count, default=3, help="of which the median counts [3]")
    add(
        "--drop-below",
        type=_share,
        default=0.0,
        metavar="SHARE",
        help="a policy slower than this share of the best one in a cell's first round has no others there [0]",
    )
    add("--min-seconds", type=_seconds, default=3.0, help="a run takes so long at least [3]")
    add("--include-prefill", action="store_true", help="compute prompts anew in every run, and measure that too")
    add("--dtype", default="auto")
    add("--num-threads", type=_count)
    add("--out", metavar="DIR", help="for result.json, report.md and pictures")
    add("--resume", action="store_true", help="go on with what is in --out")
    return parser
