"""What `faser bench spec` measures: the engine's settings, the policies and the conditions of a campaign."""

import argparse
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from faser.bench.campaign import CampaignPlan
from faser.bench.policy_spec import PolicySpec, parse_policy
from faser.bench.prompts import BenchPrompt
from faser.cli.flags.sources import UsageError
from faser.config.checks import find_problems, flag_label
from faser.config.engine import EngineConfig
from faser.config.speculation import SpeculationConfig
from faser.errors import ConfigError

_PAST_ANSWERS = "suffix_decoding_max_cached_requests"
_MAX_ROWS = 1024


def campaign_plan(arguments: argparse.Namespace, speculation: SpeculationConfig) -> CampaignPlan:
    return CampaignPlan(
        policies=policies_from(arguments.policies, speculation),
        concurrencies=tuple(arguments.concurrency),
        temperatures=tuple(arguments.temperature),
        rounds=arguments.rounds,
        output_tokens=arguments.output_tokens,
        min_s=arguments.min_seconds,
        include_prefill=arguments.include_prefill,
        drop_below=arguments.drop_below,
    )


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """The settings of the engine: sized for the highest concurrency and the longest drafts of all cells."""
    try:
        speculative = json.loads(arguments.speculative_config)
    except ValueError as error:
        raise UsageError([f"--speculative-config is {arguments.speculative_config}; not JSON: {error}"]) from error
    if not isinstance(speculative, dict):
        raise UsageError([f"--speculative-config is {arguments.speculative_config}; it must be a JSON object"])
    if speculative.get("method", "auto") in ("auto", "suffix") and not arguments.include_prefill:
        speculative.setdefault(_PAST_ANSWERS, 0)
    seqs = max(arguments.concurrency)
    settings: dict[str, Any] = {
        "model": arguments.MODEL,
        "speculative_config": speculative,
        "dtype": arguments.dtype,
        "num_threads": arguments.num_threads,
        "spec_overlap": arguments.spec_overlap,
        "early_prune": arguments.early_prune,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": max(256, seqs),
    }
    if problems := find_problems(EngineConfig, settings, flag_label):
        raise UsageError(problems)
    config = EngineConfig(**settings)
    rows = min(_MAX_ROWS, seqs * (config.speculation.cap + 1))
    return replace(config, max_num_batched_tokens=max(256, seqs, rows))


def policies_from(texts: Sequence[str], speculation: SpeculationConfig) -> tuple[PolicySpec, ...]:
    """Raises ConfigError for an unknown policy. `table` uses the table in --speculative-config."""
    return tuple(_policy_from(each, speculation) for each in texts)


def _policy_from(text: str, speculation: SpeculationConfig) -> PolicySpec:
    if text == "table" and speculation.table:
        return PolicySpec(text=text, name="table", table=speculation.table)
    if text.partition(":")[0] == "table":
        key = "num_speculative_tokens_per_batch_size"
        found = (
            f"which has {[list(each) for each in speculation.table]}" if speculation.table else "which has none"
        )
        raise ConfigError(
            f"--policies names {text!r}; an engine has one table, that of '{key}' in --speculative-config, "
            f"{found}: the policy that uses it is called table"
        )
    return parse_policy(text, cap=speculation.cap)


def conditions(
    arguments: argparse.Namespace, config: EngineConfig, prompts: Sequence[BenchPrompt]
) -> dict[str, Any]:
    """The conditions that all runs of a campaign share; a campaign resumes only under the same."""
    digest = hashlib.sha256(json.dumps([(each.category, each.token_ids) for each in prompts]).encode()).hexdigest()
    lengths = [len(each.token_ids) for each in prompts]
    return {
        "model": arguments.MODEL or "embedded",
        "speculation": config.speculative_config,
        "overlap": config.spec_overlap,
        "early pruning": config.early_prune,
        "dtype": config.dtype,
        "threads": config.threads,
        "rows of a step at most": config.max_num_batched_tokens,
        "prompts": f"{len(prompts)} of {min(lengths)} to {max(lengths)} tokens, SHA-256 {digest[:16]}",
        "output tokens": arguments.output_tokens,
        "measured": "prompt and answer"
        if arguments.include_prefill
        else "answers; prompts are in the prefix cache",
    }
