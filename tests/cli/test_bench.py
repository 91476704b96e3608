"""`faser bench spec`: what it measures, what its table says, and what it refuses before a model is loaded."""

import re
from collections import Counter
from pathlib import Path
from typing import cast

import pytest

from faser.cli.bench import Measured, PolicyComparison, bench_config, policies_of, table
from faser.cli.bench_prompts import BenchPrompt
from faser.cli.main import main
from faser.config.speculation import SpeculationConfig
from faser.engine.contract.step_times import StepTimes
from faser.engine.control.clock import SimulatedClock
from faser.engine.control.speculation.control import SpeculationControl
from faser.engine.control.step_cost import CostModel
from faser.engine.engine import Engine
from faser.errors import EngineError
from tests.cli.stepped_engine import CAP, ROW_S, STEP_S, SteppedEngine

PROMPTS = [BenchPrompt(category="code", token_ids=(1, 2, 3)), BenchPrompt(category="chat", token_ids=(4, 5))]


def comparison(
    engine: SteppedEngine, *policies: str, rounds: int = 2, temperature: float = 0.0, min_s: float = 0.0
) -> PolicyComparison:
    return PolicyComparison(
        engine=cast(Engine, engine),
        prompts=PROMPTS,
        policies=policies_of(policies, SpeculationConfig(num_speculative_tokens=CAP)),
        temperature=temperature,
        output_tokens=9,
        rounds=rounds,
        now=engine.now,
        min_s=min_s,
    )


def measure(
    engine: SteppedEngine, *policies: str, concurrency: int = 2, rounds: int = 2, min_s: float = 0.0
) -> list[Measured]:
    return comparison(engine, *policies, rounds=rounds, min_s=min_s).at(concurrency, lambda _run: None)


def test_every_policy_is_measured_in_every_round_and_off_is_always_there() -> None:
    found = measure(SteppedEngine(), "fixed:2", "faser", rounds=3)
    assert [(each.policy, len(each.runs)) for each in found] == [("off", 3), ("fixed:2", 3), ("faser", 3)]


def test_each_round_begins_with_another_policy() -> None:
    engine = SteppedEngine()
    measure(engine, "fixed:2", "faser", rounds=3)
    order = engine.policies[-9:]
    assert order == ["off", "fixed:2", "faser", "fixed:2", "faser", "off", "faser", "off", "fixed:2"]


def test_what_was_learnt_about_acceptance_is_kept_within_a_concurrency_only() -> None:
    engine = SteppedEngine()
    compared = comparison(engine, "faser")
    for concurrency in (1, 2):
        compared.at(concurrency, lambda _run: None)
    assert engine.times_forgotten == 2


def test_a_run_lasts_at_least_min_s() -> None:
    (off,) = measure(SteppedEngine(), "off", concurrency=4, min_s=2.0)
    assert all(each.seconds >= 2.0 and len(each.answers) % 4 == 0 for each in off.runs)


def test_all_policies_answer_the_same_requests() -> None:
    engine = SteppedEngine()
    found = measure(engine, "fixed:2", min_s=1.0)
    count = len(found[0].runs[0].answers)
    asked = Counter((each.prompt_token_ids, each.sampling.seed) for each in engine.asked[-4 * count :])
    assert set(asked.values()) == {4}


def test_equal_answers_do_not_differ_and_a_changed_token_does() -> None:
    assert not any(each.differing for each in measure(SteppedEngine(), "fixed:2", "faser"))
    spoilt = {each.policy: each for each in measure(SteppedEngine(wrong_policy="faser"), "fixed:2", "faser")}
    assert [spoilt[name].differing for name in ("off", "fixed:2")] == [0, 0]
    assert spoilt["faser"].differing == spoilt["faser"].num_answers


def test_every_request_is_answered_in_full_and_in_order() -> None:
    engine = SteppedEngine()
    found = measure(engine, concurrency=5)
    assert [len(answer) for answer in found[0].runs[0].answers] == [9] * 5
    assert [request.prompt_token_ids for request in engine.asked[-5:]] == [(1, 2, 3), (4, 5)] * 2 + [(1, 2, 3)]
    first = [answer[0] for answer in found[0].runs[0].answers]
    assert first == [(7 * seed + 3 - seed % 2) % 100 for seed in range(5)]


def test_answers_have_equal_lengths_and_different_seeds() -> None:
    engine = SteppedEngine()
    measure(engine)
    assert [request.sampling.seed for request in engine.asked[-4:]] == [0, 1, 2, 3]
    assert all(request.sampling.ignore_eos for request in engine.asked)


@pytest.mark.parametrize("concurrency", [1, 3, 8])
def test_the_concurrency_is_kept_while_requests_remain(concurrency: int) -> None:
    engine = SteppedEngine()
    measure(engine, concurrency=concurrency)
    assert engine.most_running == concurrency


def test_speed_is_measured_at_full_concurrency_only() -> None:
    """Four answers, three at a time: the last one runs alone and does not count."""
    (off,) = measure(SteppedEngine(), concurrency=3)
    seconds = 9 * (STEP_S + 3 * ROW_S) + STEP_S  # prompts are in the cache; they take a step without rows
    assert off.runs[0].tokens_per_s == pytest.approx(27 / seconds)
    assert off.runs[0].seconds > seconds


