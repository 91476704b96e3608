"""`faser run-batch`: answers a file of requests without a server. Start with command.py."""
