"""Chat templates: from the messages of a chat to the text of a prompt.

Imports protocol/ for the messages. Start with chat_template.py.
"""
