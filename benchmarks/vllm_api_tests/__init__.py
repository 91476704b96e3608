"""Runs the API tests that vLLM ships in its source package against `faser serve`. Nothing of theirs is kept here.

Imports nothing of vLLM. Start with __main__.py; selection.py says which tests run, and why the others do not.
"""
