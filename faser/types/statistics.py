"""Statistics of an engine: snapshots of counters since its start."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodStats:
    """Draft tokens of one method since the start. drafted = pruned + verified.

    dropped: pruned tokens that overlapped drafting made useless: they follow a rejected token, or the bonus token
    took their position before they could be verified. cut: pruned tokens that early pruning cut between layers.
    expected: sum of the predicted survival of the verified tokens, to compare with accepted.
    """

    method: str
    drafted: int = 0
    pruned: int = 0
    dropped: int = 0
    cut: int = 0
    verified: int = 0
    accepted: int = 0
    expected: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleStats:
    """Seconds spent in one role (draft, verify, step) since the start, predicted by the cost model and measured.

    errors: number of steps with |predicted - measured| / measured up to each of STEP_ERROR_EDGES, then above.
    """

    role: str
    predicted_s: float = 0.0
    measured_s: float = 0.0
    errors: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneStats:
    """Early pruning since the start.

    shadow_steps: looked at drafted tokens to learn, and cut no row.
    pruned_steps: looked, and cut flagged rows.
    drafted_rows: of both kinds of steps.
    pruned_rows: drafted rows that were cut.
    wasted_rows: drafted rows that were kept in steps that cut, and rejected.
    verified: drafted tokens that were looked at and then verified.
    flagged: of these, tokens that looked bad.
    false_prunes: flagged tokens that were right.
    """

    shadow_steps: int = 0
    pruned_steps: int = 0
    drafted_rows: int = 0
    pruned_rows: int = 0
    wasted_rows: int = 0
    verified: int = 0
    flagged: int = 0
    false_prunes: int = 0


STEP_ERROR_EDGES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)


class PaidRatio(NamedTuple):
    """Factor by which drafts raise the tokens per second at a load, as measured in groups of steps.

    sequences: the fewest and the most that decode at this load; None: of steps with prompts. low, high: of the
    95 % interval of ratio. drafts: whether sequences draft for it; None: it is being measured.
    """

    sequences: tuple[int, int] | None
    ratio: float
    low: float
    high: float
    drafts: bool | None

    @property
    def load(self) -> str:
        """Its name in reports: 4-7, 1, or prompts."""
        if self.sequences is None:
            return "prompts"
        fewest, most = self.sequences
        return str(fewest) if fewest == most else f"{fewest}-{most}"


class SpeculationBalance(NamedTuple):
    """Seconds that drafts have saved since the engine started, and by how much the estimate may be off.

    At all times it is off by less, with a probability of 95 %: drafts cannot have cost more than most_lost_s.
    """

    saved_s: float
    error_s: float

    @property
    def most_lost_s(self) -> float:
        return max(self.error_s - self.saved_s, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStats:
    """Counters since the start of the engine.

    num_drafts: sequence-steps with at least one verified draft token. accepted_at: by class, [cap] how often the
    i-th token of a draft was accepted. gammas: by class, how often each verified gamma 0 … cap was chosen. mode:
    of the last step: plain, serial, or the name of the partition on which drafting overlapped it. draft_share: the
    drafter's share of the processors in an overlapped step; 0 otherwise. overlap_s: time in which both lanes were
    busy. partition: what divides the processors; serial: they are not divided. partition_fallback: why it is not
    the configured one; else empty. mode_steps: steps by mode. switches: (from, to, times). bypasses: (reason,
    sequence-steps) without a draft, reason one of load, gain, memory, request. decide_s: host time of policy and
    bookkeeping. catchup_tokens: draft KV recomputed after a pause. pruning: None if early pruning is off. paid: by
    load, lowest first. balance: what drafts have saved; None: it is not measured. rebuilds: (drafter, cause, how
    many of its states were damaged and replaced).
    """

    policy: str
    method: str
    num_drafts: int = 0
    methods: tuple[MethodStats, ...] = ()
    accepted_at: tuple[tuple[str, tuple[int, ...]], ...] = ()
    gammas: tuple[tuple[str, tuple[int, ...]], ...] = ()
    mode: str = "plain"
    mode_steps: tuple[tuple[str, int], ...] = ()
    switches: tuple[tuple[str, str, int], ...] = ()
    bypasses: tuple[tuple[str, int], ...] = ()
    roles: tuple[RoleStats, ...] = ()
    decide_s: float = 0.0
    catchup_tokens: int = 0
    draft_share: float = 0.0
    overlap_s: float = 0.0
    partition: str = "serial"
    partition_fallback: str = ""
    pruning: PruneStats | None = None
    paid: tuple[PaidRatio, ...] = ()
    balance: SpeculationBalance | None = None
    rebuilds: tuple[tuple[str, str, int], ...] = ()

    @property
    def accepted_per_position(self) -> tuple[int, ...]:
        """Count how often the i-th token of a draft was accepted, in all classes: [cap]."""
        return tuple(map(sum, zip(*(counts for _, counts in self.accepted_at), strict=True)))


NO_SPECULATION = SpeculationStats(policy="", method="")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditStats:
    """Replays of answers without drafts since the start. backend: the name of the kernels.

    checks: finished replays. divergences: those whose tokens differed. skipped: answers that were drawn for a
    replay and are too long for one, or found the queue full.
    """

    backend: str
    checks: int = 0
    divergences: int = 0
    skipped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KvDiskStats:
    """KV on disk. queries, hits: tokens that were looked up there, because the prefix cache did not have them.

    num_bytes: that it takes now. read_bytes, written_bytes: since the start of the engine.
    """

    queries: int = 0
    hits: int = 0
    num_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot after a step. Counters count from the start of the engine; the other values are current.

    prompt_tokens: of the prompts that are computed, each request's once. prompt_tokens_cached: those of them that
    the prefix cache had. running_adapters, waiting_adapters: names of those that running and waiting samples want,
    each once, sorted.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    num_steps: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    last_step_rows: int = 0
    last_step_s: float = 0.0
    running_adapters: tuple[str, ...] = ()
    waiting_adapters: tuple[str, ...] = ()
    speculation: SpeculationStats | None = None
    audit: AuditStats | None = None
    kv_disk: KvDiskStats | None = None
