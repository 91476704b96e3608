"""Series about speculation that Prometheus scrapes: vLLM's four counters, and FASER's own.

The engine counts from its start, so a scrape needs its latest snapshot alone: this module adds nothing up, and a
step costs one assignment. Only what a finished request reports (latency targets, acceptance) is counted here.
Every series exists at zero from the first scrape.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from faser.config.speculation import DRAFT_METHODS, SpeculationConfig
from faser.metrics.exposition import MetricsPage, Series
from faser.types.answer import SpeculationSummary
from faser.types.request import SpeculationParams
from faser.types.statistics import STEP_ERROR_EDGES, MethodStats, PruneStats, RoleStats, SpeculationStats

MODES = ("plain", "serial", "streams", "sm", "cores")
BYPASS_REASONS = ("load", "gain", "memory", "request")
REBUILD_CAUSES = ("uptime", "position", "prefix_hit")
PRUNE_STAGES = ("trim", "layer", "frontier")
TARGETS = ("ttft", "tpot", "both")

_GAMMAS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 32)
_RATES = tuple(step / 10 for step in range(1, 11))
_PARTS = {"draft": ("draft", "pass", "text"), "verify": ("verify",), "step": ("step",)}
# No engine divides its processors in two ways, so no mode of a partition follows another.
_SWITCHES = tuple(
    (one, other) for one in MODES for other in MODES if one != other and {one, other} & {"plain", "serial"}
)

Labels = tuple[str, ...]
Values = Iterable[tuple[Labels, float]]


class SpeculationMetrics:
    """The series of one model. names, labels: names and values of the labels that all its series carry.

    on_slo_result: is called with class, target and whether it was met, for each request with a target that ends.
    """

    def __init__(
        self,
        page: MetricsPage,
        names: Labels,
        labels: Labels,
        config: SpeculationConfig,
        *,
        on_slo_result: Callable[[str, str, bool], None],
    ) -> None:
        self._on_slo_result = on_slo_result
        self._classes = config.class_names
        self._engine = _EngineSeries(names, labels, config)
        self._engine_text = page.add(self._engine)
        rates = Histogram(
            "faser_request_spec_acceptance_rate",
            "Share of verified draft tokens that were accepted, of finished requests with draft tokens.",
            (*names, "class"),
            registry=None,
            buckets=_RATES,
        )
        kept = Counter(
            "faser_slo_requests",
            "Finished requests with a latency target, by whether they met it.",
            (*names, "class", "target", "result"),
            registry=None,
        )
        of_rates, of_kept = page.add(rates), page.add(kept)
        self._rates = {name: Series(rates.labels(*labels, name), of_rates) for name in self._classes}
        self._slo = {
            (name, target, met): Series(kept.labels(*labels, name, target, "met" if met else "missed"), of_kept)
            for name in self._classes
            for target in TARGETS
            for met in (True, False)
        }

    def engine(self, stats: SpeculationStats) -> None:
        """Take over the engine's latest snapshot."""
        self._engine.stats = stats
        self._engine_text.changed = True

    def finished(
        self,
        params: SpeculationParams,
        summaries: Sequence[SpeculationSummary],
        *,
        ttft_s: float,
        tpot_s: float | None,
    ) -> None:
        """Count a request that ended with an answer. tpot_s: of its slowest sample; None: none had two tokens."""
        verified = sum(each.verified for each in summaries)
        if verified:
            self._rates[params.class_name].observe(sum(each.accepted for each in summaries) / verified)
        met = {}
        if params.slo.ttft_ms is not None:
            met["ttft"] = 1000 * ttft_s <= params.slo.ttft_ms
        if params.slo.tpot_ms is not None:
            met["tpot"] = tpot_s is None or 1000 * tpot_s <= params.slo.tpot_ms
        if len(met) == 2:
            met["both"] = all(met.values())
        for target, result in met.items():
            self._slo[params.class_name, target, result].inc()
            self._on_slo_result(params.class_name, target, result)


