"""Delivery and operation of FASER: image, wheel, chart, rules, dashboards. Not in the wheel itself.

Start reading at README.md. The package imports `faser`, which never imports it.
"""
