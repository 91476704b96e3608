"""The page that a browser shows at /: its files lie in static/, and files.py serves them.

live_feed.py makes what its live view shows. Imports bodies/, requests/ and answers/. Start with files.py, then
static/app.js.
"""
