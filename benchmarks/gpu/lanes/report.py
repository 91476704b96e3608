"""What phases lanes, overlap and arrivals came to, as tables to read."""

from collections.abc import Sequence

from benchmarks.gpu.common.record import Json
from benchmarks.simulator.report import markdown


def lanes(result: Json) -> str:
    parts = []
    if result.get("refused"):
        parts.append(f"The driver refuses to divide the device: {result['refused']}")
    parts += [_table(result.get(name, []), columns) for name, columns in _LANES.items()]
    return "\n\n".join(part for part in parts if part)


def overlap(result: Json) -> str:
    """Ratios are to drafting before the step; gain: ahead over the best other way. Then lanes, the host's part."""
    rows = result.get("rows", [])
    chunks = dict.fromkeys(name for row in rows for name in row if name.startswith("ahead:"))
    table = _table(rows, (*_OVERLAP, *chunks))
    lanes = [{**row, **cost} for row in result.get("lanes", []) for cost in row["co_run"] or [{}]]
    costs, gaps = _table(lanes, _CO_RUN), _table(result.get("gaps", []), _GAPS)
    refused = [f"{each['drafter']} by {each['partition']}: {each['says']}" for each in result.get("refused", [])]
    stopped = [
        f"{each['drafter']} by {each['partition']}: ahead is {each['ahead']:.2f} of serial, see {each['trace']}"
        for each in result.get("stopped", [])
    ]
    told = ", ".join(f"{name}: {value}" for name, value in result.get("promises", {}).items())
    return "\n\n".join(part for part in (table, told, *refused, *stopped, costs, gaps) if part)


def arrivals(result: Json) -> str:
    if "not there" in result:
        return str(result["not there"])
    rows = [
        (
            f"{row['load']:g}",
            row["arm"],
            f"{row['tokens_per_s']['median']:,.0f}",
            "–" if row["throughput"] is None else f"{row['throughput']['median']:.2f}x",
            "–" if row["latency"] is None else f"{row['latency']['median']:.2f}x",
            f"{row['pruned_share']:.1%}",
            f"{row['ahead_share']:.0%}",
            str(row["different"]),
        )
        for row in result.get("rows", [])
    ]
    columns = ("load", "arm", "tokens/s", "throughput", "latency", "pruned", "overlapped", "other answers")
    return markdown(columns, rows) if rows else ""


_LANES = {
    "splits": ("wanted", "part", "left", "says"),
    "rates": ("load", "processors", "a_second"),
    "stays": ("load", "eager_ratio", "eager", "recorded_ratio", "recorded", "says"),
    "partitions": ("asked", "came", "shares", "refusal", "refused_splits"),
    "company": ("partition", "share", "draft", "verify", "speed_up", "draft_slowdown", "verify_slowdown", "says"),
    "matrix": (
        "asked",
        "partition",
        "share",
        "sequences",
        "rows_each",
        "context",
        "draft_ms",
        "verify_ms",
        "draft_slowdown",
        "verify_slowdown",
        "speed_up",
        "says",
    ),
}
_OVERLAP = (
    "drafter",
    "partition",
    "acceptance",
    "sequences",
    "serial_tokens_per_s",
    "off",
    "ahead",
    "auto",
    "gain",
    "expected_gain",
    "auto_of_best",
    "auto_ahead",
)
_CO_RUN = (
    "drafter",
    "asked",
    "came",
    "refusal",
    "costs",
    "share",
    "context",
    "rows",
    "verify",
    "draft",
    "verify_alone",
    "draft_alone",
)
_GAPS = (
    "drafter",
    "partition",
    "acceptance",
    "sequences",
    "pairs",
    "draft_gap_ms",
    "verify_gap_ms",
    "given_ms",
    "join_ms",
    "between_ms",
)


def _table(rows: Sequence[Json], columns: tuple[str, ...]) -> str:
    """Columns that no row has are left out."""
    shown = tuple(name for name in columns if any(row.get(name) is not None for row in rows))
    return markdown(shown, [tuple(_cell(row.get(name)) for name in shown) for row in rows]) if shown else ""


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).replace("|", "/").split())
