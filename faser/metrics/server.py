"""Metrics: the Prometheus series that vLLM's dashboards, autoscalers and endpoint pickers query, and FASER's own.

Owns the registry, and the names, labels and buckets of the series; those of speculation are in speculation.py.
Other modules report events to it; it knows neither HTTP nor the engine. Every series exists from the first scrape,
with value zero.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import Counter, Gauge, Histogram, disable_created_metrics

from faser.config.speculation import SpeculationConfig
from faser.metrics.exposition import MetricsPage, Series
from faser.metrics.live import LiveRecorder
from faser.metrics.speculation import SpeculationMetrics
from faser.metrics.targets import TargetMetrics
from faser.observer import EngineObserver
from faser.types.answer import FinishReason, SpeculationSummary
from faser.types.engine import EngineState
from faser.types.outlook import Decision, Outlook, Target
from faser.types.request import SpeculationParams
from faser.types.statistics import AuditStats, EngineStats, KvDiskStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

QUEUE_FULL = "queue_full"
KEY_LIMIT = "key_limit"
TARGET = "target"  # a latency target cannot be met, and the request's class refuses then
REJECTION_REASONS = (
    QUEUE_FULL,
    KEY_LIMIT,
    TARGET,
    EngineState.LOADING.value,
    EngineState.WARMING.value,
    EngineState.RESTARTING.value,
    EngineState.DRAINING.value,
    EngineState.DEAD.value,
)

_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
# vLLM's edges begin at 10 ms, too coarse for a fast engine; a superset of them can still be aggregated with its.
_TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
# vLLM's begin at .3 s: of a queue that is empty they would show a median of 150 ms.
_REQUEST_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.2),
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_SAMPLES = (1, 2, 5, 10, 20)
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
_STEP_TOKENS = (1, *(2**power for power in range(3, 15)))
_UNKNOWN_MODEL_LEN = 131_072

# Exported because dashboards and load generators query them; FASER never increments them.
_IDLE_COUNTERS = (
    "corrupted_requests",
    "mm_cache_queries",
    "mm_cache_hits",
)

_LABELS = ("model_name", "engine")


class Metrics(EngineObserver):
    """The series of one model. Use it from one thread; render may be called from any thread.

    max_model_len: the last bucket of token counts; 0: not known yet. speculation: the configuration with the
    classes, positions and policy of the labels. max_loras: adapters that may run at once. The attribute
    `speculation` has the series of speculation, and `live` what the live view shows.
    """

    def __init__(
        self,
        *,
        model_name: str,
        max_model_len: int,
        engine: str = "0",
        speculation: SpeculationConfig | None = None,
        max_loras: int = 0,
    ) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._page = MetricsPage()
        self._seen = EngineStats()
        self._max_loras = max_loras
        self._named_adapters = ("", "")  # waiting, running
        self.live = LiveRecorder()
        make = _SeriesFactory(self._page, (model_name, engine))
        own = _SeriesFactory(self._page, (model_name, engine), prefix="faser_")
        self._states = own.gauges(
            "engine_state", "1 for the current state of the engine.", state=[each.value for each in EngineState]
        )
        self._states[EngineState.LOADING].set(1)
        self._traffic = own.counters(
            "traffic_answers",
            "Finished answers of a server that records its traffic, by what became of their record.",
            outcome=("recorded", "withheld", "dropped", "failed"),
        )
        self._restarts = own.counter("engine_restarts", "Restarts of the engine after it died or hung.")
        self._make_gauges(make)
        self._make_counters(make)
        self._make_histograms(make, tuple(_steps_of_1_2_5(max_model_len or _UNKNOWN_MODEL_LEN)))
        self.speculation = SpeculationMetrics(
            self._page,
            _LABELS,
            (model_name, engine),
            speculation or SpeculationConfig(),
            on_slo_result=self.live.slo_result,
        )
        self.targets = TargetMetrics(
            self._page, _LABELS, (model_name, engine), (speculation or SpeculationConfig()).class_names
        )
        self._audit = AuditMetrics(own)
        self._separate_layers = own.gauge(
            "model_layers_in_single_operations",
            "Layers of the model that run in single operations, since the native kernels do not take them.",
        )
        self._disk_size = own.gauge("kv_disk_bytes", "Bytes of KV on disk, of the model that is served.")
        self._disk_read = own.counter("kv_disk_read_bytes", "Bytes of KV read from disk.")
        self._disk_written = own.counter("kv_disk_written_bytes", "Bytes of KV written to disk.")

    def _make_gauges(self, make: "_SeriesFactory") -> None:
        self._running = make.gauge("num_requests_running", "Samples in the running batch.")
        self._waiting = make.gauge("num_requests_waiting", "Samples that wait to run.")
        waiting_by_reason = make.gauges(
            "num_requests_waiting_by_reason",
            "Samples that wait to run, by reason.",
            reason=("capacity", "deferred"),
        )
        self._waiting_for_room = waiting_by_reason["capacity"]
        self._kv_usage = make.gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.")
        sleep_state = make.gauges(
            "engine_sleep_state",
            "1 for the current sleep state of the engine.",
            sleep_state=("awake", "weights_offloaded", "discard_all"),
        )
        sleep_state["awake"].set(1)
        self._cache_config = make.info(
            "cache_config_info",
            "Constant 1; the labels describe the KV cache.",
            ("block_size", "num_gpu_blocks", "cache_dtype", "kv_cache_size_tokens", "kv_cache_max_concurrency"),
        )
        self._cache_config("0", "0", "", "0", "0")
        self._adapters = make.info(
            "lora_requests_info",
            "When the labels were last changed, in Unix seconds: names of LoRA adapters of running and waiting "
            "requests, and how many may run at once. 0: no request had an adapter yet.",
            ("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
        )
        self._adapters(str(self._max_loras), *self._named_adapters, value=0)

    def _make_counters(self, make: "_SeriesFactory") -> None:
        self._prompt_tokens = make.counter("prompt_tokens", "Prompt tokens computed or taken from the cache.")
        self._by_source = make.counters(
            "prompt_tokens_by_source",
            "Prompt tokens, by the source of their KV.",
            source=("local_compute", "local_cache_hit"),
        )
        self._prompt_tokens_cached = make.counter("prompt_tokens_cached", "Prompt tokens from the prefix cache.")
        self._generation_tokens = make.counter("generation_tokens", "Tokens generated.")
        self._cache_queries = make.counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._cache_hits = make.counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._disk_queries = make.counter(
            "external_prefix_cache_queries",
            "Tokens looked up on disk, of prompts that start beyond the prefix cache.",
        )
        self._disk_hits = make.counter("external_prefix_cache_hits", "Tokens whose KV was read from disk.")
        self._preemptions = make.counter("num_preemptions", "Samples preempted to free KV blocks.")
        self._success = make.counters(
            "request_success", "Requests that ended, by finish reason.", finished_reason=tuple(FinishReason)
        )
        self._rejections = make.counters(
            "admission_rejections",
            "Requests rejected by load or state, by reason.",
            reason=REJECTION_REASONS,
        )
        for idle in _IDLE_COUNTERS:
            make.counter(idle, "Always zero: FASER has nothing to count here.")

    def _make_histograms(self, make: "_SeriesFactory", tokens: Sequence[float]) -> None:
        self._ttft = make.histogram("time_to_first_token_seconds", "Arrival to first token.", _TTFT_S)
        self._itl = make.histogram(
            "inter_token_latency_seconds", "Inter-token latency: time between two chunks of a sample.", _TOKEN_S
        )
        self._tpot = make.histogram(
            "request_time_per_output_token_seconds", "Mean time per token of a request after its first.", _TOKEN_S
        )
        self._e2e = make.histogram("e2e_request_latency_seconds", "Arrival to last token.", _REQUEST_S)
        self._queue = make.histogram("request_queue_time_seconds", "Arrival to first step.", _REQUEST_S)
        self._inference = make.histogram("request_inference_time_seconds", "First step to last token.", _REQUEST_S)
        self._prefill = make.histogram("request_prefill_time_seconds", "First step to first token.", _REQUEST_S)
        self._decode = make.histogram("request_decode_time_seconds", "First to last token.", _REQUEST_S)
        self._request_prompt = make.histogram("request_prompt_tokens", "Prompt tokens of a request.", tokens)
        self._request_generation = make.histogram(
            "request_generation_tokens", "Tokens of all samples of a request.", tokens
        )
        self._longest_generation = make.histogram(
            "request_max_num_generation_tokens", "Tokens of the longest sample of a request.", tokens
        )
        self._prefill_computed = make.histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens of a request that no cache had.", tokens
        )
        self._request_preemptions = make.histogram(
            "request_num_preemptions", "How often a request was preempted.", _PREEMPTIONS
        )
        self._params_max_tokens = make.histogram("request_params_max_tokens", "max_tokens of a request.", tokens)
        self._params_n = make.histogram("request_params_n", "Samples of a request.", _SAMPLES)
        # A histogram, although its name ends in _total as in vLLM.
        self._step_tokens = make.histogram(
            "iteration_tokens_total",
            "Prompt tokens computed and tokens generated in one engine step.",
            _STEP_TOKENS,
        )

    def admitted(self, *, n: int, max_tokens: int, prompt_tokens: int) -> None:
        """A request was accepted. max_tokens: per sample, resolved."""
        del prompt_tokens  # observed when the request ends
        self._params_n.observe(n)
        self._params_max_tokens.observe(max_tokens)

    def rejected(self, reason: str) -> None:
        """A request was rejected because of load or engine state. reason: one of REJECTION_REASONS."""
        self._rejections[reason].inc()
        self.live.rejected()

    def admission(self, class_name: str, decision: Decision, target: Target) -> None:
        """Count the decision on a newly arrived request with targets, and the target that cannot be met."""
        self.targets.decided(class_name, decision, target)
        self.live.decided(class_name, decision, target)

    def outlook(self, outlook: Outlook) -> None:
        """Record what the latency model expects now."""
        self.targets.expect(outlook)
        self.live.expect(outlook)

    def traffic(self, outcome: str) -> None:
        """A finished answer was recorded, or not. May be called from any thread."""
        self._traffic[outcome].inc()

    def first_token(self, ttft_s: float) -> None:
        """A request received its first token. ttft_s: since its arrival. Only `live` takes note before its end."""
        self.live.latency("ttft", ttft_s)

    def tokens(self, count: int, gap_s: float | None) -> None:
        """A sample received count tokens in one step. gap_s: since its previous tokens; None: its first."""
        if count and gap_s is not None:
            self._itl.observe(gap_s)
            self.live.latency("itl", gap_s)

    def finished(
        self,
        reason: FinishReason,
        *,
        ttft_s: float | None,
        e2e_s: float,
        queue_s: float,
        prefill_s: float,
        decode_s: float,
        prompt_tokens: int,
        cached_tokens: int,
        generation_tokens: int,
        longest_generation: int,
        preemptions: int,
    ) -> None:
        """A request ended. Times of aborted and failed requests are not observed.

        generation_tokens: of all samples. longest_generation: of the longest one. preemptions: of all samples.
        """
        self._success[reason].inc()
        self.live.finished(reason)
        self._request_prompt.observe(prompt_tokens)
        self._request_generation.observe(generation_tokens)
        self._longest_generation.observe(longest_generation)
        self._request_preemptions.observe(preemptions)
        self._prefill_computed.observe(max(0, prompt_tokens - cached_tokens))
        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        if ttft_s is not None:
            self._ttft.observe(ttft_s)
        self._e2e.observe(e2e_s)
        self._queue.observe(queue_s)
        self._inference.observe(prefill_s + decode_s)
        self._prefill.observe(prefill_s)
        self._decode.observe(decode_s)
        if generation_tokens > 1:
            tpot_s = decode_s / (generation_tokens - 1)
            self._tpot.observe(tpot_s)
            self.live.latency("tpot", tpot_s)

    def engine(self, stats: EngineStats) -> None:
        """Report the engine's latest snapshot. Its counters never decrease; the series grow by the differences."""
        seen, self._seen = self._seen, stats
        self.live.engine(stats)
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._waiting_for_room.set(stats.num_waiting)
        self._kv_usage.set(stats.kv_usage)
        cached = stats.prompt_tokens_cached - seen.prompt_tokens_cached
        prompt = stats.prompt_tokens - seen.prompt_tokens
        self._prompt_tokens.inc(prompt)
        self._by_source["local_cache_hit"].inc(cached)
        self._by_source["local_compute"].inc(prompt - cached)
        self._prompt_tokens_cached.inc(cached)
        generated = stats.generation_tokens - seen.generation_tokens
        self._generation_tokens.inc(generated)
        self._cache_queries.inc(stats.prefix_cache_queries - seen.prefix_cache_queries)
        self._cache_hits.inc(stats.prefix_cache_hits - seen.prefix_cache_hits)
        self._preemptions.inc(stats.num_preemptions - seen.num_preemptions)
        if stats.num_steps > seen.num_steps:
            self._step_tokens.observe(prompt - cached + generated)
        named = (",".join(stats.waiting_adapters), ",".join(stats.running_adapters))
        if named != self._named_adapters:
            self._named_adapters = named
            self._adapters(str(self._max_loras), *named, value=int(time.time()))
        if stats.speculation is not None:
            self.speculation.engine(stats.speculation)
        if stats.audit is not None:
            self._audit.engine(stats.audit, seen.audit)
        if stats.kv_disk is not None:
            self._disk(stats.kv_disk, seen.kv_disk or KvDiskStats())

    def _disk(self, stats: KvDiskStats, seen: KvDiskStats) -> None:
        self._disk_queries.inc(stats.queries - seen.queries)
        self._disk_hits.inc(stats.hits - seen.hits)
        self._disk_size.set(stats.num_bytes)
        self._disk_read.inc(stats.read_bytes - seen.read_bytes)
        self._disk_written.inc(stats.written_bytes - seen.written_bytes)

    def engine_state(self, state: EngineState) -> None:
        for each, gauge in self._states.items():
            gauge.set(each == state)
        self.live.engine_state(state)

    def engine_absent(self) -> None:
        """There is no engine, and none is missing: its model is not loaded."""
        for gauge in self._states.values():
            gauge.set(0)

    def engine_ended(self, *, restarts: bool) -> None:
        """The engine has ended: nothing runs, nothing waits, no block is held. The next one counts from zero."""
        self._seen = EngineStats()
        self.live.engine_ended()
        self.engine(EngineStats())
        if restarts:
            self._restarts.inc()

    def separate_layers(self, count: int) -> None:
        self._separate_layers.set(count)

    def cache_config(self, *, block_size: int, num_gpu_blocks: int, cache_dtype: str, max_model_len: int) -> None:
        """The KV cache is known. num_gpu_blocks: blocks on any device; the name is vLLM's.

        The label kv_cache_max_concurrency: how many sequences of max_model_len tokens fit into it.
        """
        num_tokens = block_size * num_gpu_blocks
        concurrency = num_gpu_blocks / -(-max_model_len // block_size)
        self._cache_config(
            str(block_size), str(num_gpu_blocks), cache_dtype, str(num_tokens), f"{concurrency:.2f}"
        )

    def answered(
        self,
        params: SpeculationParams,
        summaries: Sequence[SpeculationSummary],
        *,
        ttft_s: float,
        tpot_s: float | None,
    ) -> None:
        """A request ended with an answer: see SpeculationMetrics."""
        self.speculation.finished(params, summaries, ttft_s=ttft_s, tpot_s=tpot_s)

    def watch_steps(self, tell: Callable[[bool], None]) -> None:
        """Call tell with whether statistics of every step are wanted: now, and whenever that changes."""
        self.live.on_watch = tell
        tell(self.live.watched)

    def render(self) -> bytes:
        """All series in Prometheus' text format; see CONTENT_TYPE."""
        return self._page.render()

    @property
    def page(self) -> MetricsPage:
        """All series."""
        return self._page


class AuditMetrics:
    """The series of answers that an idle engine computes again without drafts.

    The label `backend` names the kernels: those of a CPU give equal tokens by construction, others need not. Its
    series begin, at zero, with the first snapshot of an engine that audits.
    """

    def __init__(self, make: "_SeriesFactory") -> None:
        self._grow = {
            field: make.growing(f"audit_{field}", meaning, "backend")
            for field, meaning in (
                ("checks", "Answers computed again without drafts and compared token for token."),
                ("divergences", "Compared answers whose tokens differ from those without drafts."),
                ("skipped", "Answers drawn for the audit that found no room in it."),
            )
        }

    def engine(self, stats: AuditStats, seen: AuditStats | None) -> None:
        """seen: the snapshot before; None: there was none."""
        for field, grow in self._grow.items():
            grow(stats.backend, getattr(stats, field) - (0 if seen is None else getattr(seen, field)))


class _SeriesFactory:
    """Creates series with one prefix and resolves their labels, so that counting needs no look-up.

    labels: the values of _LABELS. gauges and counters take one more label with all its values, and return the
    series by value.
    """

    def __init__(self, page: MetricsPage, labels: tuple[str, str], *, prefix: str = "vllm:") -> None:
        self._page = page
        self._labels = labels
        self._prefix = prefix

    def gauge(self, name: str, help_text: str) -> Series:
        return self.gauges(name, help_text)[""]

    def gauges(self, name: str, help_text: str, **values: Sequence[str]) -> dict[str, Series]:
        return self._of_each_value(Gauge, name, help_text, values)

    def info(self, name: str, help_text: str, labels: Sequence[str]) -> Callable[..., None]:
        """A gauge whose labels carry the information. Returns a function that sets their values, and value."""
        family = Gauge(f"{self._prefix}{name}", help_text, (*_LABELS, *labels), registry=None)
        text = self._page.add(family)

        def set_to(*values: str, value: float = 1) -> None:
            family.clear()
            family.labels(*self._labels, *values).set(value)
            text.changed = True

        return set_to

    def counter(self, name: str, help_text: str) -> Series:
        return self.counters(name, help_text)[""]

    def counters(self, name: str, help_text: str, **values: Sequence[str]) -> dict[str, Series]:
        return self._of_each_value(Counter, name, help_text, values)

    def growing(self, name: str, help_text: str, label: str) -> Callable[[str, float], None]:
        """A counter whose label's values are not known yet. Returns a function of the value and the growth."""
        family = Counter(f"{self._prefix}{name}", help_text, (*_LABELS, label), registry=None)
        text = self._page.add(family)
        return lambda value, growth: Series(family.labels(*self._labels, value), text).inc(growth)

    def histogram(self, name: str, help_text: str, buckets: Sequence[float]) -> Series:
        family = Histogram(f"{self._prefix}{name}", help_text, _LABELS, registry=None, buckets=buckets)
        return Series(family.labels(*self._labels), self._page.add(family))

    def _of_each_value(
        self,
        kind: type[Counter] | type[Gauge],
        name: str,
        help_text: str,
        values: Mapping[str, Sequence[str]],
    ) -> dict[str, Series]:
        """Return a series for each value of the label; without a label, one for the value ""."""
        family = kind(f"{self._prefix}{name}", help_text, (*_LABELS, *values), registry=None)
        text = self._page.add(family)
        if not values:
            return {"": Series(family.labels(*self._labels), text)}
        ((_, each_value),) = values.items()
        return {value: Series(family.labels(*self._labels, value), text) for value in each_value}


def _steps_of_1_2_5(highest: int) -> Iterator[int]:
    """1, 2, 5, 10, 20, 50, ... up to highest."""
    scale = 1
    while True:
        for step in (1, 2, 5):
            if step * scale > highest:
                return
            yield step * scale
        scale *= 10
