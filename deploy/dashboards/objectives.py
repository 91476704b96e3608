"""Objectives, their budgets, and the latencies behind them."""

from deploy.dashboards.expressions import E2E, OF_MODEL, TPOT, TTFT, quantiles, rate, ratio
from deploy.dashboards.panel import Panel, Row
from deploy.prometheus.make_rules import THRESHOLDS

OBJECTIVES = ("availability", "ttft", "tpot", "goodput", "class-ttft", "class-tpot")


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


def _note(threshold: str) -> str:
    return f"{THRESHOLDS[threshold]} s, unless prometheusRule.thresholds.{threshold} of the chart says otherwise."


SLO = (
    Row(
        "Objectives",
        (
            Panel("Failed or rejected requests", _objective("availability"), "percentunit"),
            Panel(
                "Requests over the TTFT threshold", _objective("ttft"), "percentunit", note=_note("ttftSeconds")
            ),
            Panel(
                "Requests over the TPOT threshold", _objective("tpot"), "percentunit", note=_note("tpotSeconds")
            ),
            Panel("Requests that missed either target of their class", _objective("goodput"), "percentunit"),
            Panel("Requests over their class's TTFT target", _objective("class-ttft"), "percentunit"),
            Panel("Requests over their class's TPOT target", _objective("class-tpot"), "percentunit"),
            Panel(
                "Error budget burn rate",
                tuple(pair for name in OBJECTIVES for pair in _burn(name)),
                lines=(14.4,),
                axis="times the allowed rate",
                note="1: the budget lasts exactly for its period. 14.4 over an hour is an alert.",
            ),
            Panel(
                "Error budget remaining (30 days)",
                ((f"slo:period_error_budget_remaining:ratio{{{OF_MODEL}}}", "{{sloth_slo}} {{class}}"),),
                "percentunit",
                least=None,
                most=1,
                lines=(0,),
            ),
            Panel(
                "Target attainment, by class and target",
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
        "Latency targets: predictions and admission",
        (
            Panel(
                "Headroom, by class and attainment",
                ((f"faser_goodput_headroom{{{OF_MODEL}}}", "{{class}} {{share}}"),),
                "reqps",
                least=None,
                lines=(0,),
                note="Below 0, fewer than that share of the class's requests meet their targets.",
            ),
            Panel(
                "Predicted utilization",
                ((f"faser_predicted_utilisation_ratio{{{OF_MODEL}}}", "{{pod}}"),),
                "percentunit",
                lines=(0.8,),
                note="Above 80 % the latency model makes no predictions.",
            ),
            Panel(
                "Admission decisions, by class and target",
                (
                    (
                        rate("faser_admission_decisions_total", by="class, decision, target"),
                        "{{class}} {{decision}} {{target}}",
                    ),
                ),
                "reqps",
                stacked=True,
            ),
            Panel(
                "Attainment, predicted and measured",
                (
                    (f"faser_predicted_attainment_ratio{{{OF_MODEL}}}", "{{class}} predicted"),
                    (
                        ratio(
                            rate("faser_slo_requests_total", 'target="both",result="met"', "class"),
                            rate("faser_slo_requests_total", 'target="both"', "class"),
                        ),
                        "{{class}} measured",
                    ),
                ),
                "percentunit",
                most=1,
            ),
            Panel(
                "Time to first token, predicted and measured",
                (
                    (f"faser_predicted_ttft_seconds{{{OF_MODEL}}}", "predicted {{statistic}}"),
                    (ratio(rate(f"{TTFT}_sum"), rate(f"{TTFT}_count")), "measured mean"),
                ),
                "s",
            ),
            Panel(
                "Time per output token, predicted and measured",
                (
                    (f"faser_predicted_tpot_seconds{{{OF_MODEL}}}", "predicted {{statistic}}"),
                    (ratio(rate(f"{TPOT}_sum"), rate(f"{TPOT}_count")), "measured mean"),
                ),
                "s",
            ),
        ),
    ),
    Row(
        "Latency",
        (
            Panel("Time to first token", quantiles(TTFT), "s"),
            Panel("Time per output token", quantiles(TPOT), "s"),
            Panel("End-to-end latency", quantiles(E2E), "s"),
        ),
    ),
    Row(
        "Traffic",
        (
            Panel(
                "Finished requests, by reason",
                ((rate("vllm:request_success_total", by="finished_reason"), "{{finished_reason}}"),),
                "reqps",
                stacked=True,
            ),
            Panel(
                "Rejected requests, by reason",
                ((rate("vllm:admission_rejections_total", by="reason"), "{{reason}}"),),
                "reqps",
                stacked=True,
            ),
            Panel(
                "Token throughput",
                (
                    (rate("vllm:prompt_tokens_total"), "prompt"),
                    (rate("vllm:generation_tokens_total"), "generation"),
                ),
                axis="tokens per second",
            ),
        ),
    ),
)
