"""Objectives, their budgets, and the latencies behind them."""

from deploy.dashboards.expressions import E2E, OF_MODEL, TPOT, TTFT, quantiles, rate, ratio
from deploy.dashboards.panel import Panel, Row

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
        "Targets: what can be held, and who is refused",
        (
            Panel(
                "Requests that may come in addition, by class and share within targets",
                ((f"faser_goodput_headroom{{{OF_MODEL}}}", "{{class}} {{share}}"),),
                "reqps",
                least=None,
                lines=(0,),
                note="Below 0, fewer than that share of the class's requests meet their targets.",
            ),
            Panel(
                "Load over capacity, as predicted",
                ((f"faser_predicted_utilisation_ratio{{{OF_MODEL}}}", "{{pod}}"),),
                "percentunit",
                lines=(0.8,),
                note="Beyond 80 % the latency model does not know, and predicts no times.",
            ),
            Panel(
                "Requests with targets, by what became of them on arrival",
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
                "Attainment: predicted, and measured",
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
                "Time to first token: predicted, and measured mean",
                (
                    (f"faser_predicted_ttft_seconds{{{OF_MODEL}}}", "predicted {{statistic}}"),
                    (ratio(rate(f"{TTFT}_sum"), rate(f"{TTFT}_count")), "measured mean"),
                ),
                "s",
            ),
            Panel(
                "Time per output token: predicted, and measured mean",
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
