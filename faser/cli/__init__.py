"""The command line: one module a command.

May import everything below. Start with main.py, then serve.py, server.py and application.py.
"""
