"""The Prometheus series of the server (requests, engine) and of speculation.

Imports types and config; the front-end updates the series. Start with server.py.
"""
