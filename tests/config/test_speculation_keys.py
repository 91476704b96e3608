"""What --speculative-config may hold, which config it becomes, and the messages that refuse it."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser import __version__
from faser.config.declaration import Kind, Setting
from faser.config.engine import EngineConfig
from faser.config.foreign import Support
from faser.config.speculation import METHODS, PASS_METHODS, POLICIES, TEXT_METHODS, SpeculationConfig
from faser.config.speculation_keys import FIELDS, KEYS, parse_speculation
from faser.config.vllm_names import FOREIGN_KEYS, FOREIGN_METHODS
from faser.errors import ConfigError, RequestError
from faser.types.request import Slo, SpeculationParams

KNOWN = ", ".join(key.name for key in KEYS)
OWN_METHODS = " or ".join(", ".join(map(repr, (*TEXT_METHODS, *PASS_METHODS))).rsplit(", ", 1))


def config(**keys: Any) -> SpeculationConfig:
    parsed = parse_speculation(keys)
    assert parsed.config is not None, parsed.problems
    assert not parsed.problems
    return parsed.config


def problems(**keys: Any) -> tuple[str, ...]:
    parsed = parse_speculation(keys)
    assert parsed.config is None
    return parsed.problems


def test_the_default_is_text_drafts_under_policy_faser() -> None:
    assert config() == SpeculationConfig(method="auto", policy="faser")
    assert config().cap == 16


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_null_is_the_same_as_absent(key: Setting) -> None:
    assert config(**{key.name: None}) == config()


@pytest.mark.parametrize(
    "keys, field, value",
    [
        ({"method": "ngram"}, "method", "ngram"),
        ({"method": "ngram_gpu"}, "method", "ngram"),
        ({"model": "d"}, "model", "d"),
        ({"method": "draft_model", "model": "d", "revision": "r"}, "revision", "r"),
        ({"model": "d", "max_model_len": 512}, "draft_max_model_len", 512),
        ({"num_speculative_tokens": 1}, "num_speculative_tokens", 1),
        ({"num_speculative_tokens": 32}, "num_speculative_tokens", 32),
        ({"prompt_lookup_max": 4}, "prompt_lookup_max", 4),
        ({"prompt_lookup_max": 4}, "prompt_lookup_min", 1),
        ({"prompt_lookup_max": 1}, "prompt_lookup_min", 1),
        ({"prompt_lookup_min": 7}, "prompt_lookup_max", 7),
        ({"suffix_decoding_max_cached_requests": 0}, "suffix_max_cached_requests", 0),
        ({"ngram_model": "some.npz"}, "ngram_model", "some.npz"),
        ({"policy": "goodput"}, "policy", "goodput"),
        ({"enable_adaptive_verification": True}, "policy", "survival"),
        ({"enable_adaptive_verification": False}, "policy", "faser"),
        ({"rejection_sample_method": "block"}, "rejection_sample_method", "block"),
        ({"draft_sample_method": "probabilistic"}, "draft_sample_method", "probabilistic"),
        ({"slo": {"tpot_ms": 20}}, "slo", Slo(tpot_ms=20)),
    ],
)
def test_a_key_is_honoured(keys: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(config(**keys), field) == value


SIMPLE = [key for key in KEYS if key.kind not in (Kind.JSON, Kind.SWITCH) and key.name != "policy"]


@pytest.mark.parametrize("key", SIMPLE, ids=lambda key: key.name)
def test_every_key_of_a_field_reaches_it(key: Setting) -> None:
    """A value other than the default, made from the key's own key."""
    if key.choices:
        value: Any = next(each for each in reversed(key.choices) if each not in ("auto", "synthetic"))
    elif key.kind is Kind.TEXT:
        value = "x" if key.name != "admission" else "refuse"
    else:
        value = key.high if key.name != "prompt_lookup_min" else 4
    read = config(**({"policy": "faser"} | {key.name: value}))
    assert getattr(read, FIELDS.get(key.name, key.name)) == value


