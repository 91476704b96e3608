"""AuditMetrics: the series of answers that an idle engine computes again without drafts."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter

from faser.types import AuditStats

_SERIES = {
    "checks": ("faser_audit_checks", "Answers computed again without drafts and compared token for token."),
    "divergences": ("faser_audit_divergences", "Compared answers whose tokens differ from those without drafts."),
    "skipped": ("faser_audit_skipped", "Answers drawn for the audit that found no room in it."),
}


class AuditMetrics:
    """The series of one model. names, labels: names and values of the labels that all its series carry.

    The label `backend` names the kernels: those of a CPU give equal tokens by construction, others need not. Its
    series begin, at zero, with the first snapshot of an engine that audits.
    """

    def __init__(self, registry: CollectorRegistry, names: Sequence[str], labels: Sequence[str]) -> None:
        self._labels = tuple(labels)
        self._families = {
            field: Counter(name, meaning, (*names, "backend"), registry=registry)
            for field, (name, meaning) in _SERIES.items()
        }

    def engine(self, stats: AuditStats, seen: AuditStats | None) -> None:
        """seen: the snapshot before; None: there was none."""
        for field, family in self._families.items():
            grown = getattr(stats, field) - (0 if seen is None else getattr(seen, field))
            family.labels(*self._labels, stats.backend).inc(grown)
