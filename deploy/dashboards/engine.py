"""The scheduler, KV cache, traffic, host and GPU."""

from deploy.dashboards.expressions import CHOSEN, E2E, ITL, OF_POD, mean, quantiles, rate, ratio, total
from deploy.dashboards.panel import Panel, Row

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
