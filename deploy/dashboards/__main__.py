"""Writes the dashboards into deploy/grafana."""

import json
from pathlib import Path

from deploy.dashboards.engine import ENGINE
from deploy.dashboards.grafana_json import dashboard
from deploy.dashboards.objectives import SLO
from deploy.dashboards.speculation import SPECULATION

DASHBOARDS = {
    "faser-slo": ("FASER: objectives", SLO),
    "faser-engine": ("FASER: engine", ENGINE),
    "faser-speculation": ("FASER: speculation", SPECULATION),
}


def write(folder: Path) -> None:
    for uid, (title, rows) in DASHBOARDS.items():
        text = json.dumps(dashboard(uid, title, rows), indent=1, ensure_ascii=False) + "\n"
        (folder / f"{uid}.json").write_text(text)


if __name__ == "__main__":
    write(Path(__file__).parents[1] / "grafana")
