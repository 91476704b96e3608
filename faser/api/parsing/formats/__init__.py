"""The formats in which models write tool calls: one file per format, each an implementation of ToolParser.

registry.py names them, and the reasoning parsers. Imports the modules one folder up. Start with hermes.py.
"""