def test_an_unknown_key_is_named_with_what_was_meant_and_what_there_is() -> None:
    assert problems(metod="ngram") == (f"unknown key 'metod'. Did you mean 'method'? Known keys: {KNOWN}",)
    assert problems(qqqqqqqq=1) == (f"unknown key 'qqqqqqqq'. Known keys: {KNOWN}",)


@pytest.mark.parametrize("name", FOREIGN_KEYS)
def test_a_key_of_vllms_is_refused_by_name_or_accepted_with_a_warning(name: str) -> None:
    foreign = FOREIGN_KEYS[name]
    if foreign.support is Support.WARN:
        parsed = parse_speculation({name: True})
        assert (parsed.problems, parsed.warnings) == ((), (f"'{name}' has no effect: {foreign.reason}",))
        return
    (problem,) = problems(**{name: 77})
    start = f"'{name}' is known from vLLM but not supported by FASER {__version__}: {foreign.reason}. Remove it"
    assert problem.startswith(start)
    assert foreign.instead in problem


@pytest.mark.parametrize(
    "name, value",
    [(name, value) for name, foreign in FOREIGN_KEYS.items() for value in (None, *foreign.neutral)],
)
def test_a_value_that_asks_for_nothing_is_accepted_without_a_warning(name: str, value: Any) -> None:
    parsed = parse_speculation({name: value})
    assert (parsed.config, parsed.warnings) == (SpeculationConfig(), ())


@pytest.mark.parametrize("method", [*FOREIGN_METHODS, "deepseek_mtp"])
def test_a_method_of_vllms_that_is_not_built_is_refused_by_name(method: str) -> None:
    (problem,) = problems(method=method)
    assert problem.startswith(f"'{method}' is known from vLLM but not supported by FASER {__version__}: ")
    assert problem.endswith(f" Remove it or use {OWN_METHODS}.")


@pytest.mark.parametrize("method", ["mtp", "qwen3_5_mtp", "qwen3_next_mtp"])
def test_the_layer_of_the_models_checkpoint_drafts_without_a_model(method: str) -> None:
    parsed = parse_speculation({"method": method, "num_speculative_tokens": 2})
    assert parsed.config == SpeculationConfig(method="mtp", num_speculative_tokens=2)
    assert not parsed.warnings
    assistant = parse_speculation({"method": method, "model": "d", "max_model_len": 9})
    assert assistant.config == SpeculationConfig(method="mtp", model="d", draft_max_model_len=9)
    assert assistant.warnings == ("'max_model_len' has no effect with method mtp",)


def test_a_method_that_faser_had_is_refused_by_name() -> None:
    (problem,) = problems(method="layer_skip")
    assert problem == (
        "'layer_skip' was removed: drafts of the model's own first layers did not pay (docs/speculation.md). "
        f"Use {OWN_METHODS}."
    )


