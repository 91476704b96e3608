"""What drafts from text could bring: answers are recorded once, and drafters are replayed over them.

Start reading in __main__.py.
"""
