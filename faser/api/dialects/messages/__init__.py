"""Anthropic's Messages: bodies with blocks of content, answers and events of the same shape.

Start with chat_conversion.py (what goes in) and message_framing.py (what comes out).
"""
