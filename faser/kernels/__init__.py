"""Backends: the arithmetic of a model's step on one device, behind one interface.

interface/ is the contract; torch_backend.py, cpu/ and cuda/ implement it. factory.py chooses a backend by name and
imports only that one. Imports errors, types and config, never the engine. Start reading at interface/backend.py.
"""
