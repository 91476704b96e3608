"""OpenAI's Responses, without state: nothing is stored, and what needs a stored response is refused by name.

Start with chat_conversion.py (what goes in) and response_framing.py (what comes out).
"""
