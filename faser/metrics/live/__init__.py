"""The numbers of the live view: what the last two minutes were like, second by second.

Imports types. metrics/server.py reports events to it, the front-end sends what it makes. Start with recorder.py.
"""
