"""ServerMetrics: what the server counted itself between two scrapes of /metrics.

compare: a load generator's figures next to the server's own, and whether they agree.

Counts agree when they are equal, or when a stated reason gives the difference. Latencies agree when they differ by
no more than _SLACK_S and _SLACK_SHARE: a client measures later than the server, on the same cores.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.generators.tool import Drafts, Figures, Latency

_TIMEOUT_S = 30.0

Key = tuple[str, frozenset[tuple[str, str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Observations of one kind. edges: upper ends of buckets, ascending. cumulative: counts up to each edge."""

    count: int
    total: float
    edges: tuple[float, ...]
    cumulative: tuple[int, ...]

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def bracket(self, percentile: float) -> tuple[float, float]:
        """The bucket, from its lower to its upper end, that holds a percentile. Requires an observation."""
        at = bisect_left(self.cumulative, percentile / 100 * self.count)
        return (self.edges[at - 1] if at else 0.0), self.edges[at]


class ServerMetrics:
    """Samples by name and labels; two scrapes can be subtracted."""

    def __init__(self, samples: dict[Key, float]) -> None:
        self._samples = samples

    @classmethod
    def parse(cls, text: str) -> Self:
        return cls(
            {
                (sample.name, frozenset(sample.labels.items())): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }
        )

    @classmethod
    def scrape(cls, url: str) -> Self:
        """url: of the server. Raises httpx.HTTPError."""
        return cls.parse(httpx.get(f"{url}/metrics", timeout=_TIMEOUT_S, trust_env=False).raise_for_status().text)

    def since(self, earlier: "ServerMetrics") -> "ServerMetrics":
        """Return what was added after the earlier scrape. Series that were not there count from zero."""
        return ServerMetrics({key: value - earlier._samples.get(key, 0.0) for key, value in self._samples.items()})

    def total(self, name: str, **labels: str) -> int:
        """Sum of the samples of this name that have these labels. Raises KeyError if there is none."""
        wanted = set(labels.items())
        found = [value for (own, given), value in self._samples.items() if own == name and wanted <= given]
        if not found:
            raise KeyError(f"/metrics has no {name} with {labels}")
        return round(sum(found))

    def by_label(self, name: str, label: str) -> dict[str, int]:
        """The samples of this name, by the value of one label."""
        return {dict(given)[label]: round(value) for (own, given), value in self._samples.items() if own == name}

    def histogram(self, name: str) -> Histogram:
        """name: without _bucket, _sum or _count. Raises KeyError if there is none."""
        buckets = sorted((float(edge), count) for edge, count in self.by_label(f"{name}_bucket", "le").items())
        sums = [value for (own, _), value in self._samples.items() if own == f"{name}_sum"]
        if not buckets or not sums:
            raise KeyError(f"/metrics has no histogram {name}")
        return Histogram(
            count=self.total(f"{name}_count"),
            total=sum(sums),
            edges=tuple(edge for edge, _ in buckets),
            cumulative=tuple(count for _, count in buckets),
        )

    def is_idle(self) -> bool:
        """Nothing runs, waits or holds a block. Of a scrape, not of a difference."""
        return not any(
            value
            for (name, _), value in self._samples.items()
            if name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        )


_SLACK_S = 0.05
_SLACK_SHARE = 0.15
_EARLY_S = 0.005  # a client may be ahead of the server's clock by this much: both round
_RETOKENISED_SHARE = 0.02


class Finding(StrEnum):
    EQUAL = "equal"
    EXPLAINED = "explained"
    WITHIN = "within bounds"
    DIFFERS = "differs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One comparison. tool, server: counts, or seconds. reason: of a difference."""

    what: str
    tool: float
    server: float
    outcome: Finding
    reason: str = ""


def compare(figures: Figures, server: ServerMetrics, template_tokens: int) -> list[Check]:
    """server: the difference of two scrapes. template_tokens: that the chat template adds to one user message."""
    return [
        *_requests(figures, server),
        *_usage(figures, server),
        *_own_counts(figures, server, template_tokens),
        *_latencies(figures, server),
        *_drafts(figures, server),
    ]


