"""The drafters of `faser bench spec`, and an engine for each of them.

At hand are those that come with FASER and with the model's checkpoint, and those that --speculative-config names.
Each is a JSON of `--speculative-config`, so a drafter of the table is what `faser serve` would start with it.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from faser.cli.bench.comparison import OFF, Arm, Policy
from faser.cli.console import ProgressReporter
from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir
from faser.config.sources import Given, UsageError, engine_config, engine_settings
from faser.config.speculation import POLICIES, SpeculationConfig
from faser.engine.checkpoints.source import resolve
from faser.errors import ConfigError

DEFAULT, TEXT, GIVEN = "default", "text", "given"
# What comes with FASER or the checkpoint. With method auto these may be missing; by name they are refused then.
BUILT_IN: Mapping[str, Mapping[str, Any]] = {
    DEFAULT: {},
    "ngram_model": {"method": "ngram_model"},
    "mtp": {"method": "mtp"},
    TEXT: {"model": "none", "ngram_model": "none"},  # the same as default where the two before it are missing
}
_MAX_ROWS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenAcceptance:
    """A drafter that does not exist yet. rates: as for ReplayDrafter. draft_s: of drafting before a step."""

    rates: tuple[float, ...]
    draft_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One drafter. optional: left out with a message where the model has none. acceptance: of GIVEN."""

    name: str
    config: EngineConfig
    optional: bool = False
    acceptance: GivenAcceptance | None = None


def wanted_drafters(
    prog: str,
    arguments: Sequence[str],
    concurrency: int,
    *,
    named: Sequence[str] | None,
    configs: Sequence[str],
    acceptance: GivenAcceptance | None,
) -> list[Wanted]:
    """The drafters to build, off first.

    arguments: flags of an engine, without --speculative-config. named: of --drafters; None: all at hand. configs:
    of --speculative-config. Raises ConfigError for a drafter that there is not, and for wrong flags.
    """

    def config(keys: Mapping[str, Any] | str, *more: str) -> EngineConfig:
        text = keys if isinstance(keys, str) else json.dumps(keys)
        given = ["--speculative-config", text] if keys else []
        return _fitting(prog, [*arguments, *given, *more], concurrency)

    found = {OFF: Wanted(name=OFF, config=config("", "--speculative-policy", OFF))}
    for name, keys in BUILT_IN.items():
        is_asked = named is not None and name in named
        found[name] = Wanted(name=name, config=config(keys), optional=name != DEFAULT and not is_asked)
    for text in configs:
        own = config(text)
        name = _free_name(_name_of(own.speculation), found)
        found[name] = Wanted(name=name, config=own)
    if acceptance is not None:
        keys = {"method": "suffix", "num_speculative_tokens": len(acceptance.rates)}
        found[GIVEN] = Wanted(name=GIVEN, config=config(keys), acceptance=acceptance)
    unknown = [name for name in named or () if name not in found]
    if unknown:
        raise UsageError([f"--drafters names {unknown[0]!r}; it must be among {', '.join(found)}"])
    drafting = [each for name, each in found.items() if name != OFF and (named is None or name in named)]
    if not drafting:
        raise UsageError([f"--drafters is {','.join(named or ())!r}; it must name a drafter besides off"])
    for each in drafting:
        if each.config.speculation.policy == OFF:
            raise UsageError(
                [f"the policy of {each.name} is off; then it has no drafts to measure, so leave that out"]
            )
    return [found[OFF], *drafting]


def _fitting(prog: str, arguments: Sequence[str], concurrency: int) -> EngineConfig:
    """The engine's settings; those that are not given fit the highest concurrency and the longest drafts."""
    findings = engine_settings(prog, arguments)
    findings.given.setdefault("max_num_seqs", Given(texts=(str(concurrency),), label="--concurrency"))
    config = engine_config(findings)
    if "max_num_batched_tokens" in findings.given:
        return config
    rows = min(_MAX_ROWS, concurrency * (config.speculation.cap + 1))
    return replace(config, max_num_batched_tokens=max(config.max_num_batched_tokens, rows))


def _name_of(speculation: SpeculationConfig) -> str:
    model = speculation.model
    return speculation.method if model is None or model == "none" else Path(model).name


