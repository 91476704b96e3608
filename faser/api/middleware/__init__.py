"""ASGI middleware around all routes: request ids, CORS, API keys and their limits, and bodies that are never read.

Imports protocol/ for error bodies. app.py puts it around the routes.
"""
