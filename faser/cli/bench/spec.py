"""`faser bench spec`: measures policies of speculation on a live engine, and writes a report.

One engine, in this process, serves all policies. faser.bench measures and summarises.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from faser.bench.campaign import Campaign, CampaignPlan
from faser.bench.plots import plots
from faser.bench.prompts import read_prompts, read_questions, select_prompts
from faser.bench.report import FASER, RESULT, load, markdown, save, summaries
from faser.bench.rivals import against_rivals
from faser.cli.bench.spec_arguments import PROG, spec_parser
from faser.cli.bench.spec_setup import campaign_plan, conditions, engine_config
from faser.cli.console.progress import ProgressReporter, runs_bar
from faser.cli.flags.sources import UsageError
from faser.cli.tools.env import facts
from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir
from faser.engine.checkpoints.source import resolve
from faser.engine.text.tokenizer import load_tokenizer

_FACTS = ("faser", "python", "system", "cpu", "cores", "cpu features", "memory", "backend", "torch", "numpy")


def spec(command: Sequence[str]) -> int:
    """Measure and report. Returns 1 if an answer differs from that without speculation. Raises ConfigError."""
    parser = spec_parser()
    arguments = parser.parse_args(list(command))
    if arguments.help:
        print(parser.format_help())
        return 0
    if arguments.out is None:
        raise UsageError(["--out is needed: a folder for the result, the report and the plots"])
    config = engine_config(arguments)
    plan = campaign_plan(arguments, config.speculation)
    if arguments.prompts is not None:
        read_questions(Path(arguments.prompts))  # a file that cannot be read is refused before a model is loaded
    out = Path(arguments.out)
    if (out / RESULT).exists() and not arguments.resume:
        raise UsageError([f"--out is {out}; it holds a result: give --resume to continue it, or another folder"])
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError([f"--out is {out}; it must be a folder that can be written: {error.strerror}"]) from None
    return _measure(arguments, config, plan, out, [*PROG.split(), *command])


def _measure(
    arguments: argparse.Namespace, config: EngineConfig, plan: CampaignPlan, out: Path, command: list[str]
) -> int:
    from faser.engine.build import build_engine  # imports torch

    with ProgressReporter() as report:
        directory = resolve(config.model, cache_dir(), progress=report)
        engine, _ = build_engine(config, directory, report)
    prompts = select_prompts(
        read_prompts(arguments.prompts, load_tokenizer(directory)),
        categories=arguments.categories,
        max_prompt_tokens=arguments.max_prompt_tokens,
    )
    shared = conditions(arguments, config, prompts)
    about = {
        "command": shlex.join(command),
        "machine": {name: value for name, value in facts().items() if name in _FACTS},
        "conditions": shared,
    }
    result = out / RESULT
    done = load(result, shared) if result.exists() else []
    campaign = Campaign(engine=engine, plan=plan, prompts=prompts, done=done)
    _run_all(campaign, result, about)
    return _report(campaign, out, about)


def _run_all(campaign: Campaign, result: Path, about: dict[str, Any]) -> None:
    """Measure every missing run under a progress bar, and save the result after each."""
    with runs_bar() as bar:
        console = bar.console
        task = bar.add_task("", total=campaign.plan.num_runs, completed=campaign.num_done)
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
    drawn = plots(campaign.done, found)
    for name, svg in drawn.items():
        (out / name).write_text(svg, encoding="utf-8")
    text = markdown(about, found, against_rivals(campaign.done, FASER), list(drawn))
    (out / "report.md").write_text(text, encoding="utf-8")
    print(text)
    return 1 if any(each.mismatches for each in found) else 0
