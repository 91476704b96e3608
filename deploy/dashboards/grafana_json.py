"""Panels and rows as what Grafana reads. Panels are of common types, so that any version from 10 on draws them."""

from typing import Any

from deploy.dashboards.panel import Panel, Row

SOURCE = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
WIDTH = 24


def _panel(panel: Panel, identity: int, x: int, y: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    options: dict[str, Any] = {}
    if panel.least is not None:
        defaults["min"] = panel.least
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "fillOpacity": 30 if panel.stacked else 8,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none"},
            "axisLabel": panel.axis,
            **({"thresholdsStyle": {"mode": "dashed"}} if panel.lines else {}),
        }
        if panel.lines:
            steps = [{"color": "green", "value": None}, *({"color": "red", "value": each} for each in panel.lines)]
            defaults["thresholds"] = {"mode": "absolute", "steps": steps}
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    elif panel.kind == "stat":
        options = {
            "textMode": "name",
            "colorMode": "none",
            "graphMode": "none",
            "reduceOptions": {"calcs": ["lastNotNull"]},
        }
    elif panel.kind == "bargauge":
        options = {
            "displayMode": "gradient",
            "orientation": "horizontal",
            "reduceOptions": {"calcs": ["lastNotNull"]},
        }
    elif panel.kind == "heatmap":
        options = {
            "calculate": False,
            "color": {"scheme": "Turbo", "mode": "scheme"},
            "yAxis": {"unit": panel.unit},
        }
    targets = [
        {
            "refId": chr(ord("A") + number),
            "datasource": SOURCE,
            "expr": expression,
            "legendFormat": legend,
            "format": "heatmap" if panel.kind == "heatmap" else "time_series",
            **({"instant": True, "range": False} if panel.instant else {}),
        }
        for number, (expression, legend) in enumerate(panel.expressions)
    ]
    return {
        "id": identity,
        "type": panel.kind,
        "title": panel.title,
        **({"description": panel.note} if panel.note else {}),
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": targets,
    }


def _variable(name: str, series: str) -> dict[str, Any]:
    query = f"label_values({series}, {name})"
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def dashboard(uid: str, title: str, rows: tuple[Row, ...]) -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for row in rows:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
                "panels": [],
            }
        )
        y += 1
        x = 0
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, y = 0, y + panel.height
            panels.append(_panel(panel, len(panels) + 1, x, y))
            x += panel.width
        y += row.panels[-1].height
    series = "vllm:num_requests_running"
    of_namespace = f'{series}{{namespace=~"$namespace"}}'
    of_model = f'{series}{{namespace=~"$namespace",model_name=~"$model_name"}}'
    return {
        "uid": uid,
        "title": title,
        "tags": ["faser"],
        "schemaVersion": 39,
        "id": None,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [
            {
                "type": "dashboards",
                "title": "FASER",
                "tags": ["faser"],
                "asDropdown": False,
                "keepTime": True,
                "includeVars": True,
            }
        ],
        "templating": {
            "list": [
                {"name": "DS_PROMETHEUS", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
                _variable("namespace", series),
                _variable("model_name", of_namespace),
                _variable("pod", of_model),
            ]
        },
        "panels": panels,
    }
