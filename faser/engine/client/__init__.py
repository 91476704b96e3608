"""The front-end's side of the engine: requests in, text out, over a socket to the engine's process or thread.

May import the contract, text, metrics and config; imports engine.worker only in the thread that runs it. Start
with async_engine.py.
"""
