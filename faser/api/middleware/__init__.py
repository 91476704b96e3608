"""ASGI middleware around all routes: request ids, API keys, their limits, spans, and bodies that are never read.

Imports http/paths.py, and bodies/ for errors. app.py puts it around the routes.
"""
