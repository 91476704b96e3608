"""ASGI middleware around all routes: request ids, API keys, and bodies that nobody reads.

Imports protocol/ for error bodies. app.py puts it around the routes.
"""
