"""The command line: one module a command, and a folder for `faser serve`.

May import everything below. Start with main.py, then serve/command.py and serve/server.py.
"""
