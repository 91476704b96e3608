"""A head that is refreshed while the engine serves: the process that learns, and when it may.

Imports the contract, client.traffic and faser.metrics; never torch. Start with refresher.py.
"""
