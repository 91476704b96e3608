"""OpenAI's chats, completions and Responses, Anthropic's Messages: a file for requests, and one for answers.

generation.py has the steps that all share. Responses and Messages become the body of a chat; conversion.py has
what they share. Start with completions_requests.py.
"""
