"""`faser serve`: settings, the listening socket, the server and its lifetime.

Imports api/ and engine/client/. Start with command.py, then server.py and lifetime.py.
"""