class _EngineSeries(Collector):
    """The series that follow from the engine's snapshot."""

    def __init__(self, names: Labels, labels: Labels, config: SpeculationConfig) -> None:
        self.stats = SpeculationStats(policy=config.policy, method=config.method)
        self._names = names
        self._labels = labels
        self._classes = config.class_names
        self._cap = config.cap
        self._synthetic = float(config.synthetic)

    def describe(self) -> Iterator[Metric]:
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        methods = {each.method: each for each in stats.methods}
        yield from self._of_vllm(stats)
        yield from self._tokens({name: methods.get(name, MethodStats(method=name)) for name in DRAFT_METHODS})
        yield self._gammas(dict(stats.gammas))
        yield from self._depths(stats)
        yield from self._times(stats, {name: _role(name, stats.roles) for name in _PARTS})
        yield from self._modes(stats)
        yield from self._pruning(stats.pruning or PruneStats())
        yield from self._rest(stats)

    def _of_vllm(self, stats: SpeculationStats) -> Iterator[Metric]:
        """A draft is a sequence in a step with at least one draft token that the target verifies.

        A draft token that early pruning cuts between layers was sent and is not verified.
        """
        sent = sum(each.verified + each.cut for each in stats.methods)
        accepted = sum(each.accepted for each in stats.methods)
        yield self._counter("vllm:spec_decode_num_drafts", "Drafts sent to the target model.", stats.num_drafts)
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Draft tokens sent to the target model.", sent)
        yield self._counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.", accepted)
        by_position = dict(enumerate(stats.accepted_per_position))
        yield self._counters(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by their position in the draft.",
            ("position",),
            [((str(at),), by_position.get(at, 0)) for at in range(max(self._cap, len(by_position)))],
        )

    def _tokens(self, methods: Mapping[str, MethodStats]) -> Iterator[Metric]:
        """drafted = pruned + verified, verified = accepted + wasted."""
        counts: Mapping[str, tuple[str, Callable[[MethodStats], float]]] = {
            "drafted": ("Draft tokens proposed.", lambda each: each.drafted),
            "verified": ("Draft tokens that the target model verified.", lambda each: each.verified),
            "accepted": ("Draft tokens accepted.", lambda each: each.accepted),
            "wasted": ("Draft tokens verified and not accepted.", lambda each: each.verified - each.accepted),
            "expected_accepted": (
                "Verified draft tokens that were predicted to be accepted.",
                lambda each: each.expected,
            ),
        }
        for name, (text, count) in counts.items():
            values = [((method,), count(each)) for method, each in methods.items()]
            yield self._counters(f"faser_spec_{name}_tokens", text, ("method",), values)
        pruned = {(name, stage): 0 for name in methods for stage in PRUNE_STAGES}
        pruned |= {(name, "trim"): each.pruned - each.dropped - each.cut for name, each in methods.items()}
        pruned |= {(name, "frontier"): each.dropped for name, each in methods.items()}
        pruned |= {(name, "layer"): each.cut for name, each in methods.items()}
        text = (
            "Draft tokens not verified: cut before the step, pruned between layers, or dropped after a mismatch."
        )
        yield self._counters("faser_spec_pruned_tokens", text, ("method", "stage"), pruned.items())

    def _gammas(self, counts: Mapping[str, Sequence[int]]) -> Metric:
        family = HistogramMetricFamily(
            "faser_spec_gamma",
            "Draft tokens verified per sequence and step.",
            labels=(*self._names, "class"),
        )
        for name in self._classes:
            own = counts.get(name, ())
            buckets = [0] * (len(_GAMMAS) + 1)
            for gamma, times in enumerate(own):
                buckets[bisect_left(_GAMMAS, gamma)] += times
            total = sum(gamma * times for gamma, times in enumerate(own))
            family.add_metric((*self._labels, name), _cumulative(_GAMMAS, buckets), total)
        return family

    def _depths(self, stats: SpeculationStats) -> Iterator[Metric]:
        """The i-th token of a draft is verified where γ is larger than i."""
        reached = {name: tuple(accumulate(reversed(counts[1:])))[::-1] for name, counts in stats.gammas}
        for what, text, by_class in (
            ("verified", "Draft tokens that the target model verified, by their position in the draft.", reached),
            ("accepted", "Draft tokens accepted, by their position in the draft.", dict(stats.accepted_at)),
        ):
            counts = {(name, str(at)): 0 for name in self._classes for at in range(self._cap)}
            for name, own in by_class.items():
                counts |= {(name, str(at)): count for at, count in enumerate(own)}
            yield self._counters(f"faser_spec_{what}_tokens_per_pos", text, ("class", "position"), counts.items())

    def _times(self, stats: SpeculationStats, roles: Mapping[str, RoleStats]) -> Iterator[Metric]:
        """Passes of the target count as verify, also where the engine reports whole steps alone."""
        verify_s = roles["verify"].measured_s or roles["step"].measured_s
        for name, text, seconds in (
            ("draft", "Time spent on drafting.", roles["draft"].measured_s),
            ("verify", "Time spent on passes of the target model.", verify_s),
            ("overlap", "Time in which drafting and verification ran concurrently.", stats.overlap_s),
            ("decide", "Host time spent on the policy and its bookkeeping.", stats.decide_s),
        ):
            yield self._counter(f"faser_spec_{name}_seconds", text, seconds)
        predicted = {(name,): each.predicted_s for name, each in roles.items()}
        measured = {(name,): each.measured_s for name, each in roles.items()}
        yield self._counters(
            "faser_step_predicted_seconds", "Step time predicted by the cost model.", ("role",), predicted.items()
        )
        yield self._counters("faser_step_measured_seconds", "Step time measured.", ("role",), measured.items())
        errors = Metric("faser_step_time_error_ratio", "|predicted - measured| / measured.", "histogram")
        for name, each in roles.items():
            own = {**dict(zip(self._names, self._labels, strict=True)), "role": name}
            for edge, count in _cumulative(STEP_ERROR_EDGES, each.errors):
                errors.add_sample("faser_step_time_error_ratio_bucket", {**own, "le": edge}, count)
            errors.add_sample("faser_step_time_error_ratio_count", own, sum(each.errors))
        yield errors

    def _modes(self, stats: SpeculationStats) -> Iterator[Metric]:
        in_force = {(mode,): float(mode == stats.mode) for mode in MODES}
        yield self._gauges(
            "faser_spec_mode", "1 for the mode of the last step, 0 for the others.", ("mode",), in_force.items()
        )
        steps = {(mode,): 0 for mode in MODES} | {(mode,): count for mode, count in stats.mode_steps}
        yield self._counters("faser_spec_mode_steps", "Steps, by mode.", ("mode",), steps.items())
        switches = dict.fromkeys(_SWITCHES, 0) | {(one, other): times for one, other, times in stats.switches}
        yield self._counters("faser_spec_mode_switches", "Changes of mode.", ("from", "to"), switches.items())
        bypasses = {(reason,): 0 for reason in BYPASS_REASONS} | {(why,): count for why, count in stats.bypasses}
        text = "Sequences that went through a step without a draft, by reason."
        yield self._counters("faser_spec_bypass_steps", text, ("reason",), bypasses.items())

    def _pruning(self, stats: PruneStats) -> Iterator[Metric]:
        steps = {("shadow",): stats.shadow_steps, ("pruning",): stats.pruned_steps}
        text = "Steps whose draft rows were looked at between layers, to learn or to prune."
        yield self._counters("faser_prune_steps", text, ("kind",), steps.items())
        counts: tuple[tuple[str, str, float], ...] = (
            ("drafted_rows", "Draft rows of those steps.", stats.drafted_rows),
            ("rows", "Draft rows that were pruned.", stats.pruned_rows),
            ("wasted_rows", "Draft rows that were kept in steps that pruned, and rejected.", stats.wasted_rows),
            ("verified_tokens", "Draft tokens that were looked at and then verified.", stats.verified),
            ("flagged_tokens", "Verified tokens that had looked bad.", stats.flagged),
            ("false_tokens", "Flagged tokens that would have been accepted.", stats.false_prunes),
        )
        for name, text, value in counts:
            yield self._counter(f"faser_prune_{name}", text, value)

    def _rest(self, stats: SpeculationStats) -> Iterator[Metric]:
        yield self._gauges(
            "faser_spec_policy_info",
            "Constant 1; the labels name the policy and the drafting method.",
            ("policy", "method"),
            [((stats.policy, stats.method), 1.0)],
        )
        yield self._gauges(
            "faser_spec_synthetic",
            "1 where drafts are accepted at given rates, whatever the model says: answers are not the model's.",
            (),
            [((), self._synthetic)],
        )
        yield self._gauges(
            "faser_spec_partition_info",
            "Constant 1; the labels name the partition of the processors, and why it is not the requested one.",
            ("partition", "fallback"),
            [((stats.partition, stats.partition_fallback), 1.0)],
        )
        bounds = [
            ((each.load, bound), value)
            for each in stats.paid
            for bound, value in (("low", each.low), ("mean", each.ratio), ("high", each.high))
        ]
        text = "Tokens per second with drafts over those without, as measured, with a 95 % interval; by sequences."
        yield self._gauges("faser_spec_paid_ratio", text, ("sequences", "bound"), bounds)
        decided = [((each.load,), float(each.drafts)) for each in stats.paid if each.drafts is not None]
        text = (
            "1 where sequences draft because drafts paid when they were measured last, 0 where they did not pay."
        )
        yield self._gauges("faser_spec_paying", text, ("sequences",), decided)
        if (balance := stats.balance) is not None:
            low, high = balance.saved_s - balance.error_s, balance.saved_s + balance.error_s
            saved = {("low",): low, ("mean",): balance.saved_s, ("high",): high}
            text = "Seconds that drafts have saved since the start, with bounds that hold at all times (95 %)."
            yield self._gauges("faser_spec_saved_seconds", text, ("bound",), saved.items())
        rebuilds = {(name, cause): 0 for name in DRAFT_METHODS for cause in REBUILD_CAUSES}
        rebuilds |= {(name, cause): count for name, cause, count in stats.rebuilds}
        text = "Damaged states of drafters that were replaced by ones computed anew, by what showed the damage."
        yield self._counters("faser_drafter_rebuilds", text, ("drafter", "cause"), rebuilds.items())
        share = stats.draft_share
        shares = {("draft",): share or 1.0, ("verify",): 1.0 - share}
        yield self._gauges("faser_sm_share", "Share of the processors by lane.", ("lane",), shares.items())
        text = "Tokens whose missing draft KV was computed."
        yield self._counter("faser_spec_catchup_tokens", text, stats.catchup_tokens)

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._counters(name, text, (), [((), value)])

    def _counters(self, name: str, text: str, extra: Labels, values: Values) -> Metric:
        family = CounterMetricFamily(name, text, labels=(*self._names, *extra))
        for more, value in values:
            family.add_metric((*self._labels, *more), value)
        return family

    def _gauges(self, name: str, text: str, extra: Labels, values: Values) -> Metric:
        family = GaugeMetricFamily(name, text, labels=(*self._names, *extra))
        for more, value in values:
            family.add_metric((*self._labels, *more), value)
        return family


def _role(name: str, roles: Sequence[RoleStats]) -> RoleStats:
    """Return the engine's report of one role. Passes of a draft model and look-ups in text are both drafting."""
    parts = [each for each in roles if each.role in _PARTS[name]]
    errors = zip(*(each.errors for each in parts if each.errors), strict=True)
    return RoleStats(
        role=name,
        predicted_s=sum(each.predicted_s for each in parts),
        measured_s=sum(each.measured_s for each in parts),
        errors=tuple(map(sum, errors)) or (0,) * (len(STEP_ERROR_EDGES) + 1),
    )


def _cumulative(edges: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Counts up to each edge and beyond the last, as buckets that include all smaller ones."""
    total, buckets = 0, []
    for edge, count in zip((*map(float, edges), "+Inf"), counts, strict=True):
        total += count
        buckets.append((str(edge), float(total)))
    return buckets
