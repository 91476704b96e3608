"""ASGI middleware around all routes: request ids and API keys.

Imports protocol/ for error bodies. app.py puts it around the routes.
"""
