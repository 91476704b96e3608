"""What the HTTP API offers, field by field: cases.py tries each one, page.py writes docs/api.md from the schemas.

A field without a case, and a page that says something else than the code, fail test_surface.py.
"""