@pytest.mark.parametrize(
    "keys, problem",
    [
        (
            {"tensor_parallel_size": 1},
            f"'tensor_parallel_size' is known from vLLM but not supported by FASER {__version__}: "
            "it does not apply to the drafter. Remove it or use 'draft_tensor_parallel_size' 1.",
        ),
        (
            {"policy": "goodput", "enable_adaptive_verification": True},
            "'policy' and 'enable_adaptive_verification' ask for different policies "
            "(goodput, survival); keep one.",
        ),
        (
            {"enable_adaptive_verification": True, "num_speculative_tokens_per_batch_size": [[1, 8, 4]]},
            "'num_speculative_tokens_per_batch_size' and 'enable_adaptive_verification' ask for different "
            "policies (table, survival); keep one.",
        ),
        (
            {"rejection_sample_method": "strict"},
            "rejection_sample_method is strict; it is an older name; use standard, block or synthetic",
        ),
        (
            {"rejection_sample_method": "probabilistic"},
            "rejection_sample_method is probabilistic; it is an older name; use standard, block or synthetic",
        ),
        ({"method": "magic"}, f"method is magic; it must be one of {', '.join(METHODS)}"),
        ({"method": 5}, "method is 5; it must be text"),
        ({"policy": "best"}, f"policy is best; it must be one of {', '.join(POLICIES)}"),
        ({"policy": "table"}, "'policy' is table; it needs 'num_speculative_tokens_per_batch_size'"),
        ({"method": "draft_model"}, "method is draft_model; it needs 'model'"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0; it must be at least 1 and at most 32"),
        ({"num_speculative_tokens": 33}, "num_speculative_tokens is 33; it must be at least 1 and at most 32"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens is true; it must be a whole number"),
        ({"num_speculative_tokens": "4"}, "num_speculative_tokens is 4; it must be a whole number"),
        (
            {"prompt_lookup_min": 5, "prompt_lookup_max": 4},
            "prompt_lookup_min is 5; it must be at most prompt_lookup_max, 4",
        ),
        (
            {"suffix_decoding_max_cached_requests": -1},
            "suffix_decoding_max_cached_requests is -1; it must be at least 0 and at most 1073741824",
        ),
        (
            {"rejection_sample_method": "synthetic"},
            "rejection_sample_method is synthetic; it needs 'synthetic_acceptance_rates'",
        ),
        (
            {"synthetic_acceptance_rates": [0.5]},
            "'synthetic_acceptance_rates' needs rejection_sample_method synthetic",
        ),
        (
            {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5},
            f"'synthetic_acceptance_length' is known from vLLM but not supported by FASER {__version__}: an "
            "acceptance is given for each position. Remove it or use 'synthetic_acceptance_rates'.",
        ),
        ({"enable_adaptive_verification": 1}, "enable_adaptive_verification is 1; it must be true or false"),
        ({"slo": {"tpot_ms": 0}}, "slo.tpot_ms is 0; it must be a number of milliseconds above 0"),
        ({"slo": {"ttft_ms": True}}, "slo.ttft_ms is true; it must be a number of milliseconds above 0"),
        ({"slo": 5}, "slo is 5; it must be an object of ttft_ms, tpot_ms"),
        (
            {"slo": {"tpot": 5}},
            "unknown key 'slo.tpot'. Did you mean 'slo.tpot_ms'? Known keys: slo.ttft_ms, slo.tpot_ms",
        ),
        ({"classes": {"a": {"enabled": 1}}}, "classes.a.enabled is 1; it must be true, false or auto"),
        (
            {"classes": {"a": {"max_tokens": 5}}, "num_speculative_tokens": 4},
            "classes.a.max_tokens is 5; it must be at least 0 and at most 4",
        ),
        (
            {"classes": {"a": {"slo": {"tpot_ms": "x"}}}},
            "classes.a.slo.tpot_ms is x; it must be a number of milliseconds above 0",
        ),
        (
            {"classes": {"a": {"cap": 5}}},
            "unknown key 'classes.a.cap'. Known keys: classes.a.enabled, classes.a.max_tokens, classes.a.slo, "
            "classes.a.admission",
        ),
    ],
)
def test_each_mistake_has_its_message(keys: dict[str, Any], problem: str) -> None:
    assert problems(**keys) == (problem,)


def test_all_problems_are_reported_at_once() -> None:
    found = problems(metod=1, num_speculative_tokens=0, overlap="cores", quantization="awq", slo={"x": 1})
    assert len(found) == 5


def test_one_mistake_is_reported_once() -> None:
    assert len(problems(rejection_sample_method="synthetic", synthetic_acceptance_rates="x")) == 1
    assert len(problems(method="draft_model", model=7)) == 1


def test_a_key_that_the_method_does_not_use_is_warned_of() -> None:
    parsed = parse_speculation({"method": "suffix", "prompt_lookup_max": 4, "model": "d"})
    assert parsed.warnings == (
        "'model' has no effect with method suffix",
        "'prompt_lookup_max' has no effect with method suffix",
    )
    assert parse_speculation({"prompt_lookup_max": 4, "model": "d"}).warnings == ()


def test_a_table_sets_the_policy_and_its_largest_entry_the_cap() -> None:
    read = config(num_speculative_tokens_per_batch_size=[[1, 8, 5], [9, 32, 2], [33, 4096, 0]])
    assert (read.policy, read.cap) == ("table", 5)
    assert read.table == ((1, 8, 5), (9, 32, 2), (33, 4096, 0))
    assert config(policy="table", num_speculative_tokens_per_batch_size=[[1, 8, 5]]).policy == "table"


@pytest.mark.parametrize(
    "ranges",
    [
        [],
        "x",
        [[1, 2]],
        [[1, 2, 3.0]],
        [[2, 3, 1]],
        [[1, 4, 2], [6, 8, 1]],
        [[1, 4, 2], [4, 8, 1]],
        [[1, 4, 2], [5, 4, 1]],
        [[1, 4, -1]],
        [[1, 4, 33]],
    ],
)
def test_a_table_with_a_gap_an_overlap_or_another_shape_is_refused(ranges: Any) -> None:
    (problem,) = problems(num_speculative_tokens_per_batch_size=ranges)
    assert problem.startswith("num_speculative_tokens_per_batch_size")


def test_no_entry_of_a_table_exceeds_the_cap() -> None:
    (problem,) = problems(num_speculative_tokens=3, num_speculative_tokens_per_batch_size=[[1, 8, 4]])
    assert problem.endswith("is [1, 8, 4]; tokens must be at least 0 and at most 3")


@pytest.mark.parametrize(
    "keys, rates",
    [
        ({"num_speculative_tokens": 2, "synthetic_acceptance_rates": [1, 0]}, (1.0, 0.0)),
        ({"synthetic_acceptance_rates": [0.9, 0.5, 0.5]}, (0.9, 0.5, 0.5)),
    ],
)
def test_synthetic_acceptance_becomes_rates_as_many_as_the_cap(keys: dict[str, Any], rates: tuple[float]) -> None:
    read = config(rejection_sample_method="synthetic", **keys)
    assert read.synthetic_acceptance_rates == rates
    assert read.cap == len(rates)
    assert read.synthetic


@pytest.mark.parametrize("rates", [[0.5, 0.6], [1.5], [-0.1], [], ["x"], 0.5, [True], [0.1] * 33])
def test_rates_that_rise_or_leave_0_to_1_are_refused(rates: Any) -> None:
    (problem,) = problems(rejection_sample_method="synthetic", synthetic_acceptance_rates=rates)
    assert problem.endswith("it must be 1 to 32 numbers from 0 to 1 that never rise")


def test_rates_are_as_many_as_the_tokens() -> None:
    (problem,) = problems(
        rejection_sample_method="synthetic", synthetic_acceptance_rates=[0.5], num_speculative_tokens=2
    )
    assert problem == "synthetic_acceptance_rates is [0.5]; it must be 2 numbers from 0 to 1 that never rise"


def test_without_drafts_nothing_is_synthetic() -> None:
    read = config(policy="off", rejection_sample_method="synthetic", synthetic_acceptance_rates=[0.5])
    assert not read.synthetic


def test_a_class_inherits_the_values_that_it_does_not_give() -> None:
    read = config(
        num_speculative_tokens=8,
        slo={"ttft_ms": 500, "tpot_ms": 50},
        classes={"gold": {"slo": {"tpot_ms": 20}}, "batch": {"enabled": False}, "one": {"max_tokens": 1}},
    )
    assert read.class_names == ("default", "gold", "batch", "one")
    assert read.params_of("default") == SpeculationParams(max_tokens=8, slo=Slo(ttft_ms=500, tpot_ms=50))
    assert read.params_of("gold").slo == Slo(ttft_ms=500, tpot_ms=20)
    assert not read.params_of("batch").enabled
    assert read.params_of("one").max_tokens == 1


def test_the_default_class_can_be_configured() -> None:
    read = config(classes={"default": {"max_tokens": 2}})
    assert read.class_names == ("default",)
    assert read.params_of("default").max_tokens == 2


def test_flags_and_keys_agree_or_are_refused() -> None:
    agreed = parse_speculation({"method": "ngram"}, policy="goodput", slo=Slo(ttft_ms=100)).config
    assert agreed == SpeculationConfig(method="ngram", policy="goodput", slo=Slo(ttft_ms=100))
    parsed = parse_speculation({"policy": "fixed", "slo": {"tpot_ms": 5}}, policy="off", slo=Slo(tpot_ms=6))
    assert parsed.problems == (
        "'policy' and policy ask for different policies (fixed, off); keep one.",
        "'slo.tpot_ms' is 5 and the flag for it is 6; keep one",
    )


def test_an_engine_config_always_has_a_speculation_config() -> None:
    assert EngineConfig().speculation == SpeculationConfig()
    chosen = EngineConfig(speculative_config={"method": "ngram"}, speculative_policy="off", slo_tpot_ms=20.0)
    assert chosen.speculation == SpeculationConfig(method="ngram", policy="off", slo=Slo(tpot_ms=20.0))


def test_problems_of_an_engine_config_name_the_setting() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(speculative_config={"methd": "ngram"}, speculative_policy="best", slo_ttft_ms=-1.0)
    text = str(caught.value)
    assert "speculative_config: unknown key 'methd'. Did you mean 'method'?" in text
    assert "speculative_policy is best; it must be one of off, fixed" in text
    assert "slo_ttft_ms is -1.0; it must be above 0" in text


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_target_is_a_positive_number_of_milliseconds(value: float) -> None:
    with pytest.raises(RequestError) as caught:
        Slo(tpot_ms=value)
    assert caught.value.param == "speculative.slo.tpot_ms"


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-99, 99)
    | st.floats(allow_nan=True, allow_subnormal=False)
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
_names = st.sampled_from([*(key.name for key in KEYS), *FOREIGN_KEYS, "x"])


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(_names, _json, max_size=4))
def test_any_json_becomes_a_config_or_a_problem_and_never_an_exception(keys: dict[str, Any]) -> None:
    parsed = parse_speculation(keys)
    assert (parsed.config is None) == bool(parsed.problems)
    if parsed.config is not None:
        assert 1 <= parsed.config.cap <= 32
        assert all(each.max_tokens is not None for each in parsed.config.classes.values())


