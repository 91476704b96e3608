"""The log: where lines go, how they look, and which request they are about.

setup.py starts logging in either process; json_lines.py writes one JSON object a line; context.py has the request.
"""
