"""Beneath the application: accepts connections, and limits what each may send and how long it may take.

May import config, errors and api/protocol/. Start with connection.py, then connection_pool.py.
"""
