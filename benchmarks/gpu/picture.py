"""Picture of a run: decoding without drafts, next to vLLM where that ran, and the policies at given acceptance.

Rates of the first panel are those of one sequence, so that one axis has room for all numbers of sequences.
"""

from collections.abc import Mapping, Sequence

from benchmarks.gpu.record import Json, Record
from benchmarks.spec_bench.chart import Points, line_chart, stacked

_AT = "sequences at a time"


def picture(records: Sequence[Record]) -> str | None:
    """SVG of decoding without drafts and of policies, as far as they were measured; None: neither was."""
    found = {record.phase: record.result for record in records}
    device = (found.get("environment", {}).get("device") or {}).get("name")
    peers = [row for row in found.get("vllm", {}).get("rows", []) if row["configuration"] == "plain"]
    beside = "; vLLM without torch.compile" if peers else ""
    rates = _beside_vllm(peers) if peers else _alone(found.get("plain", {}).get("target", []))
    lines = policy_lines(found.get("policies", {}).get("rows", []))
    panels = [
        line_chart(f"{device}: 8B without drafts{beside}", _AT, "tokens/s of a sequence", rates, doubling=True),
        line_chart(
            f"{device}: policies by acceptance, 8B with a 0.6B draft model",
            _AT,
            "times the tokens/s of off",
            lines,
            doubling=True,
        ),
    ]
    drawn = [panel for panel in panels if panel is not None]
    return stacked(drawn) if drawn else None


def _beside_vllm(rows: Sequence[Json]) -> dict[str, Points]:
    names = {"vllm": "vLLM", "faser": "FASER"}
    return {
        shown: sorted((row["sequences"], row[name] / row["sequences"]) for row in rows if name in row)
        for name, shown in names.items()
    }


def _alone(rows: Sequence[Json]) -> dict[str, Points]:
    return {
        row["sampling"]: sorted(
            (each["sequences"], each["tokens_per_s"] / each["sequences"])
            for each in rows
            if each["sampling"] == row["sampling"]
        )
        for row in rows
    }


def policy_lines(rows: Sequence[Json]) -> Mapping[str, Points]:
    """Times off by sequences: of faser, and of the fixed length that is best there, for each acceptance.

    rows: of phase `policies`; their order does not matter.
    """
    found: dict[tuple[float, str], dict[int, float]] = {}
    for row in rows:
        policy = "best fixed" if row["policy"].startswith("fixed") else row["policy"]
        if policy in ("best fixed", "faser"):
            line = found.setdefault((row["acceptance"], policy), {})
            line[row["sequences"]] = max(row["times_off"], line.get(row["sequences"], 0.0))
    batches = sorted({row["sequences"] for row in rows})
    lines: dict[str, Points] = {"off": [(batch, 1.0) for batch in batches]}
    for (acceptance, policy), line in sorted(found.items(), key=lambda each: (-each[0][0], each[0][1])):
        lines[f"{policy}, {acceptance:g}"] = sorted(line.items())
    return lines