def test_counters_exclude_earlier_runs() -> None:
    _, fixed = measure(SteppedEngine(right=2), "fixed:3", rounds=1)
    (run,) = fixed.runs
    assert (run.verified, run.accepted, run.gamma_mean) == (36, 24, 3)


def test_an_answer_that_fails_ends_the_comparison() -> None:
    with pytest.raises(EngineError, match="run-1/0 ended with error: the model"):
        measure(SteppedEngine(fails=True))


def test_the_table_has_a_line_for_each_policy() -> None:
    lines = table(measure(SteppedEngine(right=2), "fixed:2")).splitlines()
    assert [re.split(r"  +", line.strip()) for line in lines] == [
        ["at once", "policy", "tokens/s", "slowest", "fastest", "over off", "mean γ", "accepted", "differing"],
        ["2", "off", "152.5", "152.5", "152.5", "1.00x", "0.00", "0 of 8"],
        ["2", "fixed:2", "310.3", "310.3", "310.3", "2.03x", "2.00", "100%", "0 of 8"],
    ]
    assert len(set(map(len, lines))) == 1


def test_the_engine_is_sized_for_every_draft_at_the_highest_concurrency() -> None:
    config = bench_config(["--speculative-config", '{"num_speculative_tokens": 8}'], 32)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (32, 32 * 9)
    given = bench_config(["--max-num-seqs", "64", "--max-num-batched-tokens", "80"], 32)
    assert (given.max_num_seqs, given.max_num_batched_tokens) == (64, 80)


def test_drafts_do_not_come_from_past_answers_since_every_policy_answers_the_same_prompts() -> None:
    assert bench_config([], 1).speculation.suffix_max_cached_requests == 0
    kept = '{"suffix_decoding_max_cached_requests": 7}'
    assert bench_config(["--speculative-config", kept], 1).speculation.suffix_max_cached_requests == 7
    other = bench_config(["--speculative-config", '{"method": "ngram"}'], 1)
    assert other.speculation_warnings == ()


def test_a_table_policy_is_accepted_by_the_control_of_speculation() -> None:
    keys = '{"num_speculative_tokens_per_batch_size": [[1, 2, 4], [3, 8, 2]], "num_speculative_tokens": 6}'
    speculation = bench_config(["--speculative-config", keys], 4).speculation
    found = policies_of(["table", "fixed:6"], speculation)
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


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--concurrency", "0"], "faser bench: --concurrency is 0; it must be numbers of at least 1, like 1,2,4"),
        (["--concurrency", "x"], "faser bench: --concurrency is x; it must be numbers of at least 1, like 1,2,4"),
        (["--concurrency", "4,x"], "faser bench: --concurrency is x; it must be numbers of at least 1"),
        (["--concurrency", ","], "faser bench: --concurrency is ','; it must be numbers of at least 1"),
        (["--concurrency", "5000"], "faser bench: --concurrency is 5000; it must be at least 1 and at most 4096"),
        (["--rounds", "1.5"], "faser bench: --rounds is 1.5; it must be a whole number of at least 1"),
        (
            ["--temperature", "3"],
            "faser bench: --temperature is 3; it must be a number of at least 0 and at most 2",
        ),
        (["--temperature", "hot"], "faser bench: --temperature is hot; it must be a number of at least 0"),
        (["--policies", "fixed:99"], "fixed:N needs an N of 1 … 16"),
        (["--policies", "table:4=5"], "names 'table:4=5'; table takes no number"),
        (["--policies", "table"], "names 'table'; it needs 'num_speculative_tokens_per_batch_size'"),
        (["--policies", "fast"], "names 'fast'; it must be one of off, fixed, table,"),
        (["--dtype", "int8"], "faser bench: --dtype is int8; it must be one of auto, bfloat16"),
        (["--speculative-policy", "off"], "--speculative-policy is off; then there are no drafts to measure"),
        (
            ["--prompts", "/no/such/file"],
            "--prompts is /no/such/file; it cannot be read: No such file or directory",
        ),
        (["--speculative-config", "[1]"], "it must be a JSON object"),
        (["--speculative-config", "{"], "it must be a JSON object"),
        (["--out", "report"], "--out: unknown flag."),
    ],
)
def test_a_wrong_command_line_is_refused_before_a_model_is_loaded(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "spec", "/no/such/model", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["serve", "latency", "throughput", "sweep"])
def test_a_measurement_of_vllms_is_refused_by_name(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", kind]) == 2
    assert f"'bench {kind}' is known from vLLM but not supported" in capsys.readouterr().err


def test_an_unknown_measurement_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "spek"]) == 2
    assert "unknown measurement 'spek'. Did you mean 'spec'?" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["bench", "--help"], ["bench", "spec", "--help"]])
def test_help_is_printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("usage: faser bench")


def test_a_real_engine_answers_the_same_with_and_without_drafts(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "two words.txt"
    prompts.write_text("the cat the cat the cat\n")
    flags = ["--prompts", str(prompts), "--policies", "fixed:3", "--concurrency", "2", "--rounds", "1"]
    flags += ["--output-tokens", "4", "--backend", "torch", "--dtype", "float32", "--num-threads", "1"]
    assert main(["bench", "spec", str(tiny_checkpoint), *flags]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^ +2  fixed:3 ", out, re.M)
    assert "answers are token for token those without drafts." in out
