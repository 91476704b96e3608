"""The page that a browser shows at /: its files lie in static/, and files.py serves them.

Imports http/ for paths. Start with files.py, then static/app.js.
"""
