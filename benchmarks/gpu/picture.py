"""Draws a merged run: FASER next to vLLM without drafts, and the policies at given acceptance.

    python -m benchmarks.gpu.picture benchmarks/results/h200 docs/images/gpu-h200.svg

FOLDER has vllm.json and policies.json, as `python -m benchmarks.gpu merge` writes them. Rates of the first panel
are those of one sequence, so that one axis has room for all numbers of sequences.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.gpu.record import Json
from benchmarks.runner import command_line
from benchmarks.spec_bench.chart import Points, line_chart, stacked

_AT = "sequences at a time"


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("picture", type=Path)
    asked = parser.parse_args()
    asked.picture.write_text(picture(asked.folder), "utf-8")


def picture(folder: Path) -> str:
    """SVG of two panels.

    Raises OSError where a file of the folder is missing, ValueError where one has no rows.
    """
    peers, policies = (json.loads((folder / f"{name}.json").read_text("utf-8")) for name in ("vllm", "policies"))
    device = peers["device"]["name"]
    panels = [
        line_chart(
            f"{device}: 8B without drafts; vLLM without torch.compile",
            _AT,
            "tokens/s of a sequence",
            _rates(peers),
            doubling=True,
        ),
        line_chart(
            f"{device}: policies by acceptance, 8B with a 0.6B draft model",
            _AT,
            "times the tokens/s of off",
            policy_lines(policies["result"]["rows"]),
            doubling=True,
        ),
    ]
    drawn = [panel for panel in panels if panel is not None]
    if len(drawn) < len(panels):
        raise ValueError(f"{folder} has no rows for one of the panels")
    return stacked(drawn)


def _rates(peers: Json) -> dict[str, Points]:
    rows = [row for row in peers["result"]["rows"] if row["configuration"] == "plain"]
    names = {"vllm": "vLLM", "faser": "FASER"}
    return {
        shown: sorted((row["sequences"], row[name] / row["sequences"]) for row in rows)
        for name, shown in names.items()
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


if __name__ == "__main__":
    main()
