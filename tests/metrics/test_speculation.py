"""Series of speculation: names and labels as documented, zero at first, and numbers that add up."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser.config.speculation import DRAFT_METHODS, SpeculationConfig
from faser.metrics.server import Metrics
from faser.metrics.speculation import REBUILD_CAUSES
from faser.types.answer import SpeculationSummary
from faser.types.request import Slo, SpeculationParams
from faser.types.statistics import (
    STEP_ERROR_EDGES,
    EngineStats,
    MethodStats,
    PaidRatio,
    PruneStats,
    RoleStats,
    SpeculationStats,
)
from tests.metrics.test_server import samples

PRUNE_COUNTERS = (
    "drafted_rows",
    "rows",
    "wasted_rows",
    "verified_tokens",
    "flagged_tokens",
    "false_tokens",
)

CONFIG = SpeculationConfig(num_speculative_tokens=3, classes={"gold": SpeculationParams(class_name="gold")})
NO_ERRORS = (0,) * (len(STEP_ERROR_EDGES) + 1)


def metrics(config: SpeculationConfig = CONFIG) -> Metrics:
    return Metrics(model_name="tiny", max_model_len=4096, speculation=config)


def value(source: Metrics, name: str, /, **labels: str) -> float:
    return samples(source)[name, tuple(sorted(labels.items()))]


def metrics_of(stats: SpeculationStats) -> Metrics:
    source = metrics()
    source.engine(EngineStats(speculation=stats))
    return source


SERIES: list[tuple[str, dict[str, str]]] = [
    ("vllm:spec_decode_num_drafts_total", {}),
    ("vllm:spec_decode_num_draft_tokens_total", {}),
    ("vllm:spec_decode_num_accepted_tokens_total", {}),
    *(("vllm:spec_decode_num_accepted_tokens_per_pos_total", {"position": str(at)}) for at in range(3)),
    *(
        (f"faser_spec_{name}_tokens_total", {"method": method})
        for name in ("drafted", "verified", "accepted", "wasted", "expected_accepted")
        for method in DRAFT_METHODS
    ),
    *(
        ("faser_spec_pruned_tokens_total", {"method": method, "stage": stage})
        for method in DRAFT_METHODS
        for stage in ("trim", "layer", "frontier")
    ),
    *(
        (f"{name}_{part}", {"class": each})
        for name in ("faser_spec_gamma", "faser_request_spec_acceptance_rate")
        for part in ("count", "sum")
        for each in ("default", "gold")
    ),
    *((f"faser_spec_{name}_seconds_total", {}) for name in ("draft", "verify", "overlap", "decide")),
    *(("faser_prune_steps_total", {"kind": kind}) for kind in ("shadow", "pruning")),
    *((f"faser_prune_{name}_total", {}) for name in PRUNE_COUNTERS),
    *(
        (name, {"role": role})
        for name in (
            "faser_step_predicted_seconds_total",
            "faser_step_measured_seconds_total",
            "faser_step_time_error_ratio_count",
        )
        for role in ("draft", "verify", "step")
    ),
    *(("faser_spec_mode", {"mode": mode}) for mode in ("serial", "streams", "sm", "cores")),
    *(("faser_spec_mode_steps_total", {"mode": mode}) for mode in ("plain", "serial", "streams", "sm", "cores")),
    ("faser_spec_mode_switches_total", {"from": "plain", "to": "serial"}),
    ("faser_spec_mode_switches_total", {"from": "serial", "to": "plain"}),
    *(("faser_spec_bypass_steps_total", {"reason": why}) for why in ("load", "gain", "memory", "request")),
    *(
        ("faser_slo_requests_total", {"class": each, "target": target, "result": result})
        for each in ("default", "gold")
        for target in ("ttft", "tpot", "both")
        for result in ("met", "missed")
    ),
    ("faser_spec_catchup_tokens_total", {}),
    *(
        ("faser_drafter_rebuilds_total", {"drafter": drafter, "cause": cause})
        for drafter in DRAFT_METHODS
        for cause in REBUILD_CAUSES
    ),
]


def test_series_exist_at_zero_from_the_first_scrape() -> None:
    scraped = samples(metrics())
    assert [scraped.get((name, tuple(sorted(labels.items())))) for name, labels in SERIES] == [0] * len(SERIES)


def test_answers_that_are_not_the_models_are_a_series() -> None:
    def of(**keys: Any) -> float:
        return value(metrics(SpeculationConfig(**keys)), "faser_spec_synthetic")

    synthetic: dict[str, Any] = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": (0.5,)}
    assert of(**synthetic) == 1
    assert (of(), of(**synthetic, policy="off")) == (0, 0)


def test_policy_mode_and_shares_are_there_from_the_first_scrape() -> None:
    source = metrics()
    assert value(source, "faser_spec_policy_info", policy="faser", method="auto") == 1
    assert value(source, "faser_spec_partition_info", partition="serial", fallback="") == 1
    assert value(source, "faser_spec_mode", mode="plain") == 1
    assert value(source, "faser_sm_share", lane="draft") == value(source, "faser_sm_share", lane="verify") == 1


def test_a_partition_that_was_not_requested_has_a_reason() -> None:
    stats = SpeculationStats(
        policy="faser",
        method="draft_model",
        mode="sm",
        partition="streams",
        partition_fallback="cuGreenCtxCreate: no",
    )
    source = metrics_of(stats)
    found = [labels for name, labels in samples(source) if name == "faser_spec_partition_info"]
    assert found == [(("fallback", "cuGreenCtxCreate: no"), ("partition", "streams"))]
    assert value(source, "faser_spec_mode", mode="sm") == 1


def test_positions_reach_the_cap_and_no_further() -> None:
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    positions = [labels[0][1] for found, labels in samples(metrics()) if found == name]
    assert positions == ["0", "1", "2"]


def test_buckets_are_those_documented() -> None:
    source = samples(metrics())

    def edges(name: str, **labels: str) -> list[str]:
        found = [dict(own) for each, own in source if each == f"{name}_bucket"]
        return [own["le"] for own in found if labels.items() <= own.items()][:-1]

    gammas = [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 32]
    assert edges("faser_spec_gamma", **{"class": "gold"}) == [f"{gamma}.0" for gamma in gammas]
    assert edges("faser_step_time_error_ratio", role="step") == [str(float(edge)) for edge in STEP_ERROR_EDGES]
    rates = edges("faser_request_spec_acceptance_rate", **{"class": "default"})
    assert rates == [f"{step / 10}" for step in range(1, 11)]


METHOD = MethodStats(method="suffix", drafted=20, pruned=5, verified=15, accepted=9, expected=8.5)
OTHER = MethodStats(method="ngram", drafted=4, pruned=0, verified=4, accepted=4, expected=2.0)
STATS = SpeculationStats(
    policy="goodput",
    method="auto",
    num_drafts=7,
    methods=(METHOD, OTHER),
    accepted_at=(("default", (6, 4, 2)), ("gold", (1, 0, 0))),
    gammas=(("default", (3, 2, 0, 5)), ("gold", (0, 0, 1, 0))),
    mode="serial",
    mode_steps=(("plain", 4), ("serial", 6)),
    switches=(("plain", "serial", 2), ("serial", "plain", 1)),
    bypasses=(("gain", 3), ("load", 1)),
    roles=(
        RoleStats(role="step", predicted_s=2.0, measured_s=2.5, errors=(0, 1, 0, 2, 0, 0, 0, 0, 0, 1)),
        RoleStats(role="pass", predicted_s=0.5, measured_s=0.25, errors=(1, *NO_ERRORS[1:])),
        RoleStats(role="text", predicted_s=0.5, measured_s=0.5, errors=(1, *NO_ERRORS[1:])),
    ),
    decide_s=0.125,
    catchup_tokens=11,
)


def test_vllms_counters_count_what_the_target_verified() -> None:
    source = metrics_of(STATS)
    assert value(source, "vllm:spec_decode_num_drafts_total") == 7
    assert value(source, "vllm:spec_decode_num_draft_tokens_total") == 19
    assert value(source, "vllm:spec_decode_num_accepted_tokens_total") == 13
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [value(source, name, position=str(at)) for at in range(3)] == [7, 4, 2]


def test_depths_are_reported_by_class() -> None:
    """A draft of γ tokens verifies those at 0 … γ - 1."""
    source = metrics_of(STATS)

    def depths(what: str, name: str) -> list[float]:
        series = f"faser_spec_{what}_tokens_per_pos_total"
        return [value(source, series, **{"class": name, "position": str(at)}) for at in range(3)]

    assert (depths("verified", "default"), depths("accepted", "default")) == ([7, 5, 5], [6, 4, 2])
    assert (depths("verified", "gold"), depths("accepted", "gold")) == ([1, 1, 0], [1, 0, 0])


def test_gammas_are_put_into_buckets_with_zeros_and_sums() -> None:
    source = metrics_of(STATS)

    def up_to(edge: str) -> float:
        return value(source, "faser_spec_gamma_bucket", **{"class": "default", "le": edge})

    assert [up_to(edge) for edge in ("0.0", "1.0", "2.0", "3.0", "4.0", "+Inf")] == [3, 5, 5, 10, 10, 10]
    assert value(source, "faser_spec_gamma_sum", **{"class": "default"}) == 17
    assert value(source, "faser_spec_gamma_count", **{"class": "gold"}) == 1


def test_a_gamma_between_two_edges_falls_into_the_upper_bucket() -> None:
    """Oracle: the definition, le is at least the value."""
    counts = tuple(1 for _ in range(17))
    wide = metrics(SpeculationConfig(num_speculative_tokens=16))
    wide.engine(
        EngineStats(speculation=SpeculationStats(policy="faser", method="auto", gammas=(("default", counts),)))
    )
    for edge in (0, 1, 8, 10, 12, 16, 32):
        found = value(wide, "faser_spec_gamma_bucket", **{"class": "default", "le": f"{edge}.0"})
        assert found == sum(gamma <= edge for gamma in range(17))


def test_times_are_reported_by_lane_and_by_role() -> None:
    source = metrics_of(STATS)
    assert value(source, "faser_spec_decide_seconds_total") == 0.125
    assert value(source, "faser_spec_draft_seconds_total") == 0.75
    assert value(source, "faser_spec_verify_seconds_total") == 2.5
    assert value(source, "faser_step_predicted_seconds_total", role="draft") == 1.0
    assert value(source, "faser_step_predicted_seconds_total", role="step") == 2.0
    assert value(source, "faser_step_measured_seconds_total", role="step") == 2.5
    assert value(source, "faser_step_time_error_ratio_bucket", role="step", le="0.02") == 1
    assert value(source, "faser_step_time_error_ratio_bucket", role="step", le="0.1") == 3
    assert value(source, "faser_step_time_error_ratio_bucket", role="step", le="1.0") == 3
    assert value(source, "faser_step_time_error_ratio_bucket", role="step", le="+Inf") == 4
    assert value(source, "faser_step_time_error_ratio_count", role="step") == 4
    assert value(source, "faser_step_time_error_ratio_bucket", role="draft", le="0.01") == 2


def test_decisions_are_reported() -> None:
    source = metrics_of(STATS)
    assert value(source, "faser_spec_policy_info", policy="goodput", method="auto") == 1
    assert [key for key in samples(source) if key[0] == "faser_spec_policy_info"] == [
        ("faser_spec_policy_info", (("method", "auto"), ("policy", "goodput")))
    ]
    assert value(source, "faser_spec_mode", mode="serial") == 1
    assert value(source, "faser_spec_mode", mode="plain") == 0
    assert value(source, "faser_spec_mode_steps_total", mode="serial") == 6
    assert value(source, "faser_spec_mode_switches_total", **{"from": "plain", "to": "serial"}) == 2
    assert value(source, "faser_spec_bypass_steps_total", reason="gain") == 3
    assert value(source, "faser_spec_bypass_steps_total", reason="memory") == 0
    assert value(source, "faser_spec_catchup_tokens_total") == 11


def test_early_pruning_is_reported() -> None:
    stats = PruneStats(
        shadow_steps=2,
        pruned_steps=3,
        drafted_rows=70,
        pruned_rows=9,
        wasted_rows=4,
        verified=30,
        flagged=8,
        false_prunes=1,
    )
    source = metrics_of(SpeculationStats(policy="faser", method="draft_model", pruning=stats))
    assert [value(source, "faser_prune_steps_total", kind=kind) for kind in ("shadow", "pruning")] == [2, 3]
    assert [value(source, f"faser_prune_{name}_total") for name in PRUNE_COUNTERS] == [70, 9, 4, 30, 8, 1]


def test_rows_that_left_between_layers_are_a_stage_of_their_own() -> None:
    method = MethodStats(method="draft_model", drafted=20, pruned=12, dropped=3, cut=4, verified=8)
    source = metrics_of(SpeculationStats(policy="faser", method="draft_model", methods=(method,)))
    assert [
        value(source, "faser_spec_pruned_tokens_total", method="draft_model", stage=stage)
        for stage in ("trim", "layer", "frontier")
    ] == [5, 4, 3]


def test_a_snapshot_without_speculation_leaves_the_counters() -> None:
    source = metrics_of(STATS)
    source.engine(EngineStats())
    assert value(source, "vllm:spec_decode_num_drafts_total") == 7


@st.composite
def _methods(draw: st.DrawFn) -> tuple[MethodStats, ...]:
    made = []
    for method in draw(st.lists(st.sampled_from(DRAFT_METHODS), unique=True)):
        verified, pruned = draw(st.integers(0, 1000)), draw(st.integers(0, 1000))
        accepted = draw(st.integers(0, verified))
        made.append(
            MethodStats(
                method=method, drafted=pruned + verified, pruned=pruned, verified=verified, accepted=accepted
            )
        )
    return tuple(made)


@settings(max_examples=25, deadline=None)
@given(_methods())
def test_drafted_is_pruned_and_verified_which_is_accepted_and_wasted(methods: tuple[MethodStats, ...]) -> None:
    found = samples(metrics_of(SpeculationStats(policy="faser", method="auto", methods=methods)))

    def total(name: str, method: str) -> float:
        return sum(
            number
            for (each, labels), number in found.items()
            if each == f"faser_spec_{name}_tokens_total" and ("method", method) in labels
        )

    for method in DRAFT_METHODS:
        assert total("drafted", method) == total("pruned", method) + total("verified", method)
        assert total("verified", method) == total("accepted", method) + total("wasted", method)
    assert found["vllm:spec_decode_num_draft_tokens_total", ()] == sum(each.verified for each in methods)


def slo_counts(source: Metrics, each: str) -> dict[tuple[str, str], float]:
    return {
        (target, result): value(
            source, "faser_slo_requests_total", **{"class": each, "target": target, "result": result}
        )
        for target in ("ttft", "tpot", "both")
        for result in ("met", "missed")
    }


@pytest.mark.parametrize(
    "slo, ttft_s, tpot_s, counted",
    [
        (Slo(), 9.0, 9.0, set()),
        (Slo(ttft_ms=200), 0.2, 9.0, {("ttft", "met")}),
        (Slo(ttft_ms=200), 0.201, None, {("ttft", "missed")}),
        (Slo(tpot_ms=20), 9.0, 0.02, {("tpot", "met")}),
        (Slo(tpot_ms=20), 9.0, 0.021, {("tpot", "missed")}),
        (Slo(tpot_ms=20), 9.0, None, {("tpot", "met")}),
        (Slo(ttft_ms=200, tpot_ms=20), 0.1, 0.01, {("ttft", "met"), ("tpot", "met"), ("both", "met")}),
        (Slo(ttft_ms=200, tpot_ms=20), 0.1, 0.03, {("ttft", "met"), ("tpot", "missed"), ("both", "missed")}),
        (Slo(ttft_ms=200, tpot_ms=20), 0.3, 0.01, {("ttft", "missed"), ("tpot", "met"), ("both", "missed")}),
    ],
)
def test_a_finished_request_met_or_missed_the_targets_it_has(
    slo: Slo, ttft_s: float, tpot_s: float | None, counted: set[tuple[str, str]]
) -> None:
    source = metrics()
    source.speculation.finished(SpeculationParams(class_name="gold", slo=slo), (), ttft_s=ttft_s, tpot_s=tpot_s)
    assert {key for key, number in slo_counts(source, "gold").items() if number} == counted
    assert not any(slo_counts(source, "default").values())


def test_acceptance_of_a_request_is_that_of_all_its_samples_and_absent_without_drafts() -> None:
    source = metrics()
    one = SpeculationSummary(policy="faser", verified=3, accepted=1)
    other = SpeculationSummary(policy="faser", verified=1, accepted=1)
    source.speculation.finished(SpeculationParams(), (one, other), ttft_s=0.1, tpot_s=None)
    source.speculation.finished(
        SpeculationParams(), (SpeculationSummary(policy="faser", steps=4),), ttft_s=0.1, tpot_s=None
    )
    assert value(source, "faser_request_spec_acceptance_rate_sum", **{"class": "default"}) == 0.5
    assert value(source, "faser_request_spec_acceptance_rate_count", **{"class": "default"}) == 1


def test_what_drafts_pay_is_exported_by_load_with_its_interval_and_nothing_of_loads_that_are_not_known() -> None:
    paid = (
        PaidRatio((1, 1), 1.25, 1.2, 1.3, drafts=True),
        PaidRatio((4, 7), 0.97, 0.95, 0.99, drafts=False),
        PaidRatio((16, 31), 1.01, 0.9, 1.1, drafts=None),
    )
    found = samples(metrics_of(SpeculationStats(policy="faser", method="auto", paid=paid)))
    ratios = {labels: value for (name, labels), value in found.items() if name == "faser_spec_paid_ratio"}
    by_label = {(dict(labels)["sequences"], dict(labels)["bound"]): value for labels, value in ratios.items()}
    assert len(by_label) == 9
    assert by_label["4-7", "mean"] == 0.97
    assert (by_label["1", "low"], by_label["1", "high"]) == (1.2, 1.3)
    paying = {
        dict(labels)["sequences"]: value for (name, labels), value in found.items() if name == "faser_spec_paying"
    }
    assert paying == {"1": 1.0, "4-7": 0.0}
    assert not [name for name, _ in samples(metrics()) if name == "faser_spec_paying"]
