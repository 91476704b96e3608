"""Writes the dashboards of deploy/grafana: `python -m deploy.dashboards`.

A dashboard is rows of panels, and has a file of its own. panel.py says what a panel is, expressions.py has the
PromQL that several share, and grafana_json.py turns all of it into what Grafana reads.
"""
