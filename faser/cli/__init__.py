"""The command line: `faser serve`, `chat`, `pull`, `bench` and `env`.

May import everything below. Start with main.py, then serve/command.py and serve/server.py.
"""
