"""The values that cross layers, by subject: frozen, plain, without torch, HTTP or processes.

Start with request.py and answer.py.
"""
