"""The engine, the policies and the conditions that `faser bench spec` measures."""

import argparse
import hashlib

import pytest

from faser.bench.prompts import BenchPrompt
from faser.cli.bench.spec_arguments import spec_parser
from faser.cli.bench.spec_setup import conditions, engine_config, policies_from
from faser.cli.flags.sources import UsageError
from faser.config.speculation import SpeculationConfig
from faser.engine.contract.step_times import StepTimes
from faser.engine.control.clock import SimulatedClock
from faser.engine.control.speculation.control import SpeculationControl
from faser.engine.control.step_cost import CostModel
from faser.errors import ConfigError


def parsed(*arguments: str) -> argparse.Namespace:
    return spec_parser().parse_args(list(arguments))


def test_the_engine_is_sized_for_every_draft_at_the_highest_concurrency() -> None:
    config = engine_config(
        parsed("--concurrency", "1,32", "--speculative-config", '{"num_speculative_tokens": 8}')
    )
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (32, 32 * 9)


def test_drafts_do_not_come_from_past_answers_since_every_policy_answers_the_same_prompts() -> None:
    assert engine_config(parsed()).speculation.suffix_max_cached_requests == 0
    assert engine_config(parsed("--include-prefill")).speculation.suffix_max_cached_requests > 0
    kept = '{"suffix_decoding_max_cached_requests": 7}'
    assert engine_config(parsed("--speculative-config", kept)).speculation.suffix_max_cached_requests == 7


def test_policies_are_read_with_their_gammas() -> None:
    found = policies_from(["off", "fixed:3", "faser"], SpeculationConfig())
    assert [(each.name, each.gamma) for each in found] == [("off", None), ("fixed", 3), ("faser", None)]


def test_a_table_policy_is_accepted_by_the_control_of_speculation() -> None:
    table = '{"num_speculative_tokens_per_batch_size": [[1, 2, 4], [3, 8, 2]], "num_speculative_tokens": 6}'
    speculation = engine_config(parsed("--speculative-config", table)).speculation
    found = policies_from(["off", "table", "fixed:6"], speculation)
    assert [(each.text, each.name, each.gamma) for each in found] == [
        ("off", "off", None),
        ("table", "table", None),
        ("fixed:6", "fixed", 6),
    ]
    control = SpeculationControl(
        speculation,
        CostModel(StepTimes.proportional(step_s=0.01)),
        num_slots=2,
        clock=SimulatedClock(0.0),
    )
    for each in found:
        control.use_policy(each.name, each.gamma)
        assert control.stats().policy == each.name
    with pytest.raises(ConfigError, match=r"'table:2=3'.* which has \[\[1, 2, 4\], \[3, 8, 2\]\]"):
        policies_from(["table:2=3"], speculation)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="--policies names 'fast'"):
        policies_from(["fast"], SpeculationConfig())
    with pytest.raises(UsageError):
        parsed("--nonsense")


def test_conditions_identify_the_prompts() -> None:
    """Oracle: SHA-256 of the JSON of (category, token ids), so that earlier results can be resumed."""
    arguments = parsed()
    prompts = [BenchPrompt(category="code", token_ids=(1, 2, 3)), BenchPrompt(category="chat", token_ids=(4, 5))]
    digest = hashlib.sha256(b'[["code", [1, 2, 3]], ["chat", [4, 5]]]').hexdigest()
    found = conditions(arguments, engine_config(arguments), prompts)
    assert found["prompts"] == f"2 of 2 to 3 tokens, SHA-256 {digest[:16]}"
