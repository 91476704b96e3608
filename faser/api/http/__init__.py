"""Beneath the application: accepts connections, and limits what each may send and how long it may take.

Imports config, errors and bodies/errors.py. Start with connection.py, then connection_pool.py.
"""
