"""PromQL that several panels share. Every series is chosen by the variables namespace, model_name and pod."""

CHOSEN = 'namespace=~"$namespace",model_name=~"$model_name",pod=~"$pod"'
OF_POD = 'namespace=~"$namespace",pod=~"$pod"'
OF_MODEL = 'namespace=~"$namespace",model_name=~"$model_name"'
TTFT, ITL = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
TPOT, E2E = "vllm:request_time_per_output_token_seconds", "vllm:e2e_request_latency_seconds"


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


def in_order(expression: str) -> str:
    """Positions with two digits, so that 10 does not come between 1 and 2."""
    return f'label_replace({expression}, "position", "0$1", "position", "([0-9])")'


def last_hour(metric: str, by: str = "", labels: str = "") -> str:
    chosen = f"{CHOSEN},{labels}" if labels else CHOSEN
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (increase({metric}{{{chosen}}}[1h]))"
