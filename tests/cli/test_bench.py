"""`faser bench` finds what is to be measured and refuses what there is not."""

import argparse
from pathlib import Path

import pytest

from faser.cli.bench.spec import engine_config, policies_of, spec_parser
from faser.cli.flags.sources import UsageError
from faser.cli.main import main
from faser.config.speculation import SpeculationConfig
from faser.engine.contract.step_times import StepTimes
from faser.engine.control.speculation.control import SpeculationControl
from faser.engine.control.timing.clock import SimulatedClock
from faser.engine.control.timing.cost_model import CostModel
from faser.errors import ConfigError


def asked(*arguments: str) -> argparse.Namespace:
    return spec_parser().parse_args(list(arguments))


@pytest.mark.parametrize("kind", ["serve", "latency", "throughput", "sweep"])
def test_what_vllm_measures_is_refused_by_name(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", kind]) == 2
    assert f"'bench {kind}' is known from vLLM but not supported" in capsys.readouterr().err


def test_the_simulators_new_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "simulate", "--help"]) == 2
    assert "python -m benchmarks.simulator" in capsys.readouterr().err


def test_an_unknown_measurement_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "spek"]) == 2
    assert "unknown measurement 'spek'. Did you mean 'spec'?" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["bench", "--help"], ["bench", "spec", "--help"]])
def test_help_is_printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("usage: faser bench")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--concurrency", "0"], "it must be numbers of at least 1"),
        (["--temperature", "3"], "it must be at least 0 and at most 2"),
        (["--policies", "fixed:99"], "fixed:N needs an N of 1 …"),
        (["--policies", "table:4=5"], "names 'table:4=5'; an engine has one table"),
        (["--policies", "table"], "names 'table'; an engine has one table"),
        (["--speculative-config", "[1]"], "it must be a JSON object"),
        (["--speculative-config", "{"], "not JSON"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_model_is_loaded(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["bench", "spec", "--out", str(tmp_path / "new"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_place_for_the_result_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "spec"]) == 2
    assert "--out is needed" in capsys.readouterr().err


def test_a_result_is_not_overwritten_unless_it_is_gone_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "result.json").write_text("{}")
    assert main(["bench", "spec", "--out", str(tmp_path)]) == 2
    assert "it holds a result already: give --resume" in capsys.readouterr().err
    assert (tmp_path / "result.json").read_text() == "{}"


def test_the_engine_has_room_for_every_draft_at_the_highest_concurrency() -> None:
    config = engine_config(asked("--concurrency", "1,32", "--speculative-config", '{"num_speculative_tokens": 8}'))
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (32, 32 * 9)


def test_past_answers_are_not_drafted_from_since_every_policy_answers_the_same_prompts() -> None:
    assert engine_config(asked()).speculation.suffix_max_cached_requests == 0
    assert engine_config(asked("--include-prefill")).speculation.suffix_max_cached_requests > 0
    kept = '{"suffix_decoding_max_cached_requests": 7}'
    assert engine_config(asked("--speculative-config", kept)).speculation.suffix_max_cached_requests == 7


def test_policies_are_read_with_their_gammas() -> None:
    found = policies_of(["off", "fixed:3", "faser"], SpeculationConfig())
    assert [(each.name, each.gamma) for each in found] == [("off", None), ("fixed", 3), ("faser", None)]


def test_a_table_is_measured_beside_the_others_by_a_real_control_of_speculation() -> None:
    table = '{"num_speculative_tokens_per_batch_size": [[1, 2, 4], [3, 8, 2]], "num_speculative_tokens": 6}'
    speculation = engine_config(asked("--speculative-config", table)).speculation
    found = policies_of(["off", "table", "fixed:6"], speculation)
    assert [(each.text, each.name, each.gamma) for each in found] == [
        ("off", "off", None),
        ("table", "table", None),
        ("fixed:6", "fixed", 6),
    ]
    control = SpeculationControl(
        speculation, CostModel(StepTimes.proportional(step_s=0.01)), num_slots=2, clock=SimulatedClock(0.0)
    )
    for each in found:
        control.use_policy(each.name, each.gamma)
        assert control.stats().policy == each.name
    with pytest.raises(ConfigError, match=r"'table:2=3'.* which has \[\[1, 2, 4\], \[3, 8, 2\]\]"):
        policies_of(["table:2=3"], speculation)


def test_a_policy_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="--policies names 'fast'"):
        policies_of(["fast"], SpeculationConfig())
    with pytest.raises(UsageError):
        asked("--nonsense")