def _requests(figures: Figures, server: ServerMetrics) -> Iterator[Check]:
    ends = server.by_label("vllm:request_success_total", "finished_reason")
    answered = ends["stop"] + ends["length"]
    completed = figures.completed + (figures.also_sent.completed if figures.also_sent else 0)
    reason = f"{figures.also_sent.completed} sent before the measurement" if figures.also_sent else ""
    late = completed - answered
    if figures.cancelled and 0 < -late == figures.cancelled - ends["abort"]:
        reason = f"{-late} had ended when the client left"
        yield Check(what="requests", tool=completed, server=answered, outcome=Finding.EXPLAINED, reason=reason)
        yield Check(
            what="cancelled requests",
            tool=figures.cancelled,
            server=ends["abort"],
            outcome=Finding.EXPLAINED,
            reason=reason,
        )
        return
    yield _count("requests", figures.completed, answered, explained=completed, reason=reason)
    yield _count("cancelled requests", figures.cancelled, ends["abort"])
    yield _count("failed requests", figures.failed, ends["error"])


def _usage(figures: Figures, server: ServerMetrics) -> Iterator[Check]:
    """Tokens of the usage in the answers. A cancelled request has none, but the server computed some of it."""
    if figures.cancelled:
        return
    for what, reported, name, also in (
        ("input tokens", figures.input_tokens, "prompt", figures.also_sent and figures.also_sent.input_tokens),
        (
            "output tokens",
            figures.output_tokens,
            "generation",
            figures.also_sent and figures.also_sent.output_tokens,
        ),
    ):
        if reported is None:
            continue
        reason = "the requests sent before the measurement" if also else ""
        for series in (f"vllm:{name}_tokens_total", f"vllm:request_{name}_tokens_sum"):
            counted = server.total(series)
            label = f"{what}, {series.removeprefix('vllm:')}"
            yield _count(label, reported, counted, explained=reported + (also or 0), reason=reason)


def _own_counts(figures: Figures, server: ServerMetrics, template_tokens: int) -> Iterator[Check]:
    if figures.cancelled:
        return
    also = figures.also_sent
    if figures.own_input_tokens is not None:
        of_template = template_tokens * figures.completed if figures.in_chat else 0
        before = (also.input_tokens or 0) if also else 0
        reasons = [f"the chat template adds {template_tokens} a request"] if of_template else []
        reasons += ["the requests sent before the measurement"] if before else []
        yield _count(
            "input tokens, the tool's tokenizer",
            figures.own_input_tokens,
            server.total("vllm:prompt_tokens_total"),
            explained=figures.own_input_tokens + of_template + before,
            reason=", ".join(reasons),
        )
    if figures.own_output_tokens is not None:
        yield _retokenised(figures.own_output_tokens, server)


def _retokenised(own: int, server: ServerMetrics) -> Check:
    """A token that ends an answer has no text; and a text may have been written with other tokens than its own."""
    counted = server.total("vllm:generation_tokens_total")
    ended = server.total("vllm:request_success_total", finished_reason="stop")
    reason = f"{ended} answers end with a token that has no text" if ended else ""
    check = _count("output tokens, the tool's tokenizer", own, counted, explained=own + ended, reason=reason)
    if check.outcome is not Finding.DIFFERS or abs(own + ended - counted) > _RETOKENISED_SHARE * counted:
        return check
    reason = ", ".join(filter(None, (reason, "some texts have more than one sequence of tokens")))
    return Check(what=check.what, tool=own, server=counted, outcome=Finding.EXPLAINED, reason=reason)


def _latencies(figures: Figures, server: ServerMetrics) -> Iterator[Check]:
    """The end of an answer may reach a client with less delay than its beginning, so a TPOT may be below."""
    for what, reported, name, early_s in (
        ("TTFT", figures.ttft, "time_to_first_token", _EARLY_S),
        ("TPOT", figures.tpot, "request_time_per_output_token", _SLACK_S),
        ("latency", figures.e2e, "e2e_request_latency", _EARLY_S),
    ):
        if reported is not None and reported.count:
            yield from _latency(what, reported, server.histogram(f"vllm:{name}_seconds"), early_s=early_s)
    if figures.chunks is not None and figures.chunks.count:
        silent = server.total("vllm:request_success_total", finished_reason="stop")
        yield from _chunks(figures.chunks, server.histogram("vllm:inter_token_latency_seconds"), silent)


