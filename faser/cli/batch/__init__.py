"""`faser run-batch`: answers a file of requests without a server, here or on Ray. Start with command.py."""
