"""Settings: how one is declared, those of engine, server and speculation, vLLM's names, the sources of values.

May import types, errors and machine only; loads no torch. Start in declaration.py, then engine.py and sources.py.
"""
