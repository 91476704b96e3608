"""Other dialects for chats: OpenAI's Responses and Anthropic's Messages. A request becomes the body of a chat.

One folder per dialect, with its body, the conversion to a chat, and the frame of its answers.
"""
