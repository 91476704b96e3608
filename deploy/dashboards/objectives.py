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