def test_admission_is_a_rule_or_a_class_and_the_default_is_to_wait() -> None:
    read = config(
        admission="refuse", classes={"chat": {"admission": "slow"}, "slow": {"admission": "wait"}, "plain": {}}
    )
    found = {name: read.params_of(name).admission for name in read.class_names}
    assert found == {"default": "refuse", "chat": "slow", "slow": "wait", "plain": "wait"}


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"admission": "refused"}, "admission is refused; it must be wait, refuse or the name of a class"),
        (
            {"classes": {"a": {"admission": "b"}}},
            "classes.a.admission is b; it must be wait, refuse or the name of a class",
        ),
        ({"classes": {"a": {"admission": 3}}}, "classes.a.admission is 3; it must be wait, refuse or the name"),
        ({"classes": {"a": {"admission": "a"}}}, "classes.a.admission is a; a request would come back to class a"),
        (
            {"classes": {"a": {"admission": "b"}, "b": {"admission": "a"}}},
            "classes.a.admission is b; a request would come back to class a",
        ),
        ({"classes": {"wait": {}}}, "classes.wait is the name of a rule; call the class otherwise"),
    ],
)
def test_admission_that_leads_nowhere_is_refused(keys: dict[str, Any], message: str) -> None:
    assert any(problem.startswith(message) for problem in parse_speculation(keys).problems)
