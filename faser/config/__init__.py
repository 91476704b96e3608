"""Settings: how one is declared, those of engine, server and speculation, the table of drafters, vLLM's names.

May import types, errors and machine only; loads no torch. Start reading in declaration.py, then engine.py.
"""
