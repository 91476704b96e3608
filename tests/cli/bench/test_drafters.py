"""Which drafters are compared, with which settings, and which are refused before a model is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest

from faser.cli.bench.comparison import Policy
from faser.cli.bench.drafters import (
    GivenAcceptance,
    Wanted,
    built_arms,
    check_memory,
    policies_of,
    wanted_drafters,
)
from faser.config.engine import EngineConfig
from faser.engine.contract.step_times import StepTimes
from faser.engine.control.clock import SimulatedClock
from faser.engine.control.speculation.control import SpeculationControl
from faser.engine.control.step_cost import CostModel
from faser.errors import ConfigError
from tests.native_acceptance import make_native

SMALL = ("--backend", "torch", "--dtype", "float32", "--num-threads", "1", "--max-model-len", "64")


def wanted(
    *arguments: str,
    concurrency: int = 4,
    named: list[str] | None = None,
    configs: tuple[dict[str, Any], ...] = (),
    acceptance: GivenAcceptance | None = None,
) -> list[Wanted]:
    return wanted_drafters(
        "faser bench spec",
        arguments,
        concurrency,
        named=named,
        configs=[json.dumps(each) for each in configs],
        acceptance=acceptance,
    )


def test_without_flags_all_that_may_be_at_hand_are_compared() -> None:
    assert [(each.name, each.optional) for each in wanted()] == [
        ("off", False),
        ("default", False),
        ("ngram_model", True),
        ("mtp", True),
        ("text", True),
    ]


def test_a_drafter_that_is_asked_for_by_name_is_not_optional() -> None:
    assert [(each.name, each.optional) for each in wanted(named=["mtp"])] == [("off", False), ("mtp", False)]


def test_each_drafter_is_a_speculative_config_of_serve() -> None:
    config = {
        each.name: each.config.speculation
        for each in wanted(acceptance=GivenAcceptance(rates=(0.8, 0.4), draft_s=0))
    }
    assert config["off"].policy == "off"
    assert (config["default"].method, config["default"].model) == ("auto", None)
    assert (config["text"].model, config["text"].ngram_model) == ("none", "none")
    assert config["mtp"].method == "mtp"
    assert config["given"].cap == 2


def test_further_drafters_are_named_after_their_model_or_method() -> None:
    configs = ({"model": "/models/head"}, {"model": "owner/head"}, {"method": "ngram"}, {"method": "ngram"})
    assert [each.name for each in wanted(configs=configs)][-4:] == ["head", "head 2", "ngram", "ngram 2"]


def test_the_engine_is_sized_for_every_draft_at_the_highest_concurrency() -> None:
    *_, last = wanted(concurrency=32, configs=({"num_speculative_tokens": 8},))
    assert (last.config.max_num_seqs, last.config.max_num_batched_tokens) == (32, 32 * 9)
    given = wanted("--max-num-seqs", "64", "--max-num-batched-tokens", "80", concurrency=32)[1].config
    assert (given.max_num_seqs, given.max_num_batched_tokens) == (64, 80)


def test_a_drafter_has_its_own_policy_unless_others_are_asked_for() -> None:
    drafters = wanted(
        configs=({"method": "ngram", "policy": "fixed", "num_speculative_tokens": 3},), named=["default", "ngram"]
    )
    assert policies_of(None, drafters) == {
        "default": [Policy(text="faser", name="faser")],
        "ngram": [Policy(text="fixed:3", name="fixed", gamma=3)],
    }
    assert [each.text for each in policies_of(["fixed:2", "faser", "fixed:2"], drafters)["ngram"]] == [
        "fixed:2",
        "faser",
    ]


def test_a_table_policy_is_accepted_by_the_control_of_speculation() -> None:
    keys = {"num_speculative_tokens_per_batch_size": [[1, 2, 4], [3, 8, 2]], "num_speculative_tokens": 6}
    drafters = wanted(configs=(keys,), named=["auto"])
    found = policies_of(["table", "fixed:6"], drafters)["auto"]
    assert found == [Policy(text="table", name="table"), Policy(text="fixed:6", name="fixed", gamma=6)]
    control = SpeculationControl(
        drafters[-1].config.speculation,
        CostModel(StepTimes.proportional(step_s=0.01)),
        make_native=make_native,
        num_slots=2,
        clock=SimulatedClock(0.0),
    )
    for each in found:
        control.use_policy(each.name, each.gamma)
        assert control.stats().policy == each.name


def test_what_the_model_lacks_is_left_out_with_the_reason(
    tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafters = wanted(str(tiny_checkpoint), *SMALL, concurrency=1)
    arms, directory = built_arms(drafters, policies_of(None, drafters))
    assert [arm.name for arm in arms] == ["off", "default"]
    assert [arm.policy is None for arm in arms] == [True, False]
    assert directory == tiny_checkpoint
    said = capsys.readouterr().err
    assert "mtp is left out: method is mtp; " in said
    assert "ngram_model is left out: method is ngram_model; it needs" in said


def test_what_the_model_lacks_is_refused_where_it_is_asked_for(tiny_checkpoint: Path) -> None:
    drafters = wanted(str(tiny_checkpoint), *SMALL, named=["mtp"], concurrency=1)
    with pytest.raises(ConfigError, match="has no layer that drafts"):
        built_arms(drafters, policies_of(None, drafters))


def test_engines_that_share_a_gpu_need_kv_caches_of_a_given_size() -> None:
    with pytest.raises(ConfigError, match="3 engines share one GPU; give --kv-cache-memory"):
        check_memory(EngineConfig(device="cuda"), 3)
    check_memory(EngineConfig(device="cuda", kv_cache_memory=1 << 30), 3)
    check_memory(EngineConfig(device="cpu"), 3)


def test_each_policy_of_a_drafter_is_an_arm_of_one_engine(tiny_checkpoint: Path) -> None:
    drafters = wanted(str(tiny_checkpoint), *SMALL, named=["text"], concurrency=1)
    off, one, other = built_arms(drafters, policies_of(["fixed:1", "faser"], drafters))[0]
    assert (off.name, one.name, other.name) == ("off", "text, fixed:1", "text, faser")
    assert one.engine is other.engine is not off.engine
