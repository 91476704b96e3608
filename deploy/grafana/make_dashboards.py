"""Writes the three dashboards as JSON next to this file.

    python deploy/grafana/make_dashboards.py

A dashboard is rows of panels; a panel is a title, a unit and expressions. Every series is chosen by the variables
namespace, model_name and pod. Panels are of Grafana's common types, so that any version from 10 on draws them.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SOURCE = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
CHOSEN = 'namespace=~"$namespace",model_name=~"$model_name",pod=~"$pod"'
OF_POD = 'namespace=~"$namespace",pod=~"$pod"'
OF_MODEL = 'namespace=~"$namespace",model_name=~"$model_name"'
WIDTH = 24


@dataclass(frozen=True)
class Panel:
    """expressions: (PromQL, legend). kind: a panel type of Grafana. axis: what is counted, beside the axis.

    lines: values with a line of their own, such as an alert's threshold.
    """

    title: str
    expressions: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    height: int = 7
    stacked: bool = False
    least: float | None = 0
    most: float | None = None
    axis: str = ""
    lines: tuple[float, ...] = ()
    note: str = ""
    instant: bool = False


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...] = field(default_factory=tuple)


def rate(metric: str, labels: str = "", by: str = "") -> str:
    chosen = f"{CHOSEN},{labels}" if labels else CHOSEN
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({metric}{{{chosen}}}[$__rate_interval]))"


def total(metric: str, by: str = "") -> str:
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} ({metric}{{{CHOSEN}}})"


def quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    """p50, p95 and p99 of a histogram."""
    buckets = rate(f"{metric}_bucket", by="le")
    return tuple((f"histogram_quantile({q}, {buckets})", f"p{round(100 * q)}") for q in (0.5, 0.95, 0.99))


def mean(metric: str, labels: str = "", by: str = "") -> str:
    return f"{rate(metric + '_sum', labels, by)} / {rate(metric + '_count', labels, by)}"


def ratio(part: str, whole: str) -> str:
    return f"{part} / ({whole} > 0)"


def _objective(name: str) -> tuple[tuple[str, str], ...]:
    chosen = f'{{{OF_MODEL},sloth_slo="{name}"}}'
    return (
        (f"slo:sli_error:ratio_rate5m{chosen}", "{{class}} over 5 minutes"),
        (f"slo:sli_error:ratio_rate1h{chosen}", "{{class}} over 1 hour"),
        (f"slo:sli_error:ratio_rate1d{chosen}", "{{class}} over 1 day"),
    )


def _burn(name: str) -> tuple[tuple[str, str], ...]:
    chosen = f'{{{OF_MODEL},sloth_slo="{name}"}}'
    errors = f"slo:sli_error:ratio_rate1h{chosen}"
    allowed = f'scalar(1 - slo:objective:ratio{{sloth_slo="{name}"}})'
    return ((f"{errors} / {allowed}", name + " {{class}}"),)


def per_step(metric: str) -> str:
    """Seconds of a step: the sum of a counter over the number of steps."""
    return ratio(rate(metric, 'role="step"'), rate("faser_step_time_error_ratio_count", 'role="step"'))


def in_order(expression: str) -> str:
    """Positions with two digits, so that 10 does not come between 1 and 2."""
    return f'label_replace({expression}, "position", "0$1", "position", "([0-9])")'


def last_hour(metric: str, by: str = "", labels: str = "") -> str:
    chosen = f"{CHOSEN},{labels}" if labels else CHOSEN
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (increase({metric}{{{chosen}}}[1h]))"


OBJECTIVES = ("availability", "ttft", "tpot", "goodput", "class-ttft", "class-tpot")
TTFT, ITL = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
TPOT, E2E = "vllm:request_time_per_output_token_seconds", "vllm:e2e_request_latency_seconds"

SLO = (
    Row(
        "Objectives",
        (
            Panel("Requests that failed or were refused", _objective("availability"), "percentunit"),
            Panel("Requests without a first token within 1 s", _objective("ttft"), "percentunit"),
            Panel("Requests above 100 ms per token", _objective("tpot"), "percentunit"),
            Panel("Requests that missed one of their class's two targets", _objective("goodput"), "percentunit"),
            Panel("First tokens later than their class's target", _objective("class-ttft"), "percentunit"),
            Panel("Requests slower than their class's target", _objective("class-tpot"), "percentunit"),
            Panel(
                "How fast each error budget burns",
                tuple(pair for name in OBJECTIVES for pair in _burn(name)),
                lines=(14.4,),
                axis="times the allowed rate",
                note="1: the whole budget is spent at the end of the period. 14.4 over an hour is an alert.",
            ),
            Panel(
                "What is left of the error budget of 30 days",
                ((f"slo:period_error_budget_remaining:ratio{{{OF_MODEL}}}", "{{sloth_slo}} {{class}}"),),
                "percentunit",
                least=None,
                most=1,
                lines=(0,),
            ),
            Panel(
                "Requests that met their targets, by class and target",
                (
                    (
                        ratio(
                            rate("faser_slo_requests_total", 'result="met"', "class, target"),
                            rate("faser_slo_requests_total", by="class, target"),
                        ),
                        "{{class}} {{target}}",
                    ),
                ),
                "percentunit",
                most=1,
            ),
        ),
    ),
    Row(
        "Latency",
        (
            Panel("Time to first token", quantiles(TTFT), "s"),
            Panel("Time per output token", quantiles(TPOT), "s"),
            Panel("Whole requests", quantiles(E2E), "s"),
        ),
    ),
    Row(
        "Traffic",
        (
            Panel(
                "Requests that ended, by reason",
                ((rate("vllm:request_success_total", by="finished_reason"), "{{finished_reason}}"),),
                "reqps",
                stacked=True,
            ),
            Panel(
                "Requests refused, by reason",
                ((rate("vllm:admission_rejections_total", by="reason"), "{{reason}}"),),
                "reqps",
                stacked=True,
            ),
            Panel(
                "Tokens",
                (
                    (rate("vllm:prompt_tokens_total"), "prompts"),
                    (rate("vllm:generation_tokens_total"), "answers"),
                ),
                axis="tokens per second",
            ),
        ),
    ),
)

ENGINE = (
    Row(
        "Scheduler",
        (
            Panel(
                "Samples",
                (
                    (total("vllm:num_requests_running"), "running"),
                    (total("vllm:num_requests_waiting"), "waiting"),
                ),
            ),
            Panel(
                "Samples that wait, by reason",
                ((total("vllm:num_requests_waiting_by_reason", "reason"), "{{reason}}"),),
                stacked=True,
            ),
            Panel("Time in the queue", quantiles("vllm:request_queue_time_seconds"), "s"),
            Panel("Tokens of a step", ((mean("vllm:iteration_tokens_total"), "mean"),), "short"),
            Panel("Reading the prompt", quantiles("vllm:request_prefill_time_seconds"), "s"),
            Panel("Between two chunks of an answer", quantiles(ITL), "s"),
            Panel("Writing the answer", quantiles("vllm:request_decode_time_seconds"), "s"),
            Panel("From the first step to the last token", quantiles("vllm:request_inference_time_seconds"), "s"),
            Panel("Whole requests", quantiles(E2E), "s"),
        ),
    ),
    Row(
        "Memory",
        (
            Panel(
                "KV blocks that running requests hold",
                ((f"vllm:kv_cache_usage_perc{{{CHOSEN}}}", "{{pod}}"),),
                "percentunit",
                most=1,
                lines=(0.95,),
            ),
            Panel(
                "Prompt tokens from the prefix cache",
                (
                    (
                        ratio(rate("vllm:prefix_cache_hits_total"), rate("vllm:prefix_cache_queries_total")),
                        "share",
                    ),
                ),
                "percentunit",
                most=1,
            ),
            Panel("Preemptions", ((rate("vllm:num_preemptions_total"), "samples"),), axis="per second"),
            Panel("Preemptions of a request", ((mean("vllm:request_num_preemptions"), "mean"),)),
            Panel(
                "Size of the KV cache",
                (
                    (
                        f"vllm:cache_config_info{{{CHOSEN}}}",
                        "{{kv_cache_size_tokens}} tokens, {{num_gpu_blocks}} blocks of {{block_size}}",
                    ),
                ),
                kind="stat",
                instant=True,
            ),
            Panel(
                "Prompt tokens, by the source of their KV",
                ((rate("vllm:prompt_tokens_by_source_total", by="source"), "{{source}}"),),
                stacked=True,
                axis="tokens per second",
            ),
        ),
    ),
    Row(
        "Requests",
        (
            Panel("Length of prompts", quantiles("vllm:request_prompt_tokens"), axis="tokens"),
            Panel(
                "Prompt tokens that no cache had",
                quantiles("vllm:request_prefill_kv_computed_tokens"),
                axis="tokens",
            ),
            Panel("Length of answers, all samples", quantiles("vllm:request_generation_tokens"), axis="tokens"),
            Panel(
                "Length of the longest sample", quantiles("vllm:request_max_num_generation_tokens"), axis="tokens"
            ),
            Panel("Tokens that a request asks for", quantiles("vllm:request_params_max_tokens"), axis="tokens"),
            Panel("Samples that a request asks for", ((mean("vllm:request_params_n"), "mean"),)),
        ),
    ),
    Row(
        "State",
        (
            Panel("State of the engine", ((f"faser_engine_state{{{CHOSEN}}} == 1", "{{pod}} {{state}}"),), most=1),
            Panel("Restarts of the engine", ((total("faser_engine_restarts_total", "pod"), "{{pod}}"),)),
            Panel(
                "Scrapes that succeed",
                (('avg by (job) (up{job=~".*faser.*"})', "{{job}}"),),
                "percentunit",
                most=1,
            ),
        ),
    ),
    Row(
        "GPU (series of NVIDIA's dcgm-exporter)",
        (
            Panel("Busy", ((f"DCGM_FI_DEV_GPU_UTIL{{{OF_POD}}}", "{{pod}} {{gpu}}"),), "percent", most=100),
            Panel("Memory in use", ((f"DCGM_FI_DEV_FB_USED{{{OF_POD}}}", "{{pod}} {{gpu}}"),), "mbytes"),
            Panel("Power", ((f"DCGM_FI_DEV_POWER_USAGE{{{OF_POD}}}", "{{pod}} {{gpu}}"),), "watt"),
        ),
    ),
)

ACCEPTED, VERIFIED = "faser_spec_accepted_tokens_total", "faser_spec_verified_tokens_total"
DRAFTED = "faser_spec_drafted_tokens_total"
VLLM_ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
ACCEPTED_AT, VERIFIED_AT = "faser_spec_accepted_tokens_per_pos_total", "faser_spec_verified_tokens_per_pos_total"
PREDICTED, MEASURED = "faser_step_predicted_seconds_total", "faser_step_measured_seconds_total"
STEP, FIRST_FOUR = 'role="step"', 'position=~"[0-3]"'
REQUEST_ACCEPTANCE = "faser_request_spec_acceptance_rate"

SPECULATION = (
    Row(
        "What speculation brings",
        (
            Panel(
                "Gain over decoding without drafts",
                (
                    (
                        ratio(
                            rate("faser_spec_plain_seconds_total"),
                            f"({rate(MEASURED, STEP)} + {rate('faser_spec_decide_seconds_total')})",
                        ),
                        "times as fast",
                    ),
                ),
                least=None,
                lines=(1,),
                note="Time that the same tokens would have taken in steps without drafts, by the cost model, over "
                "the time they took with drafting and deciding. Prompts are in both. 1: no gain.",
            ),
            Panel(
                "Tokens of a sample in a step that verified drafts",
                (
                    (
                        "1 + "
                        + ratio(
                            rate("vllm:spec_decode_num_accepted_tokens_total"),
                            rate("vllm:spec_decode_num_drafts_total"),
                        ),
                        "accepted, and one more",
                    ),
                ),
                note="1: speculation brought nothing.",
            ),
            Panel(
                "Share of answers that came from drafts",
                ((ratio(rate(ACCEPTED), rate("vllm:generation_tokens_total")), "share"),),
                "percentunit",
                most=1,
            ),
            Panel(
                "Acceptance, by drafter",
                ((ratio(rate(ACCEPTED, by="method"), rate(VERIFIED, by="method")), "{{method}}"),),
                "percentunit",
                most=1,
            ),
            Panel(
                "Policy and method",
                ((f"faser_spec_policy_info{{{CHOSEN}}}", "{{policy}}, drafts by {{method}}"),),
                kind="stat",
                instant=True,
            ),
            Panel(
                "Processors while drafting overlaps",
                ((f"faser_spec_partition_info{{{CHOSEN}}}", "{{partition}} {{fallback}}"),),
                kind="stat",
                instant=True,
                note="serial: drafting and verification take turns. A text after the name says why it is not "
                "the partition that was asked for.",
            ),
        ),
    ),
    Row(
        "The way of a draft token",
        (
            Panel(
                "Draft tokens of the last hour, from drafted to accepted",
                (
                    (last_hour(DRAFTED), "drafted"),
                    (last_hour("faser_spec_pruned_tokens_total"), "  pruned before they were verified"),
                    (last_hour("vllm:spec_decode_num_draft_tokens_total"), "sent to the target model"),
                    (last_hour(VERIFIED), "verified"),
                    (last_hour("faser_spec_wasted_tokens_total"), "  rejected: wasted"),
                    (last_hour(ACCEPTED), "accepted"),
                ),
                kind="bargauge",
                instant=True,
                note="drafted = pruned + verified; verified = wasted + accepted.",
            ),
            Panel(
                "Drafted, verified, accepted",
                (
                    (rate(DRAFTED), "drafted"),
                    (rate(VERIFIED), "verified"),
                    (rate(ACCEPTED), "accepted"),
                ),
                axis="tokens per second",
                note="The gaps are pruned and wasted tokens.",
            ),
            Panel(
                "Where draft tokens end",
                (
                    (rate(ACCEPTED), "accepted"),
                    (rate("faser_spec_wasted_tokens_total"), "verified and rejected"),
                    (rate("faser_spec_pruned_tokens_total", by="stage"), "pruned: {{stage}}"),
                ),
                stacked=True,
                axis="tokens per second",
            ),
        ),
    ),
    Row(
        "Acceptance",
        (
            Panel(
                "Accepted of the verified, by place in the draft (last hour)",
                (
                    (
                        in_order(ratio(last_hour(ACCEPTED_AT, "position"), last_hour(VERIFIED_AT, "position"))),
                        "token {{position}}",
                    ),
                ),
                "percentunit",
                kind="bargauge",
                most=1,
                instant=True,
                note="Of drafts long enough to have a token there. 0: the first one.",
            ),
            Panel(
                "The first four places, by class (last hour)",
                (
                    (
                        ratio(
                            last_hour(ACCEPTED_AT, "class, position", FIRST_FOUR),
                            last_hour(VERIFIED_AT, "class, position", FIRST_FOUR),
                        ),
                        "{{class}}: token {{position}}",
                    ),
                ),
                "percentunit",
                kind="bargauge",
                most=1,
                instant=True,
            ),
            Panel(
                "Acceptance, by class",
                ((ratio(rate(ACCEPTED_AT, by="class"), rate(VERIFIED_AT, by="class")), "{{class}}"),),
                "percentunit",
                most=1,
            ),
            Panel(
                "Acceptance of a request, by class (median)",
                (
                    (
                        f"histogram_quantile(0.5, {rate(REQUEST_ACCEPTANCE + '_bucket', by='le, class')})",
                        "{{class}}",
                    ),
                ),
                "percentunit",
                most=1,
            ),
            Panel(
                "Expected against accepted tokens",
                (
                    (
                        ratio(rate("faser_spec_expected_accepted_tokens_total"), rate(ACCEPTED)),
                        "expected / accepted",
                    ),
                ),
                "percentunit",
                lines=(1,),
            ),
            Panel(
                "Accepted tokens, by place in the draft",
                ((rate(VLLM_ACCEPTED_AT, by="position"), "token {{position}}"),),
                stacked=True,
                axis="tokens per second",
            ),
        ),
    ),
    Row(
        "Decisions",
        (
            Panel(
                "Draft tokens chosen (γ)",
                (
                    (
                        f"sum by (le) (increase(faser_spec_gamma_bucket{{{CHOSEN}}}[$__rate_interval]))",
                        "{{le}}",
                    ),
                ),
                kind="heatmap",
                note="For each sample and step, zero included.",
            ),
            Panel("Mean γ, by class", ((mean("faser_spec_gamma", by="class"), "{{class}}"),)),
            Panel(
                "Why a sample was not drafted for",
                ((rate("faser_spec_bypass_steps_total", by="reason"), "{{reason}}"),),
                stacked=True,
                axis="samples and steps per second",
            ),
            Panel(
                "Steps, by mode",
                ((rate("faser_spec_mode_steps_total", by="mode"), "{{mode}}"),),
                stacked=True,
                axis="steps per second",
            ),
            Panel(
                "Mode of the last step",
                ((f"sum by (mode) (faser_spec_mode{{{CHOSEN}}})", "{{mode}}"),),
                stacked=True,
                axis="engines",
            ),
            Panel(
                "Share of the processors",
                ((f"avg by (lane) (faser_sm_share{{{CHOSEN}}})", "{{lane}}"),),
                "percentunit",
                most=1,
            ),
            Panel(
                "Changes of mode",
                ((rate("faser_spec_mode_switches_total", by="to"), "to {{to}}"),),
                axis="per second",
            ),
        ),
    ),
    Row(
        "Predictions",
        (
            Panel(
                "Time of a step, predicted and measured",
                ((per_step(PREDICTED), "predicted"), (per_step(MEASURED), "measured")),
                "s",
                note="With the drafts made for it.",
            ),
            Panel(
                "Predicted over measured time",
                (
                    (
                        ratio(
                            rate("faser_step_predicted_seconds_total", by="role"),
                            rate("faser_step_measured_seconds_total", by="role"),
                        ),
                        "{{role}}",
                    ),
                ),
                "percentunit",
                lines=(0.75, 1.25),
                note="100 %: the cost model is right on average. A quarter off for half an hour is an alert.",
            ),
            Panel(
                "Error of predicted step times (median)",
                (
                    (
                        f"histogram_quantile(0.5, {rate('faser_step_time_error_ratio_bucket', by='le, role')})",
                        "{{role}}",
                    ),
                ),
                "percentunit",
                lines=(0.1,),
            ),
            Panel(
                "Where the time goes",
                (
                    (rate("faser_spec_draft_seconds_total"), "drafting"),
                    (rate("faser_spec_verify_seconds_total"), "verifying"),
                    (rate("faser_spec_overlap_seconds_total"), "both at once"),
                    (rate("faser_spec_decide_seconds_total"), "deciding"),
                ),
                "percentunit",
                note="Share of the wall clock.",
            ),
            Panel(
                "Draft KV computed again after a pause",
                ((rate("faser_spec_catchup_tokens_total"), "tokens"),),
                axis="tokens per second",
                note="With a draft model only.",
            ),
            Panel(
                "Early pruning",
                (
                    (rate("faser_prune_steps_total", by="kind"), "{{kind}} steps"),
                    (rate("faser_prune_drafted_rows_total"), "draft rows looked at"),
                    (rate("faser_prune_seconds_total"), "seconds spent"),
                ),
                axis="per second",
                note="Off by default.",
            ),
        ),
    ),
    Row(
        "Audit (--audit-speculation)",
        (
            Panel(
                "Answers computed again without drafts, last hour",
                ((last_hour("faser_audit_checks_total", "backend"), "{{backend}}"),),
                note="Stands still on an engine that is never idle.",
            ),
            Panel(
                "Answers that differed, last hour",
                ((last_hour("faser_audit_divergences_total", "backend"), "{{backend}}"),),
                lines=(1,),
                note="One with the backend native is an alert. Other kernels can differ from themselves where two "
                "tokens are nearly as likely.",
            ),
            Panel(
                "Answers that found no room in the audit, last hour",
                ((last_hour("faser_audit_skipped_total", "backend"), "{{backend}}"),),
            ),
        ),
    ),
)


def _panel(panel: Panel, identity: int, x: int, y: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    options: dict[str, Any] = {}
    if panel.least is not None:
        defaults["min"] = panel.least
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "fillOpacity": 30 if panel.stacked else 8,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none"},
            "axisLabel": panel.axis,
            **({"thresholdsStyle": {"mode": "dashed"}} if panel.lines else {}),
        }
        if panel.lines:
            steps = [{"color": "green", "value": None}, *({"color": "red", "value": each} for each in panel.lines)]
            defaults["thresholds"] = {"mode": "absolute", "steps": steps}
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    elif panel.kind == "stat":
        options = {
            "textMode": "name",
            "colorMode": "none",
            "graphMode": "none",
            "reduceOptions": {"calcs": ["lastNotNull"]},
        }
    elif panel.kind == "bargauge":
        options = {
            "displayMode": "gradient",
            "orientation": "horizontal",
            "reduceOptions": {"calcs": ["lastNotNull"]},
        }
    elif panel.kind == "heatmap":
        options = {
            "calculate": False,
            "color": {"scheme": "Turbo", "mode": "scheme"},
            "yAxis": {"unit": panel.unit},
        }
    targets = [
        {
            "refId": chr(ord("A") + number),
            "datasource": SOURCE,
            "expr": expression,
            "legendFormat": legend,
            "format": "heatmap" if panel.kind == "heatmap" else "time_series",
            **({"instant": True, "range": False} if panel.instant else {}),
        }
        for number, (expression, legend) in enumerate(panel.expressions)
    ]
    return {
        "id": identity,
        "type": panel.kind,
        "title": panel.title,
        **({"description": panel.note} if panel.note else {}),
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": targets,
    }


def _variable(name: str, series: str) -> dict[str, Any]:
    query = f"label_values({series}, {name})"
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def dashboard(uid: str, title: str, rows: tuple[Row, ...]) -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for row in rows:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
                "panels": [],
            }
        )
        y += 1
        x = 0
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, y = 0, y + panel.height
            panels.append(_panel(panel, len(panels) + 1, x, y))
            x += panel.width
        y += row.panels[-1].height
    series = "vllm:num_requests_running"
    of_namespace = f'{series}{{namespace=~"$namespace"}}'
    of_model = f'{series}{{namespace=~"$namespace",model_name=~"$model_name"}}'
    return {
        "uid": uid,
        "title": title,
        "tags": ["faser"],
        "schemaVersion": 39,
        "id": None,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [
            {
                "type": "dashboards",
                "title": "FASER",
                "tags": ["faser"],
                "asDropdown": False,
                "keepTime": True,
                "includeVars": True,
            }
        ],
        "templating": {
            "list": [
                {"name": "DS_PROMETHEUS", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
                _variable("namespace", series),
                _variable("model_name", of_namespace),
                _variable("pod", of_model),
            ]
        },
        "panels": panels,
    }


DASHBOARDS = {
    "faser-slo": ("FASER: objectives", SLO),
    "faser-engine": ("FASER: engine", ENGINE),
    "faser-speculation": ("FASER: speculation", SPECULATION),
}


def main() -> None:
    for uid, (title, rows) in DASHBOARDS.items():
        text = json.dumps(dashboard(uid, title, rows), indent=1, ensure_ascii=False) + "\n"
        (Path(__file__).parent / f"{uid}.json").write_text(text)


if __name__ == "__main__":
    main()
