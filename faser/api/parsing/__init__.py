"""From the text of an answer to its reasoning, content and tool calls, piece by piece as the text arrives.

Imports the engine's tokenizer and nothing else of the API. Start with events.py and answer_parser.py; registry.py
names the formats of tool calls.
"""