def _latency(what: str, reported: Latency, own: Histogram, *, early_s: float) -> Iterator[Check]:
    close = own.mean - early_s <= reported.mean_s <= _latest_s(own.mean)
    outcome = Finding.WITHIN if close else Finding.DIFFERS
    yield Check(what=f"{what}, mean", tool=reported.mean_s, server=own.mean, outcome=outcome)
    for percentile, value_s in reported.percentiles.items():
        low_s, high_s = own.bracket(percentile)
        # Tools interpolate between neighbours, a histogram cannot: with few requests they may be a bucket apart.
        low_s = min(low_s, own.bracket(percentile * (1 - 1 / own.count))[0])
        outcome = Finding.WITHIN if low_s - early_s <= value_s <= _latest_s(high_s) else Finding.DIFFERS
        reason = f"the server's bucket is {1000 * low_s:g} to {1000 * high_s:g} ms"
        yield Check(what=f"{what}, p{percentile}", tool=value_s, server=high_s, outcome=outcome, reason=reason)


def _chunks(reported: Latency, own: Histogram, silent: int) -> Iterator[Check]:
    """The server sees steps. A stream without key and salt has an event for each token: docs/security.md.

    silent: answers whose last token has no text; some tools pass over its chunk.
    """
    by_token = "without key and cache_salt a stream has one event a token, the server observes steps"
    missing = own.count - reported.count
    if reported.count == own.count:
        yield _count("chunk gaps", reported.count, own.count)
        yield from _latency("ITL", reported, own, early_s=_SLACK_S)
        return
    outcome = Finding.EXPLAINED if missing <= silent else Finding.DIFFERS
    reason = by_token if missing < 0 else f"{silent} answers end with a token that has no text"
    yield Check(what="chunk gaps", tool=reported.count, server=own.count, outcome=outcome, reason=reason)


def _drafts(figures: Figures, server: ServerMetrics) -> Iterator[Check]:
    if figures.drafts is None:
        return
    own = drafts_of(server)
    reason = "drafts of the requests sent before the measurement" if figures.also_sent else ""
    for what, reported, counted in (
        ("drafts", figures.drafts.drafts, own.drafts),
        ("draft tokens", figures.drafts.draft_tokens, own.draft_tokens),
        ("accepted draft tokens", figures.drafts.accepted_tokens, own.accepted_tokens),
        (
            "accepted draft tokens, by position",
            round(sum(figures.drafts.by_position) * figures.drafts.drafts),
            round(sum(own.by_position) * own.drafts),
        ),
    ):
        above = bool(figures.also_sent) and counted > reported
        yield _count(what, reported, counted, explained=counted if above else reported, reason=reason)


def drafts_of(server: ServerMetrics) -> Drafts:
    """The server's own counts, in the form that tools give them."""
    name = "vllm:spec_decode_num"
    drafts = server.total(f"{name}_drafts_total")
    accepted = server.by_label(f"{name}_accepted_tokens_per_pos_total", "position")
    return Drafts(
        drafts=drafts,
        draft_tokens=server.total(f"{name}_draft_tokens_total"),
        accepted_tokens=server.total(f"{name}_accepted_tokens_total"),
        by_position=tuple(accepted[at] / max(1, drafts) for at in sorted(accepted, key=int)),
    )


def _count(what: str, reported: int, counted: int, *, explained: int | None = None, reason: str = "") -> Check:
    """explained: the tool's count with what the reason adds to it."""
    if reported == counted:
        return Check(what=what, tool=reported, server=counted, outcome=Finding.EQUAL)
    outcome = Finding.EXPLAINED if reason and explained == counted else Finding.DIFFERS
    return Check(what=what, tool=reported, server=counted, outcome=outcome, reason=reason)


def _latest_s(own_s: float) -> float:
    """Return the most that a client may measure where the server measures own_s."""
    return own_s + _SLACK_S + _SLACK_SHARE * own_s
