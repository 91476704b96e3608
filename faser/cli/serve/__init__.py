"""`faser serve`. Start with command.py; preparation.py opens what is needed, server.py runs it.

Imports api/ and engine/client/.
"""
