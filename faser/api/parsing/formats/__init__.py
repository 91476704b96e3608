"""The formats in which models write tool calls: one file per format, each an implementation of ToolParser.

Imports text_cursor.py, tool_parser.py and events.py, one folder up. Start with hermes.py.
"""
