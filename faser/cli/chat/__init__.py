"""`faser chat`: a conversation on the terminal, with a server or with a model in this process.

Start with command.py and conversation.py; remote.py and local.py provide the answers.
"""