def _free_name(name: str, taken: Mapping[str, object]) -> str:
    """The name itself, or with the first number that makes it new."""
    return next(each for each in _numbered(name) if each not in taken)


def _numbered(name: str) -> Iterator[str]:
    yield name
    number = 2
    while True:
        yield f"{name} {number}"
        number += 1


def policies_of(texts: Sequence[str] | None, drafters: Sequence[Wanted]) -> dict[str, list[Policy]]:
    """The policies of each drafter: those of --policies, else its own. Raises ConfigError for others."""
    return {
        each.name: [
            _policy(text, each.config.speculation)
            for text in dict.fromkeys(texts or [_own_policy(each.config.speculation)])
        ]
        for each in drafters
        if each.name != OFF
    }


def _own_policy(speculation: SpeculationConfig) -> str:
    return f"fixed:{speculation.cap}" if speculation.policy == "fixed" else speculation.policy


def _policy(text: str, speculation: SpeculationConfig) -> Policy:
    name, colon, number = text.partition(":")
    if name not in POLICIES or name == OFF:
        allowed = [each for each in POLICIES if each != OFF]
        raise ConfigError(
            f"--policies names {text!r}; it must be one of {', '.join(allowed)} (off is always there)"
        )
    if name == "fixed":
        if not number.isdecimal() or not 1 <= int(number) <= speculation.cap:
            raise ConfigError(f"--policies names {text!r}; fixed:N needs an N of 1 … {speculation.cap}")
        return Policy(text=text, name=name, gamma=int(number))
    if colon:
        raise ConfigError(f"--policies names {text!r}; {name} takes no number")
    if name == "table" and not speculation.table:
        key = "num_speculative_tokens_per_batch_size"
        raise ConfigError(f"--policies names {text!r}; it needs '{key}' in --speculative-config")
    return Policy(text=text, name=name)


def built_arms(drafters: Sequence[Wanted], policies: Mapping[str, Sequence[Policy]]) -> tuple[list[Arm], Path]:
    """An engine for each drafter, and the model's directory. Raises ConfigError, also for a GPU without room."""
    from faser.engine.execution.startup.device import resolve_device  # imports torch

    off = drafters[0].config
    check_memory(resolve_device(off), len(drafters))
    arms: dict[str, list[Arm]] = {}
    with ProgressReporter() as report:
        directory = resolve(off.model, cache_dir(), revision=off.revision, progress=report)
        for each in drafters:
            if each.name == TEXT and each.optional and not arms.keys() & {"ngram_model", "mtp"}:
                continue
            try:
                arms[each.name] = _arms(each, policies.get(each.name), directory, report)
            except ConfigError as error:
                if not each.optional:
                    raise
                print(f"{each.name} is left out: {error}", file=sys.stderr)
    return [arm for each in arms.values() for arm in each], directory


def check_memory(config: EngineConfig, num_engines: int) -> None:
    """Raise ConfigError where the first engine's KV cache would leave the others no room."""
    if config.on_gpu and config.kv_cache_memory is None:
        raise ConfigError(
            f"{num_engines} engines share one GPU; give --kv-cache-memory, the size of each one's KV cache"
        )


def _arms(
    wanted: Wanted, policies: Sequence[Policy] | None, directory: Path, report: ProgressReporter
) -> list[Arm]:
    from faser.engine.build import build_engine  # imports torch
    from faser.engine.execution.drafting.replay import ReplayDrafter

    if wanted.acceptance is None:
        engine, _ = build_engine(wanted.config, directory, report)
        expect = None
    else:
        given = wanted.acceptance
        replay = ReplayDrafter(given.rates, draft_s=given.draft_s)
        engine, _ = build_engine(wanted.config, directory, report, wrap_drafter=lambda _drafter: replay)
        expect = replay.expect
    if policies is None:
        return [Arm(name=wanted.name, engine=engine)]
    return [
        Arm(
            name=wanted.name if len(policies) == 1 else f"{wanted.name}, {policy.text}",
            engine=engine,
            policy=policy,
            expect=expect,
        )
        for policy in policies
    ]
