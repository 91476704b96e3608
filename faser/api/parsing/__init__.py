"""From the text of an answer to its reasoning, content and tool calls, piece by piece as the text arrives.

Imports the engine's tokenizer and nothing else of the API. formats/ has one file per format of tool calls, and the
registry of all parsers.
Start with events.py and answer_parser.py.
"""
