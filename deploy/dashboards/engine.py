"""The scheduler, KV cache, traffic, host and GPU."""

from deploy.dashboards.expressions import CHOSEN, E2E, ITL, OF_POD, mean, quantiles, rate, ratio, total
from deploy.dashboards.panel import Panel, Row
from deploy.prometheus.make_rules import THRESHOLDS

ENGINE = (
    Row(
        "Scheduler",
        (
            Panel(
                "Running and waiting sequences",
                (
                    (total("vllm:num_requests_running"), "running"),
                    (total("vllm:num_requests_waiting"), "waiting"),
                ),
            ),
            Panel(
                "Waiting sequences, by reason",
                ((total("vllm:num_requests_waiting_by_reason", "reason"), "{{reason}}"),),
                stacked=True,
            ),
            Panel(
                "LoRA adapters of running and waiting requests",
                (
                    (
                        f"vllm:lora_requests_info{{{CHOSEN}}}",
                        "{{pod}}, {{max_lora}} at once: running {{running_lora_adapters}}; "
                        "waiting {{waiting_lora_adapters}}",
                    ),
                ),
                kind="stat",
                instant=True,
            ),
            Panel("Queue time", quantiles("vllm:request_queue_time_seconds"), "s"),
            Panel("Tokens per step", ((mean("vllm:iteration_tokens_total"), "mean"),), "short"),
            Panel("Prefill time", quantiles("vllm:request_prefill_time_seconds"), "s"),
            Panel("Inter-token latency", quantiles(ITL), "s"),
            Panel("Decode time", quantiles("vllm:request_decode_time_seconds"), "s"),
            Panel("Inference time (prefill and decode)", quantiles("vllm:request_inference_time_seconds"), "s"),
            Panel("End-to-end latency", quantiles(E2E), "s"),
        ),
    ),
    Row(
        "Memory",
        (
            Panel(
                "KV cache usage",
                ((f"vllm:kv_cache_usage_perc{{{CHOSEN}}}", "{{pod}}"),),
                "percentunit",
                most=1,
                lines=(THRESHOLDS["kvCacheUsage"],),
            ),
            Panel(
                "Prefix cache hit rate",
                (
                    (
                        ratio(rate("vllm:prefix_cache_hits_total"), rate("vllm:prefix_cache_queries_total")),
                        "share",
                    ),
                ),
                "percentunit",
                most=1,
            ),
            Panel(
                "Disk cache hit rate (--kv-cache-dir)",
                (
                    (
                        ratio(
                            rate("vllm:external_prefix_cache_hits_total"),
                            rate("vllm:external_prefix_cache_queries_total"),
                        ),
                        "share",
                    ),
                ),
                "percentunit",
                most=1,
            ),
            Panel("KV on disk", ((f"faser_kv_disk_bytes{{{CHOSEN}}}", "{{pod}}"),), "bytes"),
            Panel(
                "Disk traffic of KV",
                (
                    (rate("faser_kv_disk_read_bytes_total"), "read"),
                    (rate("faser_kv_disk_written_bytes_total"), "written"),
                ),
                "Bps",
            ),
            Panel("Preemptions", ((rate("vllm:num_preemptions_total"), "samples"),), axis="per second"),
            Panel("Preemptions per request", ((mean("vllm:request_num_preemptions"), "mean"),)),
            Panel(
                "KV cache size",
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
                "Prompt tokens, by KV source",
                ((rate("vllm:prompt_tokens_by_source_total", by="source"), "{{source}}"),),
                stacked=True,
                axis="tokens per second",
            ),
        ),
    ),
    Row(
        "Requests",
        (
            Panel("Prompt length", quantiles("vllm:request_prompt_tokens"), axis="tokens"),
            Panel(
                "Uncached prompt tokens",
                quantiles("vllm:request_prefill_kv_computed_tokens"),
                axis="tokens",
            ),
            Panel("Output length, all samples", quantiles("vllm:request_generation_tokens"), axis="tokens"),
            Panel(
                "Output length, longest sample", quantiles("vllm:request_max_num_generation_tokens"), axis="tokens"
            ),
            Panel("Requested max_tokens", quantiles("vllm:request_params_max_tokens"), axis="tokens"),
            Panel("Requested samples (n)", ((mean("vllm:request_params_n"), "mean"),)),
        ),
    ),
    Row(
        "State",
        (
            Panel("Engine state", ((f"faser_engine_state{{{CHOSEN}}} == 1", "{{pod}} {{state}}"),), most=1),
            Panel("Engine restarts", ((total("faser_engine_restarts_total", "pod"), "{{pod}}"),)),
            Panel(
                "Scrape success rate",
                (('avg by (job) (up{job=~".*faser.*"})', "{{job}}"),),
                "percentunit",
                most=1,
            ),
        ),
    ),
    Row(
        "Several models on one server",
        (
            Panel("Models loaded", ((f"sum by (pod) (faser_models_loaded{{{OF_POD}}})", "{{pod}}"),)),
            Panel(
                "Loads of models, failed ones too",
                ((rate("faser_model_loads_total", by="model_name, outcome"), "{{model_name}} {{outcome}}"),),
                axis="per second",
            ),
            Panel(
                "Models that left, by reason",
                ((rate("faser_model_unloads_total", by="model_name, reason"), "{{model_name}} {{reason}}"),),
                axis="per second",
            ),
            Panel(
                "Load time",
                ((mean("faser_model_load_seconds", by="model_name"), "{{model_name}}"),),
                "s",
            ),
        ),
    ),
    Row(
        "GPU (series of NVIDIA's dcgm-exporter)",
        (
            Panel(
                "GPU utilization", ((f"DCGM_FI_DEV_GPU_UTIL{{{OF_POD}}}", "{{pod}} {{gpu}}"),), "percent", most=100
            ),
            Panel("GPU memory used", ((f"DCGM_FI_DEV_FB_USED{{{OF_POD}}}", "{{pod}} {{gpu}}"),), "mbytes"),
            Panel("GPU power", ((f"DCGM_FI_DEV_POWER_USAGE{{{OF_POD}}}", "{{pod}} {{gpu}}"),), "watt"),
        ),
    ),
)
