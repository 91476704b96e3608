"""Traces: spans of requests, made and sent by OpenTelemetry's SDK. Knows neither HTTP nor engines.

span.py is the contract; opentelemetry.py implements it and is imported only where traces are asked for.
"""
