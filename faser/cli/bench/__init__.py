"""`faser bench`: measures speculation on this machine, in turns. Start with command.py."""
